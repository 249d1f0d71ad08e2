"""Safetensors, parsed here: the header is small, and a reader of our own can name what is wrong.

Format: 8 bytes little-endian header length, that many bytes of JSON (name -> dtype, shape,
data_offsets), then the data, which the entries must cover without overlap or gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hermes.checkpoint.json_file import parse_json_object
from hermes.checkpoint.source import ITEM_SIZES, LazyTensor, file_tensor, read_bytes
from hermes.errors import BadInputError

_MAX_HEADER = 100_000_000
_MAX_DIMENSIONS = 8
_MAX_PROBLEMS = 20

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def open_safetensors(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Tensors in data order and the header's own metadata.

    Raises:
        BadInputError: anything that breaks the format, every entry's problem at once.
    """
    size = path.stat().st_size
    header, data_start = _read_header(path, size)
    metadata = _metadata(header.pop("__metadata__", {}), path)
    entries, problems = [], []
    for name, raw in header.items():
        entry = _entry(name, raw)
        if isinstance(entry, _Entry):
            entries.append(entry)
        else:
            problems.append(entry)
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    problems = problems or _layout_problems(entries, size - data_start)
    if problems:
        raise BadInputError(
            f"{path}: damaged safetensors file",
            problems=_shortened(problems),
            expected="entries that cover the data without overlap or gap",
            todo="copy or download the file again",
        )
    tensors = {
        entry.name: file_tensor(
            entry.name, path, data_start + entry.begin, entry.shape, entry.dtype
        )
        for entry in entries
    }
    return tensors, metadata


def _read_header(path: Path, size: int) -> tuple[dict[str, object], int]:
    todo = "copy or download the file again"
    if size < 8:
        raise BadInputError(
            f"{path}: {size} bytes, too short for a safetensors file",
            expected="8 bytes of header length, a header and data",
            todo=todo,
        )
    length = int.from_bytes(read_bytes(path, 0, 8, str(path)), "little")
    if length > _MAX_HEADER or length > size - 8:
        raise BadInputError(
            f"{path}: says its header has {length} bytes, the file has {size}",
            expected=f"a header within the file and at most {_MAX_HEADER} bytes",
            todo=f"{todo}; it is truncated or not safetensors",
        )
    header = bytes(read_bytes(path, 8, length, str(path)))
    return parse_json_object(header, f"{path}: safetensors header"), 8 + length


def _metadata(raw: object, path: Path) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise BadInputError(
            f"{path}: __metadata__ is not a map from text to text",
            todo="copy or download the file again",
        )
    return raw


def _entry(name: str, raw: object) -> _Entry | str:
    """The checked entry, or what is wrong with it."""
    if not isinstance(raw, Mapping) or set(raw) != {"dtype", "shape", "data_offsets"}:
        return f"{name}: expected dtype, shape and data_offsets"
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        return f"{name}: unknown dtype {dtype!r}"
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        return f"{name}: shape {str(shape)[:80]} is not a list of sizes"
    if not _are_sizes(offsets) or len(offsets) != 2:
        return f"{name}: data_offsets {str(offsets)[:80]} are not two positions"
    begin, end = offsets
    needed = math.prod(shape) * ITEM_SIZES[_DTYPES[dtype]]
    if end - begin != needed:
        return (
            f"{name}: {dtype} {tuple(shape)} needs {needed} bytes, data_offsets give {end - begin}"
        )
    return _Entry(name, _DTYPES[dtype], tuple(shape), begin, end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _layout_problems(entries: list[_Entry], data_size: int) -> list[str]:
    problems, position, before = [], 0, "the start of the data"
    for entry in entries:
        if entry.end > data_size:
            problems.append(
                f"{entry.name}: ends at byte {entry.end} of the data, the file has {data_size}"
            )
        elif entry.begin < position:
            problems.append(f"{entry.name}: overlaps {before}")
        elif entry.begin > position:
            problems.append(f"{entry.name}: {entry.begin - position} unnamed bytes before it")
        position, before = max(position, entry.end), entry.name
    if not problems and position < data_size:
        problems.append(f"{data_size - position} unnamed bytes at the end")
    return problems


def _shortened(problems: list[str]) -> list[str]:
    if len(problems) <= _MAX_PROBLEMS:
        return problems
    return [*problems[:_MAX_PROBLEMS], f"and {len(problems) - _MAX_PROBLEMS} more"]
