"""The rotation is orthogonal, and rows, columns and pieces of a matrix are rotated alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.checkpoint.source import LazyTensor
from hermes.rewrite.model import by_columns, by_rows
from hermes.rewrite.rotate import Rotation


def held(values: np.ndarray) -> LazyTensor:
    """An array as an opened checkpoint presents it."""
    return LazyTensor("w", values.shape, str(values.dtype), "w", lambda a, b: values[a:b])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 45), st.integers(0, 99))
def test_any_width_has_an_orthogonal_matrix(power: int, odd: int, seed: int) -> None:
    width = (odd | 1) << power
    if width > 700:
        return
    rotation = Rotation(width, seed)
    matrix = rotation.rows(np.eye(width))
    assert np.abs(matrix @ matrix.T - np.eye(width)).max() < 1e-12
    values = np.random.default_rng(seed).standard_normal((3, width))
    assert np.abs(rotation.rows(values) - values @ matrix).max() < 1e-12
    assert np.abs(rotation.columns(values.T) - matrix.T @ values.T).max() < 1e-12
    single = rotation.rows(values.astype(np.float32))
    assert single.dtype == np.float32
    assert np.abs(single - values @ matrix).max() < 1e-5


def test_a_spike_is_spread_over_all_channels() -> None:
    spike = np.zeros((1, 576))
    spike[0, 17] = 1000.0
    spread = np.abs(Rotation(576).rows(spike))
    assert spread.max() < 1000 / 576**0.5 * 3
    assert (spread > 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slices_are_those_of_the_whole(dtype: str) -> None:
    values = np.random.default_rng(4).standard_normal((192, 500))
    stored = held(values.astype(np.float32))
    rotation = Rotation(192, 3)
    matrix = rotation.rows(np.eye(192))
    columns = by_columns(stored, rotation.columns, dtype)  # type: ignore[arg-type]
    rows = by_rows(held(values.T.astype(np.float32).copy()), rotation.rows, dtype)  # type: ignore[arg-type]
    wanted = matrix.T @ stored.stored().astype(np.float64)
    limit = 1e-5 if dtype == "float32" else 1e-12
    for _ in range(2):
        pieces = [columns.stored(start, start + 64) for start in (0, 64, 128)]
        assert np.abs(np.concatenate(pieces) - wanted).max() < limit
    assert np.abs(rows.stored() - wanted.T).max() < limit
    assert rows.stored().dtype == columns.stored().dtype == np.dtype(dtype)
