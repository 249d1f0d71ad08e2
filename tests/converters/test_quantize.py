"""The quantization formula by hand, and bit for bit against ai-edge-quantizer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.quantize import quantize_rows
from hermes.recipe import QuantizationRule

CHANNEL = QuantizationRule("*", "int8", "channel")
TENSOR = QuantizationRule("*", "int8", "tensor")
BLOCKS = QuantizationRule("*", "int4", "block32")


def stored(data: bytes, shape: tuple[int, int]) -> list[list[int]]:
    values: list[list[int]] = np.frombuffer(data, np.int8).reshape(shape).tolist()
    return values


def test_one_scale_per_row() -> None:
    rows = np.array([[127.0, -64.0, 0.0], [-2.54, 1.27, 0.0], [0.0, 0.0, 0.0]], np.float32)
    result = quantize_rows(rows, CHANNEL)
    assert stored(result.data, (3, 3)) == [[127, -64, 0], [-127, 64, 0], [0, 0, 0]]
    assert result.scales is not None
    assert result.scales.dtype == np.float32
    assert result.scales.tolist() == pytest.approx([1.0, 0.02, 1e-9 / 127], rel=1e-6)


def test_halves_go_to_even_and_nothing_becomes_minus_128() -> None:
    rows = np.array(
        [[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], [-127.0] + 7 * [-126.5]], np.float32
    )
    assert stored(quantize_rows(rows, CHANNEL).data, (2, 8)) == [
        [127, 0, 2, 2, 0, -2, -2, 126],
        [-127, *7 * [-126]],
    ]


def test_rows_below_the_smallest_amplitude_become_zero() -> None:
    result = quantize_rows(np.array([[1e-12, -1e-12], [1e-40, 0.0]], np.float32), CHANNEL)
    assert stored(result.data, (2, 2)) == [[0, 0], [0, 0]]


def test_one_scale_per_tensor() -> None:
    rows = np.array([[127.0, -64.0], [12.7, 0.0]], np.float32)
    result = quantize_rows(rows, TENSOR, amplitude=254.0)
    assert stored(result.data, (2, 2)) == [[64, -32], [6, 0]]
    assert result.scales is not None
    assert result.scales.tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="amplitude"):
        quantize_rows(rows, TENSOR)


def test_float_rows_are_stored_as_they_are() -> None:
    rows = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    result = quantize_rows(rows, QuantizationRule("*", "float32"))
    assert result.data == rows.tobytes()
    assert result.scales is None


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 60),
    exponent=st.floats(-12, 12),
    seed=st.integers(0, 10**6),
    grid=st.booleans(),
    granularity=st.sampled_from(["channel", "tensor"]),
)
def test_bits_are_those_of_ai_edge_quantizer(
    rows: int, columns: int, exponent: float, seed: int, grid: bool, granularity: str
) -> None:
    from ai_edge_quantizer import qtyping
    from ai_edge_quantizer.algorithms.uniform_quantize import uniform_quantize_tensor as theirs

    generator = np.random.default_rng(seed)
    values = generator.standard_normal((rows, columns))
    if grid:  # exact halves and zero rows are common
        values = np.rint(values * 4) / 2 * (generator.random((rows, 1)) > 0.2)
    values = (values * 10.0**exponent).astype(np.float32)
    axis = 1 if granularity == "channel" else (0, 1)
    kind = {
        "channel": qtyping.QuantGranularity.CHANNELWISE,
        "tensor": qtyping.QuantGranularity.TENSORWISE,
    }[granularity]
    zero_point, scale = theirs.tensor_zp_scale_from_min_max(
        values.min(axis=axis, keepdims=True), values.max(axis=axis, keepdims=True), 8, True, kind
    )
    dimension = 0 if granularity == "channel" else None
    parameters = qtyping.UniformQuantParams(8, dimension, scale, zero_point)
    expected = theirs.uniform_quantize(values, parameters)
    rule = CHANNEL if granularity == "channel" else TENSOR
    result = quantize_rows(values, rule, float(np.abs(values).max()))
    assert result.scales is not None
    broadcast = np.broadcast_to(scale.astype(np.float32).ravel(), rows)
    assert result.scales.tobytes() == np.ascontiguousarray(broadcast).tobytes()
    assert result.data == expected.tobytes()


def test_a_blocks_scale_is_the_tried_one_of_least_square_error() -> None:
    rows = np.random.default_rng(11).standard_normal((40, 96)).astype(np.float32)
    result = quantize_rows(rows, BLOCKS)
    assert result.scales is not None
    groups = rows.reshape(40, 3, 32).astype(np.float64)
    fitting = np.abs(groups).max(axis=2) / 7
    shares = result.scales / fitting
    assert shares.max() < 1.01
    assert (shares < 0.99).mean() > 0.1

    def errors(scales: np.ndarray) -> np.ndarray:
        steps = np.clip(np.rint(groups / scales[..., None]), -7, 7)
        return np.square(steps * scales[..., None] - groups).sum(axis=2)

    found = errors(result.scales.astype(np.float64))
    for share in (1, 0.95, 0.9, 0.85, 0.8, 0.75):
        assert (found < errors(fitting * share) * 1.1).all()  # scales have 8 bits
    assert found.sum() < 0.95 * errors(fitting).sum()
