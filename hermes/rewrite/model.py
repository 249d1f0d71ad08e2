"""A model on its way through the rewrites: its config, its lazy weights, and what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import UsageError
from hermes.parameters import EMBEDDING, HEAD

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_VALUES = 1 << 19
"""Values of a matrix that are in float64 at a time: 4 MB, about what a core's cache holds."""


@dataclass(frozen=True)
class RewritableModel:
    """Weights by Hermes name; every rewrite returns a new one and reads nothing.

    Attributes:
        config: the model; a rewrite may untie its head.
        weights: as `hermes.layouts` mapped them or an earlier rewrite changed them.
        done: names of the rewrites so far, in order.
        notes: what they cost, for the report.
    """

    config: HermesConfig
    weights: Mapping[str, LazyTensor]
    done: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def changed(
        self, rewrite: str, tensors: Mapping[str, LazyTensor], note: str = ""
    ) -> RewritableModel:
        """The model with some tensors replaced."""
        return replace(
            self,
            weights={**self.weights, **tensors},
            done=(*self.done, rewrite),
            notes=(*self.notes, note) if note else self.notes,
        )

    def require(self, rewrite: str, before: str) -> None:
        """Refuse an order that would not be exact."""
        if rewrite not in self.done:
            raise UsageError(
                f"rewrite {before} before {rewrite}",
                expected=f"{rewrite} first: {before} is exact only then",
                todo="order the recipe's rewrites",
            )

    def refuse_again(self, rewrite: str) -> None:
        """Refuse to do a rewrite twice."""
        if rewrite in self.done:
            raise UsageError(f"rewrite {rewrite} is named twice", todo="name it once")

    def untied(self) -> RewritableModel:
        """The same model with a head of its own, equal to the embedding."""
        if not self.config.tie_embeddings:
            return self
        table = self.weights[EMBEDDING]
        return replace(
            self,
            config=replace(self.config, tie_embeddings=False),
            weights={**self.weights, HEAD: table.renamed(HEAD)},
            notes=(
                *self.notes,
                f"the tied head was untied: {table.numel:,} more stored values",
            ),
        )


def by_rows(tensor: LazyTensor, change: Callable[[Tensor], Tensor]) -> LazyTensor:
    """A tensor whose rows change independently: `change` maps float64 rows to float64 rows."""

    def read(start: int, stop: int) -> Tensor:
        return change(tensor.read(start, stop).double()).float()

    return replace(tensor, dtype="float32", reader=read, location=None)


def by_columns(tensor: LazyTensor, change: Callable[[Tensor], Tensor]) -> LazyTensor:
    """A matrix or vector whose columns change independently of each other.

    `change` maps [C, R] float64, the columns as rows, to the same shape. The result is kept from
    the first slice that is read to the last one, so that reading it in slices costs one change; of
    the float64 intermediates only a block exists at a time.
    """
    kept: list[Tensor] = []

    def read(start: int, stop: int) -> Tensor:
        if not kept:
            kept.append(_columns_changed(tensor.read(), change))
        rows = kept[0][start:stop]
        if stop == tensor.rows:
            kept.clear()
        return rows

    return replace(tensor, dtype="float32", reader=read, location=None)


def _columns_changed(values: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    import torch

    matrix = values.reshape(len(values), -1)
    result = torch.empty(matrix.shape, dtype=torch.float32)
    step = max(1, BLOCK_VALUES // len(matrix))
    for start in range(0, matrix.shape[1], step):
        columns = matrix[:, start : start + step].T.double()
        result[:, start : start + step] = change(columns).T
    return result.reshape(values.shape)


def rewrite_model(
    config: HermesConfig, weights: Mapping[str, LazyTensor], names: tuple[str, ...]
) -> RewritableModel:
    """Apply the named rewrites in order.

    Raises:
        UsageError: an unknown name or an order in which a rewrite is not exact.
    """
    from hermes.rewrite.fold import fold_norm_gains
    from hermes.rewrite.rotate import rotate_residual

    known: dict[str, Callable[[RewritableModel], RewritableModel]] = {
        "fold_norm_gains": fold_norm_gains,
        "rotate_residual": rotate_residual,
    }
    model = RewritableModel(config, weights)
    for name in names:
        if name not in known:
            raise UsageError(
                f"no rewrite {name!r}", expected=f"one of {', '.join(known)}", todo="pick one"
            )
        model = known[name](model)
    return model
