"""Mix the inputs of the down projection, so that no channel of the feed-forward stands out.

The product of gate and up has outliers of its own, a thousand times its usual size in a few
channels of a few tokens, and an int8 activation scale is shared by all channels of a token. A
nonlinearity lies before it, so unlike the residual stream it cannot be rotated for nothing: the
exported graph multiplies blocks of it by a small Hadamard matrix at run time, and the down
projection absorbs the inverse (the online transform of QuaRot, Ashkboos et al. 2024, in blocks).
"""

from __future__ import annotations

import functools
import math

import numpy as np

from hermes.checkpoint.source import LazyTensor
from hermes.hadamard import mixing_block, transform_rows
from hermes.rewrite.inputs import Inputs
from hermes.rewrite.model import Numbers, RewritableModel, by_rows

NAME = "mix_down_input"


def mix_down_input(model: RewritableModel) -> RewritableModel:
    """W x = (W M)(M x) for every down projection, M symmetric, orthogonal and block diagonal.

    The rewritten weights compute the same function only where the graph multiplies the down
    projection's input by M; `GraphOptions.mix_down_input` says so.
    """
    model.refuse_again(NAME)
    block = mixing_block(model.config)

    def mixed(rows: Numbers) -> Numbers:
        return _mixed(rows, block)

    changed: dict[str, LazyTensor] = {}
    inputs: dict[str, Inputs] = {}
    for layer in range(model.config.num_layers):
        name = f"layers.{layer}.mlp.down_proj.weight"
        changed[name] = by_rows(model.weights[name], mixed, model.dtype)
        if name in model.inputs:
            inputs[name] = _mixed_inputs(model.inputs[name], block)
    note = f"the graph mixes the down projection's input in blocks of {block}"
    return model.changed(NAME, changed, note, inputs)


def _mixed(rows: Numbers, block: int) -> Numbers:
    """Every `block` neighbours times M."""
    scale = np.full((1, 1), 1 / math.sqrt(block), rows.dtype)
    signs = np.ones(block, rows.dtype)
    return transform_rows(rows.reshape(-1, block), signs, scale).reshape(rows.shape)


def _mixed_inputs(inputs: Inputs, block: int) -> Inputs:
    return functools.cache(lambda: _mixed(inputs(), block))
