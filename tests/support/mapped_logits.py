"""From a checkpoint path to logits, through everything that a conversion does before exporting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_llama import PROMPT_IDS
from torch import Tensor

from hermes.checkpoint import open_checkpoint
from hermes.layouts import MappedModel, map_checkpoint
from hermes.model import HermesForCausalLM
from hermes.parameters import EMBEDDING, HEAD


def mapped(
    path: Path,
    config: Mapping[str, Any] | None = None,
    *,
    layout: str = "auto",
    weights: str | None = None,
) -> MappedModel:
    """Open and map."""
    return map_checkpoint(open_checkpoint(path, weights=weights), layout=layout, config=config)


def load_model(model: MappedModel) -> HermesForCausalLM:
    """The reference model with exactly these weights, loaded strictly."""
    state = {name: tensor.read().float() for name, tensor in model.weights.items()}
    if model.config.tie_embeddings:
        state[HEAD] = state[EMBEDDING]
    module = HermesForCausalLM(model.config)
    module.load_state_dict(state, strict=True)
    return module.eval()


@torch.no_grad()
def logits_of(model: MappedModel, ids: Sequence[int] = PROMPT_IDS) -> Tensor:
    """Logits [T, V] of the ids."""
    logits: Tensor = load_model(model)(torch.tensor([list(ids)]))["logits"][0]
    return logits


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """config.json into a folder."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
