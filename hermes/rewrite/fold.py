"""Fold the norms' gains into the matrices that read the normed stream."""

from __future__ import annotations

import functools

import numpy as np

from hermes.checkpoint.source import LazyTensor
from hermes.parameters import FINAL_NORM, HEAD
from hermes.rewrite.inputs import Inputs
from hermes.rewrite.model import Numbers, RewritableModel, by_rows, numbers

NAME = "fold_norm_gains"

READERS = {
    "input_layernorm.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "post_attention_layernorm.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
"""Norm of a layer -> matrices that read its output."""


def fold_norm_gains(model: RewritableModel) -> RewritableModel:
    """W (g * x) = (W diag(g)) x: every gain becomes 1, its readers' columns are scaled.

    The final norm's gain goes into the head, which therefore needs a table of its own. The q and k
    norms of Qwen3 stay: their output is rotated, not multiplied by a matrix.
    """
    model.refuse_again(NAME)
    model = model.untied()
    changed: dict[str, LazyTensor] = {}
    inputs: dict[str, Inputs] = {}
    for layer in range(model.config.num_layers):
        for norm, readers in READERS.items():
            gain = model.weights[f"layers.{layer}.{norm}"]
            for reader in readers:
                name = f"layers.{layer}.{reader}"
                changed[name] = _scaled(model, name, gain)
                inputs.update(_bare(model, name, f"layers.{layer}.{norm}"))
            changed[f"layers.{layer}.{norm}"] = _ones(gain, f"layers.{layer}.{norm}")
    gain = model.weights[FINAL_NORM]
    changed[FINAL_NORM] = _ones(gain, FINAL_NORM)
    changed[HEAD] = _scaled(model, HEAD, gain)
    inputs.update(_bare(model, HEAD, FINAL_NORM))
    return model.changed(NAME, changed, inputs=inputs)


def _bare(model: RewritableModel, reader: str, norm: str) -> dict[str, Inputs]:
    """The reader now sees what the gain saw."""
    return {reader: model.inputs[norm]} if norm in model.inputs else {}


def _scaled(model: RewritableModel, name: str, gain: LazyTensor) -> LazyTensor:
    values = functools.cache(lambda: numbers(gain, model.dtype))
    return by_rows(model.weights[name], lambda rows: rows * values(), model.dtype)


def _ones(gain: LazyTensor, name: str) -> LazyTensor:
    def read(start: int, stop: int) -> Numbers:
        return np.ones(stop - start, dtype=np.float32)

    return LazyTensor(name, gain.shape, "float32", gain.origin, read)
