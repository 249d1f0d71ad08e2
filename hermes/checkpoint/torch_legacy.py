"""The old form of torch.save: a stream of pickles with the storages behind them.

Four pickles (magic, protocol, machine, objects), a pickle with the storage keys, then per storage
its element count and its bytes.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import IO

from hermes.checkpoint.source import ITEM_SIZES, read_bytes
from hermes.checkpoint.tensor_pickle import (
    MAX_PICKLE,
    ForeignObject,
    PickledTensor,
    Storage,
    load_tensor_pickle,
)
from hermes.checkpoint.torch_tensors import AGAIN, RESAVE, MakeTensor, tensor_maker
from hermes.errors import BadInputError

_MAGIC = 0x1950A86A20F9469CFC6C


class _Bounded(io.RawIOBase):
    """The first pickles of an old file; reading more than they can need is an error."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left = file, MAX_PICKLE

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._left:
            raise ValueError(f"a string of {size} bytes in the object description")
        self._left -= size
        return self._file.read(size)

    def readline(self, size: int | None = -1) -> bytes:
        return self._file.readline(min(self._left, 2**16))


def open_legacy(path: Path) -> tuple[object, MakeTensor]:
    """As `hermes.checkpoint.torch_file.open_torch_file`, for the pickle stream."""
    with path.open("rb") as file:
        reader: IO[bytes] = _Bounded(file)  # type: ignore[assignment]
        if load_tensor_pickle(reader, path) != _MAGIC:
            raise BadInputError(
                f"{path}: a pickle, but not one of torch.save",
                expected="a file of torch.save, safetensors or GGUF",
                todo=RESAVE,
            )
        _protocol, machine, tree = (load_tensor_pickle(reader, path) for _ in range(3))
        if isinstance(machine, dict) and machine.get("little_endian") is not True:
            raise BadInputError(f"{path}: not written little-endian", todo=RESAVE)
        keys = load_tensor_pickle(reader, path)
        table = _legacy_storages(path, file.tell(), keys, _storage_sizes(tree))

    def locate(storage: Storage) -> tuple[int, int]:
        if storage.key not in table:
            raise BadInputError(f"{path}: storage {storage.key!r} is missing", todo=AGAIN)
        return table[storage.key]

    return tree, tensor_maker(path, locate)


def _storage_sizes(tree: object) -> dict[str, int]:
    """Element size of every storage that a tensor of the tree refers to."""
    sizes: dict[str, int] = {}
    pending, seen = [tree], set()
    while pending:
        node = pending.pop()
        if isinstance(node, PickledTensor):
            sizes[node.storage.key] = ITEM_SIZES[node.storage.dtype or "uint8"]
        elif isinstance(node, (dict, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            pending.extend(node.values() if isinstance(node, dict) else node)
        elif isinstance(node, ForeignObject) and id(node) not in seen:
            seen.add(id(node))
            pending.append(node.attributes)
    return sizes


def _legacy_storages(
    path: Path, position: int, keys: object, item_sizes: dict[str, int]
) -> dict[str, tuple[int, int]]:
    """(offset, bytes) of every storage; the elements' size is known from the tensors."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise BadInputError(f"{path}: its list of storages is damaged", todo=AGAIN)
    table: dict[str, tuple[int, int]] = {}
    size = path.stat().st_size
    for key in keys:
        if key not in item_sizes:
            raise BadInputError(f"{path}: storage {key!r} belongs to no tensor", todo=RESAVE)
        (count,) = struct.unpack("<q", read_bytes(path, position, 8, f"{path}: storage {key}"))
        length = count * item_sizes[key]
        if count < 0 or position + 8 + length > size:
            raise BadInputError(
                f"{path}: storage {key!r} of {count} elements reaches past the end of the file",
                todo=f"{AGAIN}; it is truncated",
            )
        table[key] = (position + 8, length)
        position += 8 + length
    return table
