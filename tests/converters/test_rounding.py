"""Rounding with error feedback is GPTQ, and keeps what the calibration tokens see."""

from __future__ import annotations

import numpy as np
import pytest

from converters.quantize import quantize_rows
from converters.rounding import DAMPING, ErrorFeedback, Tile, leading_directions
from hermes.recipe import QuantizationRule

LIMITS = (-127, 127)
RULE = QuantizationRule("*", "int8", "channel", "calibrated")


def dense_gptq(weights: np.ndarray, inputs: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The published algorithm: the inverse Hessian's Cholesky factor, columns x columns."""
    columns = inputs.shape[1]
    hessian = inputs.T @ inputs
    hessian += DAMPING * np.trace(hessian) / columns * np.eye(columns)
    factor = np.linalg.cholesky(np.linalg.inv(hessian)).T
    left, rounded = weights.astype(np.float64).copy(), np.empty(weights.shape)
    for column in range(columns):
        value = left[:, column] / scales
        rounded[:, column] = np.clip(np.rint(value), -127, 127)
        error = (left[:, column] - rounded[:, column] * scales) / factor[column, column]
        left[:, column:] -= np.outer(error, factor[column, column:])
    return rounded


@pytest.mark.parametrize(("tokens", "columns"), [(5, 48), (40, 33), (1, 16), (60, 40)])
def test_equal_to_dense_gptq(tokens: int, columns: int) -> None:
    generator = np.random.default_rng(tokens)
    inputs = generator.standard_normal((tokens, columns)).astype(np.float32)
    inputs[0] *= 20  # a token like the first of a text
    weights = generator.standard_normal((30, columns)).astype(np.float32)
    scales = np.abs(weights).max(axis=1) / np.float32(127)
    found = ErrorFeedback(inputs, block=1).round(weights, scales[:, None], LIMITS)
    wanted = dense_gptq(weights, inputs.astype(np.float64), scales)
    # One value at the edge between two integers changes what follows it in its row.
    same = (found == wanted).all(axis=1).mean()
    assert same > 0.95, same


def test_a_sign_error_would_be_seen() -> None:
    """The comparison can fail: feedback of the wrong sign is far from GPTQ."""
    generator = np.random.default_rng(3)
    inputs = generator.standard_normal((20, 32)).astype(np.float32)
    weights = generator.standard_normal((30, 32)).astype(np.float32)
    scales = np.abs(weights).max(axis=1) / np.float32(127)
    feedback = ErrorFeedback(inputs, block=1)
    feedback._gains = -feedback._gains
    wrong = feedback.round(weights, scales[:, None], LIMITS)
    wanted = dense_gptq(weights, inputs.astype(np.float64), scales)
    assert (wrong == wanted).all(axis=1).mean() < 0.2


def test_errors_cancel_on_the_inputs() -> None:
    generator = np.random.default_rng(4)
    inputs = generator.standard_normal((16, 128)).astype(np.float32)
    weights = generator.standard_normal((64, 128)).astype(np.float32)
    errors = []
    for feedback in (None, ErrorFeedback(inputs, block=1), ErrorFeedback(inputs)):
        stored = quantize_rows(weights, RULE, None, feedback)
        values = np.frombuffer(stored.data, np.int8).reshape(weights.shape) * stored.scales[:, None]
        errors.append(np.square(inputs @ (values - weights).T).mean())
    assert errors[1] < errors[0] / 10
    assert errors[2] < errors[0] / 5


def test_inputs_of_zeros_round_to_nearest() -> None:
    weights = np.random.default_rng(5).standard_normal((8, 20)).astype(np.float32)
    nearest = quantize_rows(weights, RULE)
    fed = quantize_rows(weights, RULE, None, ErrorFeedback(np.zeros((4, 20), np.float32)))
    assert fed.data == nearest.data
    assert np.array_equal(fed.scales, nearest.scales)


def test_the_leading_directions_stand_for_all_tokens() -> None:
    """40 tokens of 4 directions and little noise: the errors on them are as small with 4 rows."""
    generator = np.random.default_rng(6)
    inputs = generator.standard_normal((40, 4)) @ generator.standard_normal((4, 128))
    inputs = (inputs + 1e-3 * generator.standard_normal(inputs.shape)).astype(np.float32)
    few = leading_directions(inputs, 4)
    assert few.shape == (4, 128)
    assert np.abs(few.T @ few - inputs.T @ inputs).max() < 1e-3 * np.abs(inputs.T @ inputs).max()
    assert leading_directions(inputs, 40) is inputs
    weights = generator.standard_normal((64, 128)).astype(np.float32)
    errors = []
    for seen in (inputs, few, leading_directions(inputs, 1)):
        stored = quantize_rows(weights, RULE, None, ErrorFeedback(seen))
        values = np.frombuffer(stored.data, np.int8).reshape(weights.shape) * stored.scales[:, None]
        errors.append(np.square(inputs @ (values - weights).T).mean())
    assert errors[1] < errors[0] * 1.2
    assert errors[2] > errors[0] * 2


@pytest.mark.parametrize("groups", [1, 4])
def test_a_tile_is_rounded_as_its_rows(groups: int) -> None:
    """Rows that come in pieces, and scales by block, which are not the unit of a whole row."""
    generator = np.random.default_rng(7)
    inputs = generator.standard_normal((12, 128)).astype(np.float32)
    weights = generator.standard_normal((70, 128)).astype(np.float32)
    scales = np.abs(weights.reshape(70, groups, -1)).max(axis=2) / np.float32(127)
    feedback = ErrorFeedback(inputs)
    tile = Tile(80, 128)
    for start in (0, 30, 60):
        tile.add(weights[start : start + 30], scales[start : start + 30])
    assert tile.room == 10
    found = feedback.round_tile(tile, LIMITS)
    alone = [feedback.round(weights[r : r + 1], scales[r : r + 1], LIMITS) for r in range(70)]
    assert (found == np.concatenate(alone)).all(axis=1).mean() > 0.95
    assert np.array_equal(tile.scales, scales)
    nearest = np.rint(weights / np.repeat(scales, 128 // groups, axis=1))
    wide = np.repeat(scales, 128 // groups, axis=1)
    off = [np.square(inputs @ (n * wide - weights).T).mean() for n in (found, nearest)]
    assert off[0] < off[1] / 4
