"""One block of rows and one rule give stored bytes and scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from converters.rounding import ErrorFeedback
from hermes.recipe import QuantizationRule

SMALLEST_AMPLITUDE = 1e-9
"""Keeps the scale of an all-zero row above zero, as ai-edge-quantizer does."""


@dataclass(frozen=True)
class QuantizedRows:
    """`data` row-major bytes; `scales` one float32 per row, None for float rows."""

    data: bytes
    scales: NDArray[np.float32] | None


def quantize_rows(
    rows: NDArray[np.float32],
    rule: QuantizationRule,
    amplitude: float | None = None,
    feedback: ErrorFeedback | None = None,
) -> QuantizedRows:
    """Store [R, C] float32 rows as the rule says.

    int8 is symmetric over -127..127: scale = max|row| / 127, rounded half to even, bit for bit what
    ai-edge-quantizer's dynamic int8 recipe computes; with feedback the scales are the same.

    Args:
        rows: [R, C] float32.
        rule: element type and granularity.
        amplitude: largest magnitude of the whole tensor; needed for one scale per tensor.
        feedback: rounds by the matrix's inputs instead of to nearest.
    """
    if rule.weights == "float32":
        return QuantizedRows(rows.tobytes(), None)
    # Every step writes into this one array: allocating costs more than computing.
    work = np.abs(rows)
    if rule.granularity == "tensor":
        if amplitude is None:
            raise ValueError("one scale per tensor needs the tensor's amplitude")
        peaks = np.full(len(rows), amplitude, dtype=np.float32)
    else:
        peaks = work.max(axis=1)
    scales: NDArray[np.float32] = np.maximum(peaks, np.float32(SMALLEST_AMPLITUDE))
    scales /= np.float32(127)
    if feedback is not None:
        return QuantizedRows(feedback.round(rows, scales).tobytes(), scales)
    np.divide(rows, scales[:, None], out=work)
    np.rint(work, out=work)
    np.clip(work, -127, 127, out=work)
    return QuantizedRows(work.astype(np.int8).tobytes(), scales)
