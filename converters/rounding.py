"""Round a matrix so that its errors cancel on the inputs that it will see.

Columns are rounded block after block, and what a block's rounding does to the outputs of a few
calibration tokens is made good by the blocks after it: GPTQ (Frantar et al. 2023), which minimises
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
"""Columns that are rounded at once. One at a time leaves half the error on the calibration tokens,
the same on other text, and costs ten times as much."""

Floats = NDArray[np.float32]


class ErrorFeedback:
    """What each block of columns must make good, for one set of calibration inputs.

    Args:
        inputs: [T, C], what the matrix is multiplied by.
        damping: see `DAMPING`.
        block: see `BLOCK`; columns that share a scale come in whole blocks.
    """

    def __init__(self, inputs: Floats, damping: float = DAMPING, block: int = BLOCK) -> None:
        self.columns = inputs.shape[1]
        self.block = block
        self._tokens: Floats = np.ascontiguousarray(inputs.T)  # [C, T]
        self._gains = _gains(inputs.astype(np.float64), damping, block)  # [C, T]

    def round(self, rows: Floats, scales: Floats, limits: tuple[int, int]) -> NDArray[np.int8]:
        """Integers [R, C] of the rows.

        Args:
            rows: [R, C].
            scales: [R, G], of G equal groups of neighbouring columns, whole blocks each.
            limits: smallest and largest integer.
        """
        by_column = np.ascontiguousarray(scales.T)  # [G, R]
        width = self.columns // len(by_column)
        low, high = np.float32(limits[0]), np.float32(limits[1])
        rounded = np.empty((self.columns, len(rows)), dtype=np.int8)
        outputs = np.zeros((self._tokens.shape[1], len(rows)), dtype=np.float32)
        change = np.empty_like(outputs)
        for start in range(0, self.columns, self.block):
            span = slice(start, min(start + self.block, self.columns))
            weights, scale = np.ascontiguousarray(rows[:, span].T), by_column[start // width]
            wanted = self._gains[span] @ outputs
            wanted += weights
            # Rounding is to integers in units of the scale.
            wanted /= scale
            np.rint(wanted, out=wanted)
            np.maximum(wanted, low, out=wanted)
            np.minimum(wanted, high, out=wanted)
            rounded[span] = wanted
            wanted *= scale
            weights -= wanted
            np.matmul(self._tokens[span].T, weights, out=change)
            outputs += change
        return np.ascontiguousarray(rounded.T)


def _gains(inputs: NDArray[np.float64], damping: float, block: int) -> Floats:
    """[C, T]: the corrections of a block are its gains times the outputs' errors so far.

    With X_B the block's inputs, F the columns after it and M = (1 + X_F X_F^T / d)^-1, they are
    (d + X_B^T M X_B)^-1 X_B^T M: the best errors of the block if the columns after it are free.
    From the last block back, M loses what each one explains (Woodbury).
    """
    tokens, columns = inputs.shape
    gains = np.zeros((columns, tokens), dtype=np.float32)
    energy = damping * float(np.square(inputs).sum(axis=0).mean())
    if energy <= 0:
        return gains
    inverse = np.eye(tokens)
    for start in range((columns - 1) // block * block, -1, -block):
        of_block = inputs[:, start : start + block]
        reached = inverse @ of_block
        within = of_block.T @ reached
        within[np.diag_indices_from(within)] += energy
        solved = np.linalg.solve(within, reached.T)
        gains[start : start + block] = solved
        inverse -= reached @ solved
    return gains
