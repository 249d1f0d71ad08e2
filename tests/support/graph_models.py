"""Tiny models with telling weights as Hermes names, for tests of graphs and binding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tiny_llama import hermes_config, hermes_weights, tiny_config, tiny_weights
from torch import Tensor

from hermes.checkpoint.source import LazyTensor, stored_rows
from hermes.config import HermesConfig
from hermes.parameters import parameter_shapes


def tiny_model(layers: int, *, extras: bool, tied: bool) -> tuple[HermesConfig, dict[str, Tensor]]:
    """Config and float32 weights; `extras` are biases everywhere and query/key norms."""
    foreign = tiny_config(num_hidden_layers=layers, tie_word_embeddings=tied)
    changes: dict[str, Any] = {}
    if extras:
        names = ("attention_bias", "output_bias", "mlp_bias", "qk_norm")
        changes = dict.fromkeys(names, True)
    config = hermes_config(foreign, **changes)
    state = hermes_weights(tiny_weights(foreign, bias=extras))
    draw = torch.Generator().manual_seed(9)
    for name, shape in parameter_shapes(config).items():
        if name not in state:
            state[name] = 0.5 + torch.rand(shape, generator=draw)
    return config, state


def lazy(state: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """The tensors as an opened checkpoint presents them."""

    def one(name: str, value: Tensor) -> LazyTensor:
        dtype = str(value.dtype).removeprefix("torch.")
        return LazyTensor(
            name, tuple(value.shape), dtype, "tiny.pt", lambda a, b: stored_rows(value[a:b])
        )

    return {name: one(name, value) for name, value in state.items()}
