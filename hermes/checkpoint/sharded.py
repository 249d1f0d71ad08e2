"""A set of weight files with an index: exactly the files and names that the index lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from hermes.checkpoint.json_file import read_json_object
from hermes.checkpoint.source import LazyTensor
from hermes.errors import BadInputError

OpenShard = Callable[[Path], dict[str, LazyTensor]]
"""Opens one file of the set, already flattened to names."""


def open_sharded(
    index: Path, open_shard: OpenShard
) -> tuple[dict[str, LazyTensor], list[tuple[str, str]]]:
    """Tensors in the index's order, and what the files hold beyond it.

    Raises:
        BadInputError: a damaged index, entries outside its folder, missing or damaged files,
            names that a file does not hold; all at once.
    """
    weight_map = weight_map_of(index)
    files = list(dict.fromkeys(weight_map.values()))
    shards: dict[str, dict[str, LazyTensor]] = {}
    problems: list[str] = []
    for file in files:
        count = sum(1 for where in weight_map.values() if where == file)
        try:
            shards[file] = open_shard(_shard_path(index, file, count))
        except BadInputError as error:
            problems += [error.found, *error.problems]
    for name, file in weight_map.items():
        if file in shards and name not in shards[file]:
            problems.append(f"{file} does not hold {name}, which the index puts there")
    if problems:
        raise BadInputError(
            f"{index}: the set of files is not complete",
            problems=problems,
            expected="every file and every name of the index",
            todo="download or copy the missing and damaged files again",
        )
    tensors = {name: shards[file][name] for name, file in weight_map.items()}
    extra = [
        (f"{file}: {name}", "not listed in the index")
        for file, shard in shards.items()
        for name in shard
        if weight_map.get(name) != file
    ]
    return tensors, extra


def weight_map_of(index: Path) -> dict[str, str]:
    """The index's map from tensor name to file name."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInputError(
            f"{index}: no weight_map in it",
            expected="a map from tensor name to file name",
            todo="download or copy the index again",
        )
    odd = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if odd:
        raise BadInputError(f"{index}: weight_map gives no file name for {odd[:5]}")
    return weight_map


def _shard_path(index: Path, file: str, count: int) -> Path:
    """The file of one entry; it must be a real file inside the index's own folder."""
    folder, relative = index.parent, PurePosixPath(file)
    if relative.is_absolute() or ".." in relative.parts or "\\" in file or "\0" in file:
        raise BadInputError(f"{file!r} leaves the folder of the index; {count} tensors refused")
    path = folder / file
    if not path.is_file():
        raise BadInputError(f"{file} is missing; the index puts {count} tensors into it")
    if not _stays_inside(path, folder):
        raise BadInputError(
            f"{file} is a link that leaves the folder of the index; {count} tensors refused"
        )
    return path


def _stays_inside(path: Path, folder: Path) -> bool:
    target, home = path.resolve(), folder.resolve()
    if target.is_relative_to(home):
        return True
    # The Hugging Face cache keeps snapshots/<commit>/ as links into blobs/ of the same repository.
    return home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
