"""Scale pairs: move magnitude between two matrices with nothing but products between them.

Channels of an activation that are usually small share their int8 scale with the large ones, and
lose their bits to them. Dividing a channel by s where it is made and multiplying by s where it is
read changes no result. Where it is made, s scales a whole row, which has a quantization scale of
its own, so nothing is lost there; where it is read, columns grow apart, so s is a root of the
channel's usual magnitude and not the magnitude itself (SmoothQuant, Xiao et al. 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hermes.checkpoint.source import LazyTensor
from hermes.rewrite import mix
from hermes.rewrite.inputs import Inputs
from hermes.rewrite.model import Numbers, RewritableModel, by_row_factors, by_rows

NAME = "balance_feed_forward"
VALUES = "balance_values"
EXPONENT = 0.3
"""Share of a channel's magnitude that moves, in logarithms; see docs/quantization.md."""
SMALLEST = 1e-3
"""Channels below this share of the mean are taken as that: they may be silent by chance."""

Scales = Callable[[], NDArray[np.float64]]


def balance_feed_forward(model: RewritableModel) -> RewritableModel:
    """up/down: rows of up divided, columns of down multiplied by s.

    s = rms(channel) ^ EXPONENT, divided by its geometric mean.
    """
    model.refuse_after(NAME, mix.NAME)
    return _balanced(model, NAME, "mlp.up_proj", "mlp.down_proj", 1)


def balance_values(model: RewritableModel) -> RewritableModel:
    """v/o, in the same way.

    A value channel feeds every query head of its group, so the columns of o that read it share its
    scale. The cached values are divided by it too.
    """
    groups = model.config.num_query_groups
    return _balanced(model, VALUES, "self_attn.v_proj", "self_attn.o_proj", groups)


def _balanced(
    model: RewritableModel, rewrite: str, maker: str, reader: str, groups: int
) -> RewritableModel:
    model.refuse_again(rewrite)
    changed: dict[str, LazyTensor] = {}
    inputs: dict[str, Inputs] = {}
    width = model.config.head_dim
    for layer in range(model.config.num_layers):
        made_by, read_by = f"layers.{layer}.{maker}", f"layers.{layer}.{reader}.weight"
        seen = model.inputs_of(rewrite, read_by)
        made = functools.cache(functools.partial(_scales, seen, groups, width))
        read = functools.partial(_repeated, made, groups, width)
        inverse = functools.partial(_inverse, made)
        for name in (f"{made_by}.weight", f"{made_by}.bias"):
            if name in model.weights:
                changed[name] = by_row_factors(model.weights[name], inverse, model.dtype)
        multiplied = functools.partial(_multiplied, read)
        changed[read_by] = by_rows(model.weights[read_by], multiplied, model.dtype)
        inputs[read_by] = functools.cache(functools.partial(_divided, seen, read))
    return model.changed(rewrite, changed, inputs=inputs)


def _scales(seen: Inputs, groups: int, width: int) -> NDArray[np.float64]:
    """One per channel as it is made: [columns / groups]."""
    squares = np.square(seen().astype(np.float64)).mean(axis=0)
    if groups > 1:
        squares = squares.reshape(-1, groups, width).mean(axis=1).reshape(-1)
    usual = np.sqrt(squares)
    if not usual.any():
        return np.ones_like(usual)
    logarithms = EXPONENT * np.log(np.maximum(usual, SMALLEST * usual.mean()))
    result: NDArray[np.float64] = np.exp(logarithms - logarithms.mean())
    return result


def _repeated(made: Scales, groups: int, width: int) -> NDArray[np.float64]:
    """One per channel as it is read: query heads of a group are neighbours."""
    scales = made()
    if groups == 1:
        return scales
    repeated: NDArray[np.float64] = np.repeat(scales.reshape(-1, width), groups, axis=0)
    return repeated.reshape(-1)


def _inverse(made: Scales) -> Numbers:
    return 1 / made()


def _multiplied(read: Scales, rows: Numbers) -> Numbers:
    return rows * read().astype(rows.dtype)


def _divided(seen: Inputs, read: Scales) -> NDArray[np.float32]:
    return (seen() / read()).astype(np.float32)
