"""The reference with rewritten weights, doing what the exported graph does differently."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hermes.hadamard import hadamard, mixing_block
from hermes.rewrite import mix, scale
from hermes.rewrite.model import RewritableModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hermes.model import DecoderBlock


def follow_graph(layer: nn.Module, rewritten: RewritableModel) -> None:
    """Let a reference layer compute with rewritten weights, where they need the graph's help."""
    from hermes.model import DecoderBlock

    if not isinstance(layer, DecoderBlock):
        raise TypeError(f"{type(layer).__name__} is not a layer of the reference")
    if mix.NAME in rewritten.done:
        _mix_input(layer, mixing_block(rewritten.config))
    if scale.NAME in rewritten.done:
        _undo_scale(layer, rewritten.config.head_dim)


def _mix_input(layer: DecoderBlock, block: int) -> None:
    import torch

    matrix = torch.from_numpy(hadamard(block)).float()

    def mixed(module: object, inputs: tuple[Tensor]) -> tuple[Tensor]:
        rows = inputs[0]
        return ((rows.reshape(*rows.shape[:-1], -1, block) @ matrix).reshape(rows.shape),)

    layer.mlp.down_proj.register_forward_pre_hook(mixed)


def _undo_scale(layer: DecoderBlock, width: int) -> None:
    """The reference scales the scores itself."""
    attention = layer.self_attn
    maker = attention.q_norm if attention.config.qk_norm else attention.q_proj

    def unscaled(module: object, inputs: object, output: Tensor) -> Tensor:
        return output * math.sqrt(width)

    maker.register_forward_hook(unscaled)
