"""From a foreign checkpoint to a Hermes one, and from Hermes to a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.checkpoint import open_checkpoint
from hermes.checkpoint.safetensors_write import write_safetensors
from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import TargetError, UsageError
from hermes.layouts.mapping import MappedModel, map_checkpoint
from hermes.layouts.saving import foreign_weights, huggingface_config
from hermes.parameters import EMBEDDING, HEAD

if TYPE_CHECKING:
    from torch import Tensor


def import_checkpoint(
    source: Path,
    target: Path,
    *,
    layout: str = "auto",
    config: Mapping[str, object] | None = None,
    weights: str | None = None,
    vocab_size: int | None = None,
    init_std: float = 0.02,
    seed: int = 0,
    force: bool = False,
) -> MappedModel:
    """Write a Hermes checkpoint (safetensors, the configuration in its metadata).

    Args:
        source: anything that `open_checkpoint` opens.
        target: the .safetensors file to write.
        layout: as for `map_checkpoint`.
        config: as for `map_checkpoint`.
        weights: as for `open_checkpoint`.
        vocab_size: rows of the tables after the import; new ones are drawn, none is dropped.
        init_std: standard deviation of the new rows.
        seed: of the new rows; embedding and head draw from different streams.
        force: replace an existing target.

    Raises:
        TargetError: the target exists.
        UsageError: a vocabulary smaller than the model's.
    """
    _refuse_existing(target, force)
    model = map_checkpoint(open_checkpoint(source, weights=weights), layout=layout, config=config)
    if vocab_size is not None:
        model = extend_vocabulary(model, vocab_size, init_std, seed)
    metadata = {"format": "pt", "hermes_config": json.dumps(model.config.to_dict())}
    write_safetensors(target, model.weights, metadata)
    return model


def export_huggingface(
    source: Path,
    target: Path,
    *,
    layout: str = "auto",
    config: Mapping[str, object] | None = None,
    weights: str | None = None,
    force: bool = False,
) -> MappedModel:
    """Write a folder that transformers opens; tokenizer files beside the source come along.

    Raises:
        TargetError: the target exists.
        UnsupportedModelError: no transformers model computes this configuration.
    """
    _refuse_existing(target, force)
    checkpoint = open_checkpoint(source, weights=weights)
    model = map_checkpoint(checkpoint, layout=layout, config=config)
    stored = {tensor.dtype for tensor in model.weights.values()}
    dtype = stored.pop() if len(stored) == 1 else "float32"
    described = huggingface_config(model.config, "float32" if dtype.isupper() else dtype)
    target.mkdir(parents=True, exist_ok=True)
    tensors = foreign_weights(model.weights, model.config, "huggingface")
    write_safetensors(target / "model.safetensors", tensors, {"format": "pt"})
    _write_json(target / "config.json", described)
    if checkpoint.generation_config is not None:
        _write_json(target / "generation_config.json", checkpoint.generation_config)
    for name, path in checkpoint.tokenizer_files.items():
        if path.resolve() != (target / name).resolve():
            shutil.copyfile(path, target / name)
    return model


def extend_vocabulary(
    model: MappedModel, vocab_size: int, init_std: float, seed: int
) -> MappedModel:
    """More rows in the embedding and in a separate head, drawn from normal(0, init_std)."""
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

    def read(start: int, stop: int) -> Tensor:
        import torch

        known = tensor.read(min(start, rows), min(stop, rows))
        if stop <= rows:
            return known
        draw = torch.Generator().manual_seed(seed)
        new = torch.empty(extra, columns).normal_(0.0, std, generator=draw).to(known.dtype)
        return torch.cat((known, new[max(start - rows, 0) : stop - rows]))

    return tensor.derived(read, shape=(rows + extra, columns))


def _refuse_existing(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise TargetError(
            f"{target} exists",
            expected="a name that is free",
            todo="choose another or pass --force",
        )


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
