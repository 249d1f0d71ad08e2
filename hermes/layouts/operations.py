"""What a mapping does to tensors: few operations, each with its inverse.

`load` goes from the foreign tensors to Hermes', `save` back, both lazily: a row of the result reads
only the rows it is made of. Shapes: D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig

if TYPE_CHECKING:
    from hermes.checkpoint.source import Rows

Pairing = Literal["halves", "interleaved"]
"""Which elements of a head rotate together: (i, i + D/2) or (2i, 2i + 1)."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Context:
    """What operations need to know about the model."""

    config: HermesConfig
    pairing: Pairing


class Operation(Protocol):
    """A pure rearrangement between the tensors of one rule."""

    def source_shapes(self, targets: Sequence[Shape], context: Context) -> list[Shape]:
        """Shapes that the foreign tensors must have."""

    def load(
        self, sources: Sequence[LazyTensor], targets: Sequence[Shape], context: Context
    ) -> list[LazyTensor]:
        """Hermes' tensors from the foreign ones (names are set by the caller)."""

    def save(self, targets: Sequence[LazyTensor], context: Context) -> list[LazyTensor]:
        """The foreign tensors from Hermes'."""


@dataclass(frozen=True)
class Same:
    """One tensor, unchanged."""

    def source_shapes(self, targets: Sequence[Shape], context: Context) -> list[Shape]:
        return list(targets)

    def load(
        self, sources: Sequence[LazyTensor], targets: Sequence[Shape], context: Context
    ) -> list[LazyTensor]:
        return list(sources)

    def save(self, targets: Sequence[LazyTensor], context: Context) -> list[LazyTensor]:
        return list(targets)


@dataclass(frozen=True)
class Rotary:
    """Rows that rotate in pairs: reordered inside every head if the layout interleaves them.

    `heads` names the config field with the head count of exactly these rows: query and key rows
    differ under grouped attention, and the wrong count keeps all shapes right.
    """

    heads: Literal["num_heads", "num_kv_heads", "one"]

    def source_shapes(self, targets: Sequence[Shape], context: Context) -> list[Shape]:
        return list(targets)

    def load(
        self, sources: Sequence[LazyTensor], targets: Sequence[Shape], context: Context
    ) -> list[LazyTensor]:
        return [self._reordered(source, context, pairs_to_halves) for source in sources]

    def save(self, targets: Sequence[LazyTensor], context: Context) -> list[LazyTensor]:
        return [self._reordered(target, context, halves_to_pairs) for target in targets]

    def _reordered(
        self, tensor: LazyTensor, context: Context, order: Callable[[Rows, int], Rows]
    ) -> LazyTensor:
        if context.pairing == "halves":
            return tensor
        heads = 1 if self.heads == "one" else int(getattr(context.config, self.heads))
        width = tensor.rows // heads

        def read(start: int, stop: int) -> Rows:
            first, last = start // width, -(-stop // width)
            whole = order(tensor.stored(first * width, last * width), width)
            return whole[start - first * width : stop - first * width]

        return tensor.derived(read)


def pairs_to_halves(rows: Rows, width: int) -> Rows:
    """Rows 0, 2, 4, ... of every head first, then 1, 3, 5, ...; `width` rows per head."""
    heads = rows.reshape(-1, width // 2, 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def halves_to_pairs(rows: Rows, width: int) -> Rows:
    """The inverse of `pairs_to_halves`."""
    heads = rows.reshape(-1, 2, width // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class SplitRows:
    """One tensor whose rows are several Hermes tensors in order, each with its own operation."""

    parts: tuple[Operation, ...]

    def source_shapes(self, targets: Sequence[Shape], context: Context) -> list[Shape]:
        return [(sum(shape[0] for shape in targets), *targets[0][1:])]

    def load(
        self, sources: Sequence[LazyTensor], targets: Sequence[Shape], context: Context
    ) -> list[LazyTensor]:
        loaded, begin = [], 0
        for part, shape in zip(self.parts, targets, strict=True):
            piece = _row_range(sources[0], begin, begin + shape[0])
            loaded += part.load([piece], [shape], context)
            begin += shape[0]
        return loaded

    def save(self, targets: Sequence[LazyTensor], context: Context) -> list[LazyTensor]:
        pieces = [
            part.save([target], context)[0]
            for part, target in zip(self.parts, targets, strict=True)
        ]
        return [_stacked(pieces)]


def _row_range(tensor: LazyTensor, begin: int, end: int) -> LazyTensor:
    def read(start: int, stop: int) -> Rows:
        return tensor.stored(begin + start, begin + stop)

    return tensor.derived(read, shape=(end - begin, *tensor.shape[1:]))


def _stacked(pieces: Sequence[LazyTensor]) -> LazyTensor:
    rows = sum(piece.rows for piece in pieces)

    def read(start: int, stop: int) -> Rows:
        import numpy as np

        parts, begin = [], 0
        for piece in pieces:
            low, high = max(start - begin, 0), min(stop - begin, piece.rows)
            if low < high:
                parts.append(piece.stored(low, high))
            begin += piece.rows
        return np.concatenate(parts) if parts else pieces[0].stored(0, 0)

    return pieces[0].derived(read, shape=(rows, *pieces[0].shape[1:]))


@dataclass(frozen=True)
class Transpose:
    """A matrix stored as [inputs, outputs]; rows of the result are columns of the file."""

    def source_shapes(self, targets: Sequence[Shape], context: Context) -> list[Shape]:
        return [(targets[0][1], targets[0][0])]

    def load(
        self, sources: Sequence[LazyTensor], targets: Sequence[Shape], context: Context
    ) -> list[LazyTensor]:
        return [_transposed(sources[0])]

    def save(self, targets: Sequence[LazyTensor], context: Context) -> list[LazyTensor]:
        return [_transposed(targets[0])]


def _transposed(tensor: LazyTensor) -> LazyTensor:
    def read(start: int, stop: int) -> Rows:
        return tensor.stored()[:, start:stop].T.copy()

    return tensor.derived(read, shape=(tensor.shape[1], tensor.shape[0]))
