"""Round a matrix so that its errors cancel on the inputs that it will see.

Columns are rounded block after block, and what a block's rounding does to the outputs of a few
calibration tokens is made good by the blocks after it: GPTQ (Frantar et al. 2023), which minimises
|(W - Q) X^T|^2 + damping |W - Q|^2 greedily. GPTQ factorises a columns x columns matrix; with a few
dozen tokens the same numbers follow from tokens x tokens matrices (Woodbury), so it costs little
more than reading the weights, at any width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DAMPING = 0.1
"""Weight of the errors off the calibration tokens, relative to the tokens' mean energy."""
BLOCK = 16
"""Columns that are rounded at once. One at a time leaves half the error on the calibration tokens,
the same on other text, and costs ten times as much."""
SPAN = 32
"""Columns after which the tokens' outputs are brought up to date. Within a span a block sees the
errors of the blocks before it as they are, through a small matrix of their own."""
PADDING = 16
"""Float32 values that lie unused between rows, so that columns are read quickly: rows at a distance
of whole pages share few lines of a cache."""
_TILE = 256

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
        damping: see `DAMPING`.
        block: see `BLOCK`; columns that share a scale come in whole blocks.
    """

    def __init__(self, inputs: Floats, damping: float = DAMPING, block: int = BLOCK) -> None:
        self.columns = inputs.shape[1]
        self.block = block
        self._inputs = inputs
        self._gains = _gains(inputs.astype(np.float64), damping, block)  # [C, T]

    @functools.cached_property
    def _spans(self) -> list[_Span]:
        step = max(1, SPAN // self.block) * self.block
        spans = [slice(at, min(at + step, self.columns)) for at in range(0, self.columns, step)]
        return [_Span(s, self._inputs[:, s].copy(), self._gains[s]) for s in spans]

    def round(self, rows: Floats, scales: Floats, limits: tuple[int, int]) -> NDArray[np.int8]:
        """Integers [R, C] of the rows.

        Args:
            rows: [R, C].
            scales: [R, G], of G equal groups of neighbouring columns, whole blocks each.
            limits: smallest and largest integer.
        """
        tile = Tile(len(rows), self.columns)
        tile.add(rows, scales)
        return self.round_tile(tile, limits)

    def round_tile(self, tile: Tile, limits: tuple[int, int]) -> NDArray[np.int8]:
        """Integers [R, C] of the rows that the tile holds."""
        values, scales = tile.values, tile.scales
        rounded = np.empty((self.columns, len(values) + PADDING), np.int8)[:, : len(values)]
        outputs = np.zeros((len(self._inputs), len(values)), dtype=np.float32)
        change = np.empty_like(outputs)
        for span in self._spans:
            # In units of the scale; with one scale to a row, so are the outputs.
            by_column = _by_column(scales, span.columns, self.columns)
            errors = np.ascontiguousarray(values[:, span.columns].T)
            wanted = span.gains @ outputs
            if by_column is not None:
                wanted /= by_column
            wanted += errors
            self._round_span(span, wanted, errors, by_column, limits)
            rounded[span.columns] = wanted
            np.matmul(span.inputs, errors, out=change)
            outputs += change
        return _transposed(rounded)

    def _round_span(
        self,
        span: _Span,
        wanted: Floats,
        values: Floats,
        by_column: Floats | None,
        limits: tuple[int, int],
    ) -> None:
        """Turn wanted values into integers and values into their errors, block by block."""
        for start in range(0, len(wanted), self.block):
            block = slice(start, start + self.block)
            integers, errors = wanted[block], values[block]
            if start:
                correction = span.within[block, :start] @ values[:start]
                integers += correction if by_column is None else correction / by_column[block]
            np.rint(integers, out=integers)
            np.clip(integers, *limits, out=integers)
            errors -= integers
            if by_column is not None:
                errors *= by_column[block]


class Tile:
    """Rows of a matrix in units of their scales, laid out so that columns are read quickly.

    Args:
        rows: most rows that it holds.
        columns: of the matrix.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self._all = np.empty((rows, columns + PADDING), dtype=np.float32)[:, :columns]
        self._scales: list[Floats] = []
        self._filled = 0

    @property
    def room(self) -> int:
        """Rows that still fit."""
        return len(self._all) - self._filled

    @property
    def values(self) -> Floats:
        """[R, C] of the rows that it holds."""
        return self._all[: self._filled]

    @property
    def scales(self) -> Floats:
        """[R, G] of these rows."""
        return np.concatenate(self._scales)

    def add(self, rows: Floats, scales: Floats) -> None:
        """More rows [R, C] and their scales [R, G]."""
        groups = (len(rows), scales.shape[1], -1)
        units = self._all[self._filled : self._filled + len(rows)]
        np.divide(rows.reshape(groups), scales[:, :, None], out=units.reshape(groups))
        self._scales.append(scales)
        self._filled += len(rows)

    def clear(self) -> None:
        """Hold nothing."""
        self._scales.clear()
        self._filled = 0


def _by_column(scales: Floats, span: slice, columns: int) -> Floats | None:
    """[S, R] of a span's columns; None if all columns of the matrix share a row's scale."""
    groups = scales.shape[1]
    if groups == 1:
        return None
    of_column = np.arange(span.start, span.stop) // (columns // groups)
    return np.ascontiguousarray(scales.T[of_column])


@dataclass(frozen=True)
class _Span:
    """Neighbouring columns: their inputs [T, S], their gains [S, T] and the products [S, S]."""

    columns: slice
    inputs: Floats
    gains: Floats

    @functools.cached_property
    def within(self) -> Floats:
        """What an error at a column of the span adds to the corrections of those after it."""
        return self.gains @ self.inputs


def _transposed(columns: NDArray[np.int8]) -> NDArray[np.int8]:
    """[C, R] as contiguous [R, C]."""
    result = np.empty(columns.shape[::-1], dtype=np.int8)
    for start in range(0, len(columns), _TILE):
        result[:, start : start + _TILE] = columns[start : start + _TILE].T
    return result


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
