"""Rung 5 sees a broken quantization (case B40), on the fixture with outliers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from tiny_llama import hermes_config, hermes_weights, tiny_config, tiny_weights
from torch import Tensor

from hermes.model import HermesForCausalLM
from hermes.recipe import Limits
from hermes.runners.reference import ReferenceRunner
from hermes.verify.quantized import QuantizedResult, check_quantized, windows

UNTIED = tiny_config(tie_word_embeddings=False)
TEXT = [(37 * i + 11) % 128 for i in range(60)]
LIMITS = Limits(positions=60)


def outlier_weights() -> dict[str, Tensor]:
    weights = tiny_weights(UNTIED)
    for layer in range(2):
        weights[f"model.layers.{layer}.mlp.down_proj.weight"][0] *= 40
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"][3] *= 40
    weights["model.embed_tokens.weight"][50] *= 60
    return weights


def per_tensor(weight: Tensor) -> Tensor:
    scale = weight.abs().max() / 127
    return (weight / scale).round() * scale


def per_channel(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def plain_cast(weight: Tensor) -> Tensor:
    return weight.to(torch.int8).float()


def runner(weights: Mapping[str, Tensor], name: str) -> ReferenceRunner:
    model = HermesForCausalLM(hermes_config(UNTIED))
    model.load_state_dict(hermes_weights(weights))
    result = ReferenceRunner(model)
    result.name = name
    return result


def verify(quantize: Callable[[Tensor], Tensor], limits: Limits = LIMITS) -> QuantizedResult:
    weights = outlier_weights()
    changed = {name: quantize(w) if w.ndim == 2 else w for name, w in weights.items()}
    return check_quantized(runner(weights, "reference"), runner(changed, "int8"), TEXT, limits)


def test_b40_per_channel_passes_with_the_reports_figures() -> None:
    result = verify(per_channel)
    assert all(check.passed for check in result.checks)
    assert float(result.comparison.top1.mean()) == pytest.approx(0.983, abs=1e-3)
    assert float(result.comparison.kl.mean()) == pytest.approx(0.0013, abs=1e-4)


def test_b40_per_tensor_fails_with_the_reports_figures() -> None:
    result = verify(per_tensor)
    red = {check.name for check in result.checks if not check.passed}
    assert red == {"mean KL, int8", "top-1 agreement, int8"}
    assert float(result.comparison.top1.mean()) == pytest.approx(0.283, abs=1e-3)
    assert float(result.comparison.kl.mean()) == pytest.approx(0.468, abs=1e-3)


def test_b40_a_plain_cast_fails() -> None:
    red = {check.name for check in verify(plain_cast).checks if not check.passed}
    assert {"mean KL, int8", "top-1 agreement, int8"} <= red


def test_too_little_text_fails() -> None:
    result = verify(per_channel, Limits(positions=61))
    (red,) = [check for check in result.checks if not check.passed]
    assert (red.name, red.value, red.limit) == ("positions compared", 60, 61)


def test_text_longer_than_the_context_is_cut_into_windows() -> None:
    assert [list(part) for part in windows(range(10), 9, 4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8],
    ]
    weights = tiny_weights(UNTIED)
    text = (TEXT * 3)[:150]  # the context has 64 slots
    same = check_quantized(
        runner(weights, "reference"), runner(weights, "int8"), text, Limits(positions=150)
    )
    assert same.comparison.positions == 150
    assert float(same.comparison.kl.max()) < 1e-9
    assert same.comparison.top1.all()
