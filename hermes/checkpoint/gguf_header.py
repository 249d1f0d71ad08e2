"""The header of a GGUF file: metadata and tensor list, read with every length checked.

Source: the GGUF description in llama.cpp's ggml documentation (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hermes.errors import BadInputError

_MAX_ITEMS = 2**22
_MAX_TEXT = 2**24
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor list; `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]  # as PyTorch would show it, the reverse of the file's order
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """Everything before the data."""

    metadata: dict[str, object]
    tensors: list[TensorInfo]
    data_start: int


def read_header(path: Path) -> Header:
    """Parse the header.

    Raises:
        BadInputError: not GGUF, an unknown version, a length past the end of the file, a
            duplicate key or name.
    """
    with path.open("rb") as file:
        reader = _Reader(file, path)
        magic, version = reader.take(4), reader.number("<I")
        if magic != b"GGUF" or version not in (2, 3):
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            reason = "big-endian" if swapped in (2, 3) else f"version {version}"
            raise BadInputError(
                f"{path}: {'GGUF ' + reason if magic == b'GGUF' else 'not a GGUF file'}",
                expected="GGUF version 2 or 3, little-endian",
                todo="convert it again with a current llama.cpp",
            )
        tensor_count, key_count = reader.count("<Q"), reader.count("<Q")
        metadata: dict[str, object] = {}
        for _ in range(key_count):
            key = reader.text()
            if key in metadata:
                raise reader.damaged(f"the key {key} occurs twice")
            metadata[key] = reader.value(reader.number("<I"), depth=0)
        tensors = [reader.tensor() for _ in range(tensor_count)]
        names = {tensor.name for tensor in tensors}
        if len(names) < len(tensors):
            raise reader.damaged("two tensors share a name")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
            raise reader.damaged(f"general.alignment is {alignment!r}")
        data_start = -(-file.tell() // alignment) * alignment
    return Header(metadata, tensors, data_start)


class _Reader:
    """Little-endian values from a file, none of them longer than the file."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path
        self._left = path.stat().st_size

    def damaged(self, reason: str) -> BadInputError:
        return BadInputError(
            f"{self._path}: damaged GGUF header: {reason}",
            expected="a complete GGUF file",
            todo="copy or download the file again",
        )

    def take(self, size: int) -> bytes:
        if size > self._left:
            raise self.damaged(f"{size} bytes wanted, {self._left} are left")
        self._left -= size
        return self._file.read(size)

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def count(self, form: str, most: int = _MAX_ITEMS) -> int:
        value = self.number(form)
        if value > most:
            raise self.damaged(f"a count of {value}")
        return value

    def text(self) -> str:
        # Vocabularies may hold bytes that are no UTF-8; they survive the round trip this way.
        return self.take(self.count("<Q", _MAX_TEXT)).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int) -> object:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise self.damaged(f"value type {kind}")
        return self._scalar(self.take(struct.calcsize(_SCALARS[kind])), kind, 1)[0]

    def _array(self, depth: int) -> list[object]:
        kind, count = self.number("<I"), self.count("<Q")
        if kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            return self._scalar(self.take(size * count), kind, count)
        if depth > 1:
            raise self.damaged("arrays nested too deeply")
        return [self.value(kind, depth + 1) for _ in range(count)]

    def _scalar(self, data: bytes, kind: int, count: int) -> list[object]:
        values = struct.unpack(f"<{count}{_SCALARS[kind][1]}", data)
        if kind == 6:
            # The shortest decimal of a float32: 1e-5 was meant, not 9.99999974737e-06.
            import numpy

            return [float(str(numpy.float32(value))) for value in values]
        return list(values)

    def tensor(self) -> TensorInfo:
        name, dimensions = self.text(), self.number("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name[:80]} has {dimensions} dimensions")
        sizes = [self.number("<Q") for _ in range(dimensions)]
        kind, offset = self.number("<I"), self.number("<Q")
        return TensorInfo(name, tuple(reversed(sizes)), kind, offset)
