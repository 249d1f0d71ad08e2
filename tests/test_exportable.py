"""The exportable module gives the reference's logits however the prompt is fed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_llama import (
    PROMPT_IDS,
    hermes_config,
    hermes_scaling,
    hermes_weights,
    largest_gap,
    reference_logits,
    tiny_config,
    tiny_weights,
)

from hermes.config import HermesConfig, RopeScaling
from hermes.exportable import batched_matmul, cache_write
from hermes.recipe import ExportShapes, GraphOptions
from hermes.rotary import rope_rows
from hermes.runners.exportable import ExportableRunner

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONTEXT = 16
FEEDS = [
    [(0, 12, 12)],
    [(0, 4, 4), (4, 8, 4), (8, 12, 4)],
    [(0, 3, 4), (3, 4, 4), (4, 11, 12)],  # padded rows, a single token, padded again
    [(0, 4, 12), (4, 8, 4), (8, 9, 1)],
    [],
]
"""(first id, last id + 1, rows of the signature) of every prefill; the rest is decoded."""


def runner_for(
    config: dict[str, Any], weights: dict[str, torch.Tensor], options: GraphOptions, **changes: Any
) -> ExportableRunner:
    state = hermes_weights(weights)
    hermes = hermes_config(config, **changes)
    return ExportableRunner(hermes, ExportShapes(CONTEXT, (1, 4, 12)), options, state)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("variant", ["untied", "tied", "everything"])
def test_every_feeding_gives_the_reference(variant: str, fused: bool) -> None:
    config = tiny_config(tie_word_embeddings=variant == "tied")
    weights = tiny_weights(config, bias=variant == "everything")
    changes: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if variant == "everything":
        options = {"scaling": LLAMA3, "no_rope_layers": (0,), "rope_amplitude": 1.2}
        changes = {
            "attention_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True,
            "no_rope_layers": (0,), "rope_amplitude": 1.2, "rope_scaling": hermes_scaling(LLAMA3),
        }  # fmt: skip
        draw = torch.Generator().manual_seed(5)
        for layer in range(2):
            for name, width in (("gate", 96), ("up", 96), ("down", 64)):
                weights[f"model.layers.{layer}.mlp.{name}_proj.bias"] = torch.randn(
                    width, generator=draw
                )
            for name in ("q_norm", "k_norm"):
                key = f"model.layers.{layer}.self_attn.{name}.weight"
                weights[key] = 0.5 + torch.rand(16, generator=draw)
    expected = reference_logits(weights, config, [*PROMPT_IDS, 9, 8, 7, 6], **options)
    runner = runner_for(config, weights, GraphOptions(fused, fused), **changes)
    for feed in FEEDS:
        runner.reset()
        ids = [*PROMPT_IDS, 9, 8, 7, 6]
        for start, stop, length in feed:
            runner.prefill(ids[start:stop], start, length)
        done = feed[-1][1] if feed else 0
        for position in range(done, CONTEXT):  # to the last slot
            logits = torch.from_numpy(runner.step(ids[position], position))
            assert largest_gap(logits, expected[position]) < 1e-4, (feed, position)


def test_a_context_cannot_be_overrun() -> None:
    config = tiny_config()
    runner = runner_for(config, tiny_weights(config), GraphOptions())
    runner.step(3, CONTEXT - 1)
    for call in (lambda: runner.step(3, CONTEXT), lambda: runner.prefill([1], CONTEXT - 3, 4)):
        with pytest.raises(ValueError, match="do not fit 16 slots"):
            call()


@pytest.mark.parametrize("kind", ["none", "linear", "llama3"])
def test_rotary_rows_follow_the_formula(kind: str) -> None:
    scaling = None if kind == "none" else RopeScaling(kind, 8.0, 1.0, 4.0, 32)  # type: ignore[arg-type]
    config = HermesConfig(head_dim=16, rope_scaling=scaling, rope_amplitude=1.5)
    cos, sin = rope_rows(config, 33)
    assert cos.dtype == sin.dtype == np.float32
    for position in (0, 1, 7, 32):
        for pair in range(8):
            rate = 10000.0 ** (-2 * pair / 16)
            wavelength = 2 * math.pi / rate
            if kind == "linear" or (kind == "llama3" and wavelength > 32 / 1.0):
                rate /= 8
            elif kind == "llama3" and wavelength > 32 / 4.0:
                keep = (32 / wavelength - 1.0) / (4.0 - 1.0)
                rate = (1 - keep) * rate / 8 + keep * rate
            angle = position * rate
            for column in (pair, pair + 8):
                sign = -1 if column < 8 else 1
                assert cos[position, column] == pytest.approx(1.5 * math.cos(angle), abs=1e-5)
                assert sin[position, column] == pytest.approx(
                    sign * 1.5 * math.sin(angle), abs=1e-5
                )


@pytest.mark.parametrize(("axis", "start", "landed"), [(2, 3, 3), (3, 0, 0), (2, 9, 6), (3, -2, 0)])
def test_cache_write_clamps_as_the_operator_does(axis: int, start: int, landed: int) -> None:
    cache = torch.randn(1, 2, 8, 8)
    shape = [1, 2, 8, 8]
    shape[axis] = 2
    update = torch.randn(*shape)
    before = cache.clone()
    written = cache_write(cache, update, torch.tensor(start, dtype=torch.int32), axis)
    assert torch.equal(cache, before)
    assert torch.equal(written.narrow(axis, landed, 2), update)
    untouched = [i for i in range(8) if i not in (landed, landed + 1)]
    keep = torch.tensor(untouched)
    assert torch.equal(written.index_select(axis, keep), cache.index_select(axis, keep))


def test_batched_matmul_contracts_the_last_axes() -> None:
    left, right = torch.randn(1, 3, 4, 5), torch.randn(1, 3, 6, 5)
    expected = torch.einsum("abij,abkj->abik", left.double(), right.double())
    assert largest_gap(batched_matmul(left, right), expected) < 1e-5
