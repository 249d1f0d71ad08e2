"""A model on its way through the rewrites: its config, its lazy weights, and what was done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import UsageError
from hermes.parameters import EMBEDDING, HEAD
from hermes.rewrite.inputs import Inputs, record_inputs

DType = Literal["float32", "float64"]
Numbers = NDArray[np.floating]

BLOCK_VALUES = 1 << 17
"""Values of a matrix that are worked on at a time: about what a core's own cache holds."""
LEAST_COLUMNS = 128
"""Narrower blocks of columns cost more to fetch than they save."""


@dataclass(frozen=True)
class RewritableModel:
    """Weights by Hermes name; every rewrite returns a new one and reads nothing.

    Attributes:
        config: the model; a rewrite may untie its head.
        weights: as `hermes.layouts` mapped them or an earlier rewrite changed them.
        done: names of the rewrites so far, in order.
        notes: what they cost, for the report.
        dtype: of the arithmetic and of the rewritten tensors.
        calibration: token sequences that some rewrites and roundings look at.
        inputs: what these tokens put into every matrix; empty without calibration.
    """

    config: HermesConfig
    weights: Mapping[str, LazyTensor]
    done: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dtype: DType = "float32"
    calibration: tuple[tuple[int, ...], ...] = ()
    inputs: Mapping[str, Inputs] = field(default_factory=dict)

    def changed(
        self,
        rewrite: str,
        tensors: Mapping[str, LazyTensor],
        note: str = "",
        inputs: Mapping[str, Inputs] | None = None,
    ) -> RewritableModel:
        """The model with some tensors replaced, and with them the inputs of some matrices."""
        return replace(
            self,
            weights={**self.weights, **tensors},
            inputs={**self.inputs, **(inputs or {})},
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

    def refuse_after(self, rewrite: str, earlier: str) -> None:
        """Refuse an order in which the later rewrite no longer finds what it changes."""
        if earlier in self.done:
            raise UsageError(
                f"rewrite {rewrite} after {earlier}",
                expected=f"{rewrite} first: {earlier} mixes the channels it looks at",
                todo="order the recipe's rewrites",
            )

    def inputs_of(self, rewrite: str, matrix: str) -> Inputs:
        """The calibration tokens' inputs of a matrix, or a refusal where there are none."""
        if matrix not in self.inputs:
            raise UsageError(
                f"rewrite {rewrite} without calibration",
                expected="tokens to look at",
                todo="give the recipe a [calibration] table",
            )
        return self.inputs[matrix]

    def begin_inputs(self) -> None:
        """Start to make the calibration tokens' inputs beside other work.

        Nothing is raised here: who asks for an input waits for it, and gets what stopped it.
        """

        def make() -> None:
            with suppress(Exception):
                next(iter(self.inputs.values()))()

        if self.inputs:
            threading.Thread(target=make, daemon=True).start()

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


def by_rows(
    tensor: LazyTensor, change: Callable[[Numbers], Numbers], dtype: DType = "float32"
) -> LazyTensor:
    """A tensor whose rows change independently: `change` maps rows to new rows of that dtype."""

    def read(start: int, stop: int) -> Numbers:
        return change(numbers(tensor, dtype, start, stop))

    return tensor.derived(read, dtype=dtype)


def by_row_factors(
    tensor: LazyTensor, factors: Callable[[], Numbers], dtype: DType = "float32"
) -> LazyTensor:
    """A matrix or vector whose row r is multiplied by `factors()[r]`."""

    def read(start: int, stop: int) -> Numbers:
        rows = numbers(tensor, dtype, start, stop)
        scale = factors()[start:stop].astype(dtype)
        scaled: Numbers = rows * scale.reshape(-1, *[1] * (rows.ndim - 1))
        return scaled

    return tensor.derived(read, dtype=dtype)


def by_columns(
    tensor: LazyTensor, change: Callable[[Numbers], Numbers], dtype: DType = "float32"
) -> LazyTensor:
    """A matrix or vector whose columns change independently of each other.

    `change` maps [rows, C] to the same shape, for some of the columns. The result is kept from the
    first slice that is read to the last one, so that reading it in slices costs one change.
    """
    kept: list[Numbers] = []

    def read(start: int, stop: int) -> Numbers:
        if not kept:
            kept.append(_columns_changed(tensor, change, dtype))
        rows = kept[0][start:stop]
        if stop == tensor.rows:
            kept.clear()
        return rows

    return tensor.derived(read, dtype=dtype)


def _columns_changed(
    tensor: LazyTensor, change: Callable[[Numbers], Numbers], dtype: DType
) -> Numbers:
    matrix: Numbers = np.empty((tensor.rows, tensor.numel // tensor.rows), dtype=dtype)
    step = max(1, BLOCK_VALUES // matrix.shape[1])
    for start in range(0, tensor.rows, step):
        rows = numbers(tensor, dtype, start, min(start + step, tensor.rows))
        matrix[start : start + step] = rows.reshape(len(rows), -1)
    step = max(LEAST_COLUMNS, BLOCK_VALUES // len(matrix))
    for start in range(0, matrix.shape[1], step):
        matrix[:, start : start + step] = change(matrix[:, start : start + step])
    return matrix.reshape(tensor.shape)


def numbers(tensor: LazyTensor, dtype: DType, start: int = 0, stop: int | None = None) -> Numbers:
    """Rows of a tensor in the dtype of the arithmetic; they may be the tensor's own memory."""
    if dtype == "float32":
        return tensor.floats(start, stop)
    if tensor.dtype == "float64":
        return tensor.stored(start, stop)
    return tensor.floats(start, stop).astype(np.float64)


def rewrite_model(
    config: HermesConfig,
    weights: Mapping[str, LazyTensor],
    names: tuple[str, ...],
    dtype: DType = "float32",
    calibration: tuple[tuple[int, ...], ...] = (),
) -> RewritableModel:
    """Apply the named rewrites in order.

    Args:
        config: the model.
        weights: Hermes parameter name -> tensor.
        names: rewrites.
        dtype: of the arithmetic.
        calibration: token sequences whose activations some rewrites and roundings look at.

    Raises:
        UsageError: an unknown name or an order in which a rewrite is not exact.
    """
    from hermes.rewrite.balance import balance_feed_forward, balance_values
    from hermes.rewrite.fold import fold_norm_gains
    from hermes.rewrite.mix import mix_down_input
    from hermes.rewrite.rotate import rotate_residual
    from hermes.rewrite.scale import fold_attention_scale

    known: dict[str, Callable[[RewritableModel], RewritableModel]] = {
        "fold_norm_gains": fold_norm_gains,
        "fold_attention_scale": fold_attention_scale,
        "rotate_residual": rotate_residual,
        "balance_feed_forward": balance_feed_forward,
        "balance_values": balance_values,
        "mix_down_input": mix_down_input,
    }
    inputs = record_inputs(config, weights, calibration) if calibration else {}
    model = RewritableModel(config, weights, dtype=dtype, calibration=calibration, inputs=inputs)
    for name in names:
        if name not in known:
            raise UsageError(
                f"no rewrite {name!r}", expected=f"one of {', '.join(known)}", todo="pick one"
            )
        model = known[name](model)
    return model
