"""One door for every kind of checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from hermes.checkpoint.adapter import adapter_folder, open_adapter
from hermes.checkpoint.directory import companions, weights_in
from hermes.checkpoint.gguf_config import config_from_gguf
from hermes.checkpoint.gguf_file import open_gguf
from hermes.checkpoint.json_file import parse_json_object
from hermes.checkpoint.plain import MODEL_FIELDS
from hermes.checkpoint.prefixes import strip_wrappers
from hermes.checkpoint.safetensors_file import open_safetensors
from hermes.checkpoint.sharded import open_sharded
from hermes.checkpoint.source import Checkpoint, LazyTensor
from hermes.checkpoint.torch_file import open_torch_file
from hermes.checkpoint.unwrap import unwrap
from hermes.errors import BadInputError, UsageError


def open_checkpoint(path: Path, *, weights: str | None = None) -> Checkpoint:
    """Open a file or folder lazily; `weights` names one of several sets (`ema`, `raw`, a key).

    Raises:
        BadInputError: missing, damaged, ambiguous or not a checkpoint.
        UnsupportedModelError: quantized in a way that cannot be read.
    """
    path = Path(path)
    try:
        notes: list[str] = []
        file = path
        folder = adapter_folder(path)
        if folder is not None:
            return open_adapter(folder, lambda base: open_checkpoint(base, weights=weights))
        if path.is_dir():
            file, notes = weights_in(path)
        elif not path.is_file():
            raise BadInputError(
                f"{path}: no such file or folder",
                expected="a checkpoint file or a folder with one",
                todo="check the path",
            )
        checkpoint = _open_file(file, weights)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    checkpoint.path = path
    checkpoint.notes = notes + checkpoint.notes
    _add_companions(checkpoint, file)
    return checkpoint


def _open_file(file: Path, weights: str | None) -> Checkpoint:
    if file.name.endswith(".index.json"):
        tensors, extra = open_sharded(file, _open_shard)
        checkpoint = _flat(file, tensors, {}, weights)
        checkpoint.ignored += extra
        return checkpoint
    kind = _sniff(file)
    if kind == "gguf":
        _one_set(file, weights)
        tensors, metadata = open_gguf(file)
        return Checkpoint(
            file,
            tensors,
            config=config_from_gguf(metadata),
            config_origin=f"{file.name}: metadata",
            gguf_metadata=metadata,
        )
    if kind == "safetensors":
        return _flat(file, *open_safetensors(file), weights)
    tree, make = open_torch_file(file)
    found = unwrap(tree, make, file.name, weights)
    return Checkpoint(
        file,
        found.tensors,
        config=found.config,
        config_origin=found.config_origin,
        adapter=found.adapter,
        ignored=found.ignored,
        notes=found.notes,
    )


def _open_shard(path: Path) -> dict[str, LazyTensor]:
    kind = _sniff(path)
    if kind == "safetensors":
        return open_safetensors(path)[0]
    if kind != "torch":
        raise BadInputError(f"{path.name}: a {kind} file inside a set of weight files")
    tree, make = open_torch_file(path)
    return unwrap(tree, make, path.name, None).tensors


def _one_set(file: Path, weights: str | None) -> None:
    if weights is not None:
        raise UsageError(
            f"{file.name} holds one set of weights, {weights!r} was asked for",
            todo="leave --weights away",
        )


def _flat(
    file: Path, tensors: dict[str, LazyTensor], metadata: dict[str, str], weights: str | None
) -> Checkpoint:
    _one_set(file, weights)
    if not tensors:
        raise BadInputError(f"{file}: holds no tensors", expected="the weights of a model")
    bare, ignored, notes = strip_wrappers(tensors)
    checkpoint = Checkpoint(file, bare, ignored=ignored, notes=notes)
    for key in ("hermes_config", "config", "model_config"):
        if metadata.get(key, "").lstrip().startswith("{"):
            origin = f"{file.name}: metadata {key}"
            config = parse_json_object(metadata[key].encode(), origin)
            if MODEL_FIELDS & config.keys():
                checkpoint.config, checkpoint.config_origin = config, origin
                break
    return checkpoint


def _sniff(file: Path) -> str:
    """What the first bytes say, whatever the file is called."""
    with file.open("rb") as stream:
        start = stream.read(64)
    if start.startswith(b"GGUF") or file.suffix == ".gguf":
        return "gguf"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "torch"
    if start.startswith(b"version https://git-lfs"):
        raise BadInputError(
            f"{file}: a Git LFS pointer, not the weights",
            expected="the file that the pointer stands for",
            todo="run `git lfs pull` in that repository",
        )
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise BadInputError(
            f"{file}: a web page, not the weights",
            expected="a checkpoint file",
            todo="download it again; the server answered with a page, perhaps a login",
        )
    if file.suffix == ".safetensors" or start[8:9] == b"{":
        return "safetensors"
    raise BadInputError(
        f"{file}: not a checkpoint that Hermes knows; it starts with {start[:8]!r}",
        expected="a file of torch.save, safetensors or GGUF, or a folder with one",
        todo="copy or download the file again, or name another",
    )


def _add_companions(checkpoint: Checkpoint, file: Path) -> None:
    beside = companions(file.parent)
    checkpoint.generation_config = beside.generation_config
    checkpoint.tokenizer_files = beside.tokenizer_files
    if checkpoint.config is None:
        checkpoint.config, checkpoint.config_origin = beside.config, beside.config_origin
    elif beside.config is not None and _differ(checkpoint.config, beside.config):
        checkpoint.notes.append(
            f"configuration used: {checkpoint.config_origin}; not used: {beside.config_origin}"
        )


def _differ(first: object, second: object) -> bool:
    return json.dumps(first, sort_keys=True, default=str) != json.dumps(
        second, sort_keys=True, default=str
    )
