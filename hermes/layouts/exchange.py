"""From a mapped model to a Hermes checkpoint, or to the files of a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.checkpoint.safetensors_write import write_safetensors
from hermes.checkpoint.source import LazyTensor, stored_rows
from hermes.config import HermesConfig
from hermes.errors import UsageError
from hermes.layouts.mapping import MappedModel
from hermes.layouts.saving import foreign_weights, huggingface_config
from hermes.parameters import EMBEDDING, HEAD

if TYPE_CHECKING:
    from hermes.checkpoint.source import Rows


def write_hermes_checkpoint(model: MappedModel, target: Path) -> None:
    """One safetensors file under Hermes names, the configuration in its metadata."""
    metadata = {"format": "pt", "hermes_config": json.dumps(model.config.to_dict())}
    write_safetensors(target, model.weights, metadata)


def write_huggingface_model(model: MappedModel, folder: Path) -> None:
    """model.safetensors and config.json into an existing folder, as transformers opens them.

    Raises:
        UnsupportedModelError: no transformers model computes this configuration.
    """
    stored = {tensor.dtype for tensor in model.weights.values()}
    dtype = stored.pop() if len(stored) == 1 else "float32"
    described = huggingface_config(model.config, "float32" if dtype.isupper() else dtype)
    tensors = foreign_weights(model.weights, model.config, "huggingface")
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    text = json.dumps(described, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def extend_vocabulary(
    model: MappedModel, vocab_size: int, init_std: float, seed: int
) -> MappedModel:
    """More rows in the embedding and in a separate head, drawn from normal(0, init_std).

    Args:
        model: rows that it has are kept.
        vocab_size: rows of the tables afterwards.
        init_std: standard deviation of the new rows.
        seed: of the new rows; embedding and head draw from different streams.

    Raises:
        UsageError: fewer rows than the model has.
    """
    config: HermesConfig = model.config
    if vocab_size < config.vocab_size:
        raise UsageError(
            f"a vocabulary of {vocab_size}, the model has {config.vocab_size}",
            expected="at least as many; tokens are never dropped",
            todo="pass a larger --vocab-size",
        )
    weights = dict(model.weights)
    for stream, name in enumerate((EMBEDDING, HEAD)):
        if name in weights:
            extra = vocab_size - config.vocab_size
            weights[name] = _with_new_rows(weights[name], extra, init_std, 2 * seed + stream)
    return replace(model, config=replace(config, vocab_size=vocab_size), weights=weights)


def _with_new_rows(tensor: LazyTensor, extra: int, std: float, seed: int) -> LazyTensor:
    rows, columns = tensor.shape

    def read(start: int, stop: int) -> Rows:
        import numpy as np
        import torch

        known = tensor.stored(min(start, rows), min(stop, rows))
        if stop <= rows:
            return known
        draw = torch.Generator().manual_seed(seed)
        new = torch.empty(extra, columns).normal_(0.0, std, generator=draw)
        dtype = torch.float32 if tensor.dtype.isupper() else getattr(torch, tensor.dtype)
        added = stored_rows(new.to(dtype))
        return np.concatenate((known, added[max(start - rows, 0) : stop - rows]))

    return tensor.derived(read, shape=(rows + extra, columns))
