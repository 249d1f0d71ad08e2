"""Fold the attention scale, one over the root of the head width, into what makes the queries."""

from __future__ import annotations

import math

import numpy as np

from hermes.checkpoint.source import LazyTensor
from hermes.rewrite.model import Numbers, RewritableModel, by_rows

NAME = "fold_attention_scale"


def fold_attention_scale(model: RewritableModel) -> RewritableModel:
    """(s W) x = s (W x): the query projection's rows are scaled, or the query norm's gain.

    The rotary rotation is linear, so the scale passes through it. The rewritten weights compute the
    same function only where the graph leaves the scale out; `GraphOptions.scale_queries` says so.
    """
    model.refuse_again(NAME)
    scale = 1 / math.sqrt(model.config.head_dim)
    stem = "self_attn.q_norm" if model.config.qk_norm else "self_attn.q_proj"

    def scaled(rows: Numbers) -> Numbers:
        return rows * np.asarray(scale, dtype=rows.dtype)

    changed: dict[str, LazyTensor] = {}
    for layer in range(model.config.num_layers):
        for name in (f"layers.{layer}.{stem}.weight", f"layers.{layer}.{stem}.bias"):
            if name in model.weights:
                changed[name] = by_rows(model.weights[name], scaled, model.dtype)
    return model.changed(NAME, changed)
