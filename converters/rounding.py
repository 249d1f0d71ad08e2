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


def leading_directions(inputs: Floats, count: int) -> Floats:
    """[at most count, C] with the same products between columns as inputs [T, C], or nearly.

    The rows are the principal components, the largest ones, each as long as its singular value.
    """
    if len(inputs) <= count:
        return inputs
    exact = inputs.astype(np.float64)
    _, directions = np.linalg.eigh(exact @ exact.T)
    leading: Floats = (directions[:, -count:].T @ exact).astype(np.float32)
    return leading


class ErrorFeedback:
    """What each block of columns must make good, for one set of calibration inputs.

    Args:
        inputs: [T, C], what the matrix is multiplied by.
        directions: of the inputs that are looked at, the leading ones; None for all.
    """

    def __init__(self, inputs: Floats, directions: int | None = None) -> None:
        if directions is not None:
            inputs = leading_directions(inputs, directions)
        tokens, self._columns = inputs.shape
        # Tokens and columns of zeros change nothing.
        seen = np.zeros((_blocks(tokens) * BLOCK, _blocks(self._columns) * BLOCK), np.float32)
        seen[:tokens, : self._columns] = inputs
        energy = DAMPING * float(np.square(inputs, dtype=np.float64).sum()) / self._columns
        gains = _gains(seen.astype(np.float64), energy)
        by_block = (seen.shape[1] // BLOCK, BLOCK, len(seen))
        self._inputs = np.ascontiguousarray(seen.T).reshape(by_block)
        self._gains = np.ascontiguousarray(gains.reshape(by_block).transpose(0, 2, 1))

    def round(self, rows: Floats, scales: Floats, largest: int) -> NDArray[np.int8]:
        """Integers [R, C] of the rows.

        Args:
            rows: [R, C].
            scales: [R, G], of G equal groups of neighbouring columns, whole blocks each.
            largest: magnitude of integers.
        """
        from hermes.kernels.rounding import round_rows

        padding = len(self._inputs) * BLOCK - self._columns
        given = np.ascontiguousarray(np.pad(rows, ((0, 0), (0, padding))) if padding else rows)
        scales = np.ascontiguousarray(scales)
        rounded = round_rows(given, scales, self._inputs, self._gains, largest)
        return rounded[:, : self._columns]


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _gains(inputs: NDArray[np.float64], energy: float) -> Floats:
    """[C, T]: the corrections of a block are its gains times the outputs' errors so far.

    With d the energy, X_B the block's inputs, F the columns after it and
    M = (1 + X_F X_F^T / d)^-1, they are (d + X_B^T M X_B)^-1 X_B^T M: the best errors of the block
    if the columns after it are free. From the last block back, M loses what each one explains
    (Woodbury).
    """
    tokens, columns = inputs.shape
    gains = np.zeros((columns, tokens), dtype=np.float32)
    if energy <= 0:
        return gains
    inverse = np.eye(tokens)
    for start in range(columns - BLOCK, -1, -BLOCK):
        of_block = inputs[:, start : start + BLOCK]
        reached = inverse @ of_block
        within = of_block.T @ reached
        within[np.diag_indices_from(within)] += energy
        solved = np.linalg.solve(within, reached.T)
        gains[start : start + BLOCK] = solved
        inverse -= reached @ solved
    return gains
