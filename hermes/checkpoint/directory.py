"""Folders: which file holds the weights, and what lies beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hermes.checkpoint.json_file import read_json_object
from hermes.checkpoint.sharded import weight_map_of
from hermes.errors import BadInputError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
CONFIG_FILES = ("config.json", "hermes_config.json", "params.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin", "consolidated.00.pth")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.(safetensors|bin)$")
_NOT_WEIGHTS = re.compile(
    r"^(optimizer|scheduler|training_args|rng_state|scaler|random_states|adapter_model)"
)


@dataclass
class Companions:
    """Files beside the weights that tell about them."""

    config: Mapping[str, object] | None = None
    config_origin: str = ""
    generation_config: Mapping[str, object] | None = None
    tokenizer_files: dict[str, Path] = field(default_factory=dict)


def weights_in(folder: Path) -> tuple[Path, list[str]]:
    """The file to open in a folder and notes about what was passed over.

    Raises:
        BadInputError: no weights, parts of a set without its index, or several candidates.
    """
    for name in (*SINGLE_FILES[:1], *INDEX_FILES[:1], *SINGLE_FILES[1:2], *INDEX_FILES[1:]):
        if (folder / name).is_file():
            return folder / name, _passed_over(folder, folder / name)
    found = _weight_files(folder)
    shards = [path.name for path in found if _SHARD.search(path.name)]
    if shards:
        raise BadInputError(
            f"{folder}: parts of a set of files, but no index: {', '.join(shards[:4])}",
            expected=f"one of {', '.join(INDEX_FILES)}",
            todo="download or copy the index too",
        )
    pieces = list(folder.glob("*.distcp"))
    if pieces and not found:
        raise BadInputError(
            f"{folder}: a distributed checkpoint of {len(pieces)} parts",
            expected="one file with full tensors",
            todo="python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER all.pt",
        )
    parts = [path for path in found if path.name.startswith("consolidated.")]
    if len(parts) > 1:
        raise BadInputError(
            f"{folder}: {len(parts)} model-parallel parts ({parts[0].name}, ...)",
            expected="one file with full matrices",
            todo="merge the parts first, or use the model's Hugging Face form",
        )
    if len(found) != 1:
        raise BadInputError(
            f"{folder}: {len(found)} weight files" if found else f"{folder}: no weight file",
            problems=[path.name for path in found[:20]],
            expected=f"one of {', '.join((*SINGLE_FILES, *INDEX_FILES))}, or a single file",
            todo="name the file itself" if found else "name the right folder or file",
        )
    return found[0], []


def _weight_files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _SUFFIXES and path.is_file() and not _NOT_WEIGHTS.match(path.name)
    )


def _passed_over(folder: Path, used: Path) -> list[str]:
    """Other weight files are named, so that nobody thinks they were mixed in."""
    listed = set(weight_map_of(used).values()) if used.suffix == ".json" else set[str]()
    strays = [
        path.name for path in _weight_files(folder) if path != used and path.name not in listed
    ]
    return [f"{used.name} was used; not read: {', '.join(strays)}"] if strays else []


def companions(folder: Path) -> Companions:
    """Config, generation config and tokenizer files of a folder."""
    result = Companions()
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            result.config, result.config_origin = read_json_object(folder / name), name
            break
    if (folder / "generation_config.json").is_file():
        result.generation_config = read_json_object(folder / "generation_config.json")
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            result.tokenizer_files[name] = folder / name
    return result
