"""One block of rows and one rule give stored bytes and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hermes.recipe import QuantizationRule

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_AMPLITUDE = 1e-9
"""Keeps the scale of an all-zero row above zero, as ai-edge-quantizer does."""


@dataclass(frozen=True)
class QuantizedRows:
    """`data` row-major bytes; `scales` one float32 per row, None for float rows."""

    data: bytes
    scales: np.ndarray | None


def quantize_rows(
    rows: Tensor, rule: QuantizationRule, amplitude: float | None = None
) -> QuantizedRows:
    """Store [R, C] float32 rows as the rule says.

    int8 is symmetric over -127..127: scale = max|row| / 127, rounded half to even, bit for bit what
    ai-edge-quantizer's dynamic int8 recipe computes.

    Args:
        rows: [R, C] float32.
        rule: element type and granularity.
        amplitude: largest magnitude of the whole tensor; needed for one scale per tensor.
    """
    values = rows.numpy()
    if rule.weights == "float32":
        return QuantizedRows(values.tobytes(), None)
    if rule.granularity == "tensor":
        if amplitude is None:
            raise ValueError("one scale per tensor needs the tensor's amplitude")
        peaks = np.full(len(values), amplitude, dtype=np.float32)
    else:
        peaks = np.abs(values).max(axis=1)
    scales = np.maximum(peaks, np.float32(SMALLEST_AMPLITUDE)) / np.float32(127)
    quantized = np.rint(values / scales[:, None])
    np.clip(quantized, -127, 127, out=quantized)
    return QuantizedRows(quantized.astype(np.int8).tobytes(), scales)
