"""Layer by layer, with one layer's weights in memory, the logits are the reference's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from graph_models import lazy, tiny_model

from converters.float_models import open_float_models, reference_model
from hermes.checkpoint.source import LazyTensor
from hermes.rewrite import RewritableModel, rewrite_model
from hermes.runners.layerwise import LayerwiseScorer
from hermes.runners.reference import ReferenceRunner

TEXT = [(37 * i + 11) % 128 for i in range(200)]


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_same_logits(extras: bool, tied: bool) -> None:
    config, state = tiny_model(3, extras=extras, tied=tied)
    config = replace(config, max_seq_len=256, no_rope_layers=(1,))
    weights = lazy(state)
    wanted = np.stack(list(ReferenceRunner(reference_model(config, weights)).score(TEXT)))
    found = np.stack(list(LayerwiseScorer(config, weights).score(TEXT)))
    assert np.abs(found - wanted).max() < 1e-5
    assert float(wanted.std()) > 0.1


def test_one_layer_at_a_time() -> None:
    """No tensor is read twice, and a layer's are gone before the next one's are read."""
    config, state = tiny_model(4, extras=False, tied=False)
    config = replace(config, max_seq_len=256)
    order: list[str] = []

    def watched(tensor: LazyTensor) -> LazyTensor:
        def read(start: int, stop: int) -> object:
            order.append(tensor.name)
            return tensor.reader(start, stop)

        return replace(tensor, reader=read)  # type: ignore[arg-type]

    weights = {name: watched(tensor) for name, tensor in lazy(state).items()}
    list(LayerwiseScorer(config, weights).score(TEXT))
    layers = [int(name.split(".")[1]) for name in order if name.startswith("layers.")]
    assert layers == sorted(layers)
    matrices = [name for name in order if name.endswith("proj.weight")]
    assert len(matrices) == len(set(matrices)) == 4 * 7


def test_memory_decides() -> None:
    config, state = tiny_model(2, extras=False, tied=False)
    original = RewritableModel(config, lazy(state))
    names = ("fold_norm_gains", "rotate_residual")
    rewritten = rewrite_model(config, lazy(state), names)
    whole = open_float_models(original, rewritten, (8,), memory=10**9)
    assert whole.reason == ""
    assert whole.module is not None
    small = open_float_models(original, rewritten, (8,), memory=10**4)
    assert "GB in float32" in small.reason
    assert small.module is None
    assert small.rewritten is not None
    assert whole.rewritten is not None
    for one, other in ((whole.reference, small.reference), (whole.rewritten, small.rewritten)):
        wanted, found = (np.stack(list(scorer.score(TEXT[:60]))) for scorer in (one, other))
        assert np.abs(found - wanted).max() < 1e-4
    assert torch.is_grad_enabled()
