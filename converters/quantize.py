"""One block of rows and one rule give stored bytes and scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from converters.rounding import ErrorFeedback
from hermes.recipe import QuantizationRule

SMALLEST_AMPLITUDE = 1e-9
"""Keeps the scale of an all-zero row above zero, as ai-edge-quantizer does."""
LARGEST = {"int8": 127, "int4": 7}
"""Magnitude that the largest value of a scale's group is stored as."""

_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Of the scale at which the largest value of a block fits, that are tried: with 15 steps to a block
it pays to cut the largest."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class QuantizedRows:
    """Row-major bytes, and the scales: [R] float32, [R, blocks] float16, or None for floats."""

    data: bytes
    scales: NDArray[np.floating] | None


def quantize_rows(
    rows: Floats,
    rule: QuantizationRule,
    amplitude: float | None = None,
    feedback: ErrorFeedback | None = None,
) -> QuantizedRows:
    """Store [R, C] float32 rows as the rule says.

    Integers are symmetric: scale = largest magnitude of its group / 127 or 7, rounded half to even.
    For int8 by channel that is bit for bit what ai-edge-quantizer's dynamic recipe computes; with
    feedback the scales are the same. Scales of blocks are those of least square error, in float16
    with a mantissa of 7 bits, as the runtime's kernels take them.

    Args:
        rows: [R, C] float32.
        rule: element type and granularity.
        amplitude: largest magnitude of the whole tensor; needed for one scale per tensor.
        feedback: rounds by the matrix's inputs instead of to nearest.
    """
    if rule.weights == "float32":
        return QuantizedRows(rows.tobytes(), None)
    if rule.weights == "float16":
        return QuantizedRows(rows.astype(np.float16).tobytes(), None)
    largest, scales = LARGEST[rule.weights], scales_of(rows, rule, amplitude)
    if feedback is not None:
        return QuantizedRows(
            _packed(feedback.round(rows, scales, largest), rule), _stored(scales, rule)
        )
    groups = rows.reshape(len(rows), scales.shape[1], -1)
    # Every step writes into this one array: allocating costs more than computing.
    work = np.divide(groups, scales[:, :, None]).reshape(rows.shape)
    np.rint(work, out=work)
    np.clip(work, -largest, largest, out=work)
    return QuantizedRows(_packed(work.astype(np.int8), rule), _stored(scales, rule))


def _stored(scales: Floats, rule: QuantizationRule) -> NDArray[np.floating]:
    return scales.astype(np.float16) if rule.block else scales[:, 0]


def scales_of(rows: Floats, rule: QuantizationRule, amplitude: float | None = None) -> Floats:
    """[R, G] float32, one per group of columns; `amplitude` as `quantize_rows` takes it."""
    if rule.granularity == "tensor":
        if amplitude is None:
            raise ValueError("one scale per tensor needs the tensor's amplitude")
        peaks = np.full((len(rows), 1), amplitude, dtype=np.float32)
    else:
        groups = rows.reshape(len(rows), rows.shape[1] // rule.block if rule.block else 1, -1)
        peaks = np.maximum(groups.max(axis=2), -groups.min(axis=2))
    scales: Floats = np.maximum(peaks, np.float32(SMALLEST_AMPLITUDE))
    scales /= np.float32(LARGEST[rule.weights])
    return _narrowed(groups, scales, LARGEST[rule.weights]) if rule.block else scales


def _narrowed(groups: Floats, scales: Floats, largest: int) -> Floats:
    """Of scales at which the largest value of a block fits or is cut, those of least square error.

    Args:
        groups: [R, G, N], the values.
        scales: [R, G], at which all of them fit.
        largest: integer.
    """
    best, least = scales.copy(), np.full(scales.shape, np.inf, np.float32)
    for share in _SHARES:
        tried = _storable(scales * np.float32(share))
        work = groups / tried[:, :, None]
        np.rint(work, out=work)
        np.clip(work, -largest, largest, out=work)
        work *= tried[:, :, None]
        work -= groups
        error = np.einsum("rgn,rgn->rg", work, work)
        better = error < least
        best[better], least[better] = tried[better], error[better]
    return best


def _storable(scales: Floats) -> Floats:
    """Rounded up to 8 significant bits, so that what fits still fits."""
    bits = (scales.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return np.maximum(bits.view(np.float32), np.float32(np.finfo(np.float16).tiny))


def _packed(integers: NDArray[np.int8], rule: QuantizationRule) -> bytes:
    """int4 goes two to a byte, the first in the lower half."""
    if rule.weights == "int8":
        return integers.tobytes()
    halves = integers.reshape(-1, 2).view(np.uint8) & 15
    return (halves[:, 0] | halves[:, 1] << 4).tobytes()


def restored_rows(stored: QuantizedRows, rule: QuantizationRule, shape: tuple[int, ...]) -> Floats:
    """The float32 rows [R, C] that stored ones stand for."""
    if stored.scales is None:
        kind = np.float16 if rule.weights == "float16" else np.float32
        return np.frombuffer(stored.data, kind).reshape(shape).astype(np.float32)
    if rule.weights == "int8":
        integers = np.frombuffer(stored.data, np.int8)
    else:
        pairs = np.frombuffer(stored.data, np.uint8)
        halves = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(-1)
        integers = ((halves ^ 8).astype(np.int8) - 8).astype(np.int8)
    scales = stored.scales.astype(np.float32).reshape(len(stored.scales), -1, 1)
    grouped = integers.reshape(shape[0], scales.shape[1], -1).astype(np.float32)
    rows: Floats = (grouped * scales).reshape(shape)
    return rows
