"""Round a matrix so that its errors cancel on the inputs that it will see.

Columns are rounded one after the other, and what a column's rounding does to the outputs of a few
calibration tokens is made good by the columns after it: GPTQ (Frantar et al. 2023), which minimises
|(W - Q) X^T|^2 + damping |W - Q|^2 greedily. GPTQ factorises a columns x columns matrix; with a few
dozen tokens the same numbers follow from tokens x tokens matrices (Woodbury), so it costs little
more than reading the weights, at any width.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DAMPING = 0.1
"""Weight of the errors off the calibration tokens, relative to the tokens' mean energy."""
BLOCK = 16
"""Columns between two updates of the outputs; within a block corrections go column by column."""

Floats = NDArray[np.float32]


class ErrorFeedback:
    """What each column must make good, for one set of calibration inputs.

    Args:
        inputs: [T, C], what the matrix is multiplied by.
        damping: see `DAMPING`.
    """

    def __init__(self, inputs: Floats, damping: float = DAMPING) -> None:
        self.columns = inputs.shape[1]
        self._tokens: Floats = np.ascontiguousarray(inputs.T)  # [C, T]
        self._gains: Floats = _gains(inputs.astype(np.float64), damping)  # [C, T]

    def round(self, rows: Floats, scales: Floats, limits: tuple[int, int]) -> NDArray[np.int8]:
        """Integers [R, C] of the rows.

        Args:
            rows: [R, C].
            scales: [R, G], of G equal groups of neighbouring columns.
            limits: smallest and largest integer.
        """
        weights = np.ascontiguousarray(rows.T)
        by_column = np.ascontiguousarray(scales.T)  # [G, R]
        width = self.columns // len(by_column)
        rounded = np.empty(weights.shape, dtype=np.int8)
        outputs = np.zeros((self._tokens.shape[1], len(rows)), dtype=np.float32)
        for start in range(0, self.columns, BLOCK):
            block = slice(start, min(start + BLOCK, self.columns))
            tokens, gains = self._tokens[block], self._gains[block]
            wanted = weights[block] + gains @ outputs
            within = gains @ tokens.T
            errors = np.empty_like(wanted)
            for column in range(len(wanted)):
                value, scale = wanted[column], by_column[(start + column) // width]
                if column:
                    value += within[column, :column] @ errors[:column]
                value /= scale
                np.rint(value, out=value)
                np.clip(value, *limits, out=value)
                rounded[start + column] = value
                value *= scale
                np.subtract(weights[start + column], value, out=errors[column])
            outputs += tokens.T @ errors
        return np.ascontiguousarray(rounded.T)


def _gains(inputs: NDArray[np.float64], damping: float) -> Floats:
    """[C, T]: the correction of column i is gains[i] times the outputs' errors so far.

    With x the column's inputs, F the columns after it and M = (1 + X_F X_F^T / d)^-1, it is
    M x / (d + x^T M x): the best error of this column if those after it are free. From the last
    column back, M loses one rank-one term per column (Sherman and Morrison).
    """
    columns = np.ascontiguousarray(inputs.T)
    gains = np.zeros(columns.shape)
    energy = damping * float(np.square(inputs).sum(axis=0).mean())
    if energy <= 0:
        return gains.astype(np.float32)
    inverse = np.eye(len(inputs))
    for column in range(len(columns) - 1, -1, -1):
        x, gain = columns[column], gains[column]
        reached = inverse @ x
        np.divide(reached, energy + x @ reached, out=gain)
        inverse -= np.outer(reached, gain)
    return gains.astype(np.float32)
