"""A fault in one layer is named with its layer and tensor, in torch and in the flatbuffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_llama import hermes_config, hermes_weights, tiny_config, tiny_weights
from torch import Tensor

from hermes.model import HermesForCausalLM
from hermes.recipe import ExportShapes, GraphOptions
from hermes.runners.exportable import ExportableRunner
from hermes.runners.reference import ReferenceRunner
from hermes.verify.localise import by_layer, check_layers, layer_differences, snapshot

FIELDS = tiny_config(tie_word_embeddings=False, num_hidden_layers=3)
WEIGHTS = hermes_weights(tiny_weights(FIELDS))
CONFIG = hermes_config(FIELDS)
TEXT = [(37 * i + 11) % 128 for i in range(64)]


def exportable(weights: dict[str, Tensor]) -> ExportableRunner:
    return ExportableRunner(CONFIG, ExportShapes(64, (8,)), GraphOptions(), weights)


@pytest.fixture(scope="module")
def reference() -> ReferenceRunner:
    model = HermesForCausalLM(CONFIG)
    model.load_state_dict(WEIGHTS)
    return ReferenceRunner(model, (8,))


@pytest.mark.parametrize("count", [32, 64])
def test_equal_stages_have_equal_caches(reference: ReferenceRunner, count: int) -> None:
    found = snapshot(exportable(WEIGHTS), TEXT, count)
    wanted = snapshot(reference, TEXT, count)
    assert found is not None
    assert wanted is not None
    assert list(wanted) == ["k_0", "v_0", "k_1", "v_1", "k_2", "v_2"]
    assert wanted["k_0"].shape == (2, count, 16)
    check = check_layers(3, "exportable", "reference", layer_differences(found, wanted), 1e-4)
    assert check.passed, check.detail


@pytest.mark.parametrize(
    ("damaged", "first"),
    [
        ("layers.1.self_attn.k_proj.weight", "layer 1 keys"),
        ("layers.1.self_attn.v_proj.weight", "layer 1 values"),
        ("layers.0.mlp.up_proj.weight", "layer 1 keys"),
        ("layers.0.self_attn.q_proj.weight", "layer 1 keys"),
    ],
)
def test_the_first_wrong_tensor_is_named(
    reference: ReferenceRunner, damaged: str, first: str
) -> None:
    wrong = exportable({**WEIGHTS, damaged: WEIGHTS[damaged].flip(0)})
    found, wanted = snapshot(wrong, TEXT, 32), snapshot(reference, TEXT, 32)
    assert found is not None
    assert wanted is not None
    differences = layer_differences(found, wanted)
    check = check_layers(3, "exportable", "reference", differences, 1e-3)
    assert not check.passed
    assert f"first above it: {first}, position" in check.detail
    assert by_layer(differences)[0] == pytest.approx(0, abs=1e-5) or first.startswith("layer 0")


def test_nan_is_infinitely_far() -> None:
    right = {"k_0": np.ones((1, 2, 4), np.float32), "v_0": np.ones((1, 2, 4), np.float32)}
    wrong = {**right, "v_0": np.full((1, 2, 4), np.nan, np.float32)}
    check = check_layers(4, "a", "b", layer_differences(wrong, right), 1.0)
    assert not check.passed
    assert "layer 0 values" in check.detail


def test_a_runner_without_a_cache_is_left_out() -> None:
    class Blind:
        capacity, prefill_lengths, vocab_size, name = 64, (8,), 128, "blind"

        def reset(self) -> None: ...

        def prefill(self, ids: object, position: int, length: int) -> None: ...

        def step(self, token: int, position: int) -> np.ndarray:
            return torch.zeros(1).numpy()

    assert snapshot(Blind(), TEXT, 8) is None  # type: ignore[arg-type]
