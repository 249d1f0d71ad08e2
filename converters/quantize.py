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
    feedback the scales are the same. Scales of blocks are float16 with a mantissa of 7 bits, as
    the runtime's kernels take them.

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
    largest = LARGEST[rule.weights]
    work = np.abs(rows)
    scales = _scales(work, rule, largest, amplitude)
    if feedback is not None:
        integers = feedback.round(rows, scales, (-largest, largest))
    else:
        # Every step writes into this one array: allocating costs more than computing.
        groups = (len(rows), scales.shape[1], -1)
        np.divide(rows.reshape(groups), scales[:, :, None], out=work.reshape(groups))
        np.rint(work, out=work)
        np.clip(work, -largest, largest, out=work)
        integers = work.astype(np.int8)
    stored = scales.astype(np.float16) if rule.block else scales[:, 0]
    return QuantizedRows(_packed(integers, rule), stored)


def _scales(
    magnitudes: Floats, rule: QuantizationRule, largest: int, amplitude: float | None
) -> Floats:
    """[R, G] float32, one per group of columns."""
    if rule.granularity == "tensor":
        if amplitude is None:
            raise ValueError("one scale per tensor needs the tensor's amplitude")
        peaks = np.full((len(magnitudes), 1), amplitude, dtype=np.float32)
    else:
        groups = magnitudes.shape[1] // rule.block if rule.block else 1
        peaks = magnitudes.reshape(len(magnitudes), groups, -1).max(axis=2)
    scales: Floats = np.maximum(peaks, np.float32(SMALLEST_AMPLITUDE))
    scales /= np.float32(largest)
    if rule.block:
        # Rounded up to 8 significant bits, so that the largest value still fits.
        bits = (scales.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
        scales = np.maximum(bits.view(np.float32), np.float32(np.finfo(np.float16).tiny))
    return scales


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
