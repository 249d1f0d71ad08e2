"""A PEFT adapter folder together with the base model that it changes.

The adapter's tensors are laid beside the base's under their own names; `hermes.layouts.adapters`
merges them, so that neither can be exported without the other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hermes.checkpoint.directory import INDEX_FILES, SINGLE_FILES, companions
from hermes.checkpoint.json_file import read_json_object
from hermes.checkpoint.prefixes import strip_wrappers
from hermes.checkpoint.safetensors_file import open_safetensors
from hermes.checkpoint.source import Checkpoint, LazyTensor
from hermes.checkpoint.torch_file import open_torch_file
from hermes.checkpoint.unwrap import unwrap
from hermes.errors import BadInputError

CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def adapter_folder(path: Path) -> Path | None:
    """The folder of an adapter that the path names, or None for anything else."""
    if path.is_dir() and any((path / name).is_file() for name in (CONFIG, *_WEIGHTS)):
        return path
    return path.parent if path.name in _WEIGHTS and path.is_file() else None


def open_adapter(folder: Path, open_base: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Base and adapter as one checkpoint.

    Raises:
        BadInputError: no adapter weights, no configuration, or no base model at hand.
    """
    if not (folder / CONFIG).is_file():
        raise BadInputError(
            f"{folder}: adapter weights without {CONFIG}",
            expected=f"{CONFIG} with lora_alpha and the base model",
            todo="copy it from where the adapter was trained; the scale of a merge is in it",
        )
    config = read_json_object(folder / CONFIG)
    tensors = _adapter_tensors(folder)
    base = _base(folder, config, open_base)
    replaced = config.get("modules_to_save") or []
    clashes = []
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0].rpartition(".")[2]
        if name in base.tensors and not (isinstance(replaced, list) and module in replaced):
            clashes.append(name)
        elif name in base.tensors:
            base.ignored.append((base.tensors[name].name, "replaced by the adapter's own"))
        base.tensors[name] = tensor
    if clashes:
        raise BadInputError(
            f"{folder}: the adapter holds full tensors that modules_to_save does not name",
            problems=clashes[:20],
        )
    base.adapter = config
    beside = companions(folder)
    base.tokenizer_files = base.tokenizer_files | beside.tokenizer_files
    base.generation_config = beside.generation_config or base.generation_config
    base.notes.append(f"adapter {folder} on base {base.path}")
    base.path = folder
    return base


def _adapter_tensors(folder: Path) -> dict[str, LazyTensor]:
    for name in _WEIGHTS:
        path = folder / name
        if path.is_file():
            if path.suffix == ".safetensors":
                return strip_wrappers(open_safetensors(path)[0])[0]
            tree, make = open_torch_file(path)
            return unwrap(tree, make, path.name, None).tensors
    raise BadInputError(
        f"{folder}: {CONFIG} without adapter weights",
        expected=f"one of {', '.join(_WEIGHTS)}",
        todo="copy the adapter's weights too, or remove the file to export the base alone",
    )


def _base(
    folder: Path, config: dict[str, object], open_base: Callable[[Path], Checkpoint]
) -> Checkpoint:
    for name in (*SINGLE_FILES, *INDEX_FILES):
        if (folder / name).is_file():
            return open_base(folder / name)
    said = config.get("base_model_name_or_path")
    for candidate in (folder / str(said), Path(str(said))) if said else ():
        if candidate.exists() and candidate.resolve() != folder.resolve():
            return open_base(candidate)
    raise BadInputError(
        f"{folder}: an adapter for the base model {said!r}, which is not here",
        expected="the base model as a local file or folder",
        todo=f"write its path into base_model_name_or_path of {CONFIG}, or put the base's weights "
        "into the same folder",
    )
