"""Every operation is undone by its inverse, row reads equal whole reads, and numbers are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import rotate

from hermes.checkpoint.source import LazyTensor, stored_rows
from hermes.config import HermesConfig
from hermes.layouts.operations import (
    Context,
    Operation,
    Pairing,
    Rotary,
    Same,
    SplitRows,
    Transpose,
    halves_to_pairs,
    pairs_to_halves,
)

CONFIG = HermesConfig(hidden_size=12, num_heads=6, num_kv_heads=2, head_dim=4)


def lazy(value: torch.Tensor) -> LazyTensor:
    return LazyTensor("x", tuple(value.shape), "float32", "x", lambda a, b: stored_rows(value[a:b]))


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
@pytest.mark.parametrize(
    ("operation", "shapes"),
    [
        (Same(), [(24, 12)]),
        (Rotary("num_heads"), [(24, 12)]),
        (Rotary("num_heads"), [(24,)]),
        (Rotary("num_kv_heads"), [(8, 12)]),
        (Rotary("one"), [(4,)]),
        (Transpose(), [(24, 12)]),
        (
            SplitRows((Rotary("num_heads"), Rotary("num_kv_heads"), Same())),
            [(24, 12), (8, 12), (8, 12)],
        ),
    ],
)
def test_save_then_load_is_the_identity(
    operation: Operation, shapes: list[tuple[int, ...]], pairing: Pairing
) -> None:
    context = Context(CONFIG, pairing)
    values = [torch.randn(shape) for shape in shapes]
    saved = operation.save([lazy(value) for value in values], context)
    assert [tensor.shape for tensor in saved] == operation.source_shapes(shapes, context)
    loaded = operation.load(saved, shapes, context)
    for value, tensor in zip(values, loaded, strict=True):
        assert tensor.shape == tuple(value.shape)
        assert torch.equal(tensor.read(), value)
        for start, stop in ((0, 1), (1, 3), (3, len(value)), (2, 2)):
            assert torch.equal(tensor.read(start, stop), value[start:stop])
    for tensor in saved:
        assert torch.equal(tensor.read(1, 4), tensor.read()[1:4])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_reordering_preserves_attention_scores(heads: int, half: int, columns: int) -> None:
    width = 2 * half
    rows = torch.randn(heads * width, columns, dtype=torch.float64)
    halves = torch.from_numpy(pairs_to_halves(rows.numpy(), width))
    assert np.array_equal(halves_to_pairs(halves.numpy(), width), rows.numpy())
    hidden = torch.randn(3, columns, dtype=torch.float64)
    angles = torch.randn(3, half, dtype=torch.float64)
    scores = []
    for stored, style in ((rows, "interleaved"), (halves, "half")):
        turned = rotate((hidden @ stored.T).view(3, heads, width), angles, style)
        scores.append(torch.einsum("qhd,khd->hqk", turned, turned))
    assert torch.allclose(scores[0], scores[1], atol=1e-9)


def test_the_wrong_head_count_destroys_the_scores() -> None:
    rows = np.arange(32.0)
    assert not np.array_equal(pairs_to_halves(rows, 16), pairs_to_halves(rows, 8))
