"""Rounding with error feedback is GPTQ, and keeps what the calibration tokens see."""

from __future__ import annotations

import numpy as np
import pytest

from converters.quantize import quantize_rows
from converters.rounding import BLOCK, DAMPING, ErrorFeedback, leading_directions
from hermes.recipe import QuantizationRule

LARGEST = 127
RULE = QuantizationRule("*", "int8", "channel", "calibrated")


def dense_gptq(
    weights: np.ndarray, inputs: np.ndarray, scales: np.ndarray, block: int
) -> np.ndarray:
    """GPTQ by blocks as its objective says, with columns x columns matrices and no updates of them.

    After a block is rounded, the columns behind it take the values that minimise
    |E X^T|^2 + damping |E|^2 given its errors.
    """
    columns = inputs.shape[1]
    hessian = inputs.T @ inputs
    hessian += DAMPING * np.trace(hessian) / columns * np.eye(columns)
    left, rounded = weights.astype(np.float64).copy(), np.empty(weights.shape)
    for start in range(0, columns, block):
        now, behind = slice(0, min(start + block, columns)), slice(start + block, columns)
        here = slice(start, now.stop)
        rounded[:, here] = np.clip(np.rint(left[:, here] / scales[:, None]), -LARGEST, LARGEST)
        errors = rounded[:, now] * scales[:, None] - weights[:, now]
        free = -errors @ hessian[now, behind] @ np.linalg.inv(hessian[behind, behind])
        left[:, behind] = weights[:, behind] + free
    return rounded


@pytest.mark.parametrize(("tokens", "columns"), [(5, 48), (40, 33), (1, 16), (60, 40), (16, 8)])
def test_equal_to_dense_gptq(tokens: int, columns: int) -> None:
    weights, inputs, scales = planted(tokens, columns)
    found = ErrorFeedback(inputs).round(weights, scales[:, None], LARGEST)
    wanted = dense_gptq(weights, inputs.astype(np.float64), scales, BLOCK)
    # One value at the edge between two integers changes what follows it in its row.
    same = (found == wanted).all(axis=1).mean()
    assert same > 0.95, same


def planted(tokens: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights [30, columns], inputs and the scales of the rows."""
    generator = np.random.default_rng(tokens)
    inputs = generator.standard_normal((tokens, columns)).astype(np.float32)
    inputs[0] *= 20  # a token like the first of a text
    weights = generator.standard_normal((30, columns)).astype(np.float32)
    return weights, inputs, np.abs(weights).max(axis=1) / np.float32(LARGEST)


def test_a_sign_error_would_be_seen() -> None:
    """The comparison can fail: feedback of the wrong sign is far from GPTQ."""
    weights, inputs, scales = planted(20, 64)
    feedback = ErrorFeedback(inputs)
    feedback._gains = -feedback._gains
    wrong = feedback.round(weights, scales[:, None], LARGEST)
    wanted = dense_gptq(weights, inputs.astype(np.float64), scales, BLOCK)
    assert (wrong == wanted).all(axis=1).mean() < 0.2


def test_errors_cancel_on_the_inputs() -> None:
    generator = np.random.default_rng(4)
    inputs = generator.standard_normal((16, 128)).astype(np.float32)
    weights = generator.standard_normal((64, 128)).astype(np.float32)
    errors = []
    for feedback in (None, ErrorFeedback(inputs)):
        stored = quantize_rows(weights, RULE, None, feedback)
        values = np.frombuffer(stored.data, np.int8).reshape(weights.shape) * stored.scales[:, None]
        errors.append(np.square(inputs @ (values - weights).T).mean())
    assert errors[1] < errors[0] / 5


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
def test_rows_are_rounded_alone(groups: int) -> None:
    """Bit for bit, in pieces of any size; also with scales by block, not the unit of a row."""
    generator = np.random.default_rng(7)
    inputs = generator.standard_normal((12, 128)).astype(np.float32)
    weights = generator.standard_normal((70, 128)).astype(np.float32)
    scales = np.abs(weights.reshape(70, groups, -1)).max(axis=2) / np.float32(LARGEST)
    feedback = ErrorFeedback(inputs)
    found = feedback.round(weights, scales, LARGEST)
    for size in (1, 3, 8):
        pieces = [
            feedback.round(weights[r : r + size], scales[r : r + size], LARGEST)
            for r in range(0, 70, size)
        ]
        assert np.array_equal(found, np.concatenate(pieces))
    wide = np.repeat(scales, 128 // groups, axis=1)
    nearest = np.rint(weights / wide)
    off = [np.square(inputs @ (n * wide - weights).T).mean() for n in (found, nearest)]
    assert off[0] < off[1] / 4
