"""GGUF tensors, read by rows; quantized kinds are dequantized by the gguf package."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.checkpoint.gguf_header import TensorInfo, read_header
from hermes.checkpoint.source import LazyTensor, file_tensor, read_bytes
from hermes.errors import BadInputError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SLICE = 2**20  # elements
_PLAIN = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}


def open_gguf(path: Path) -> tuple[dict[str, LazyTensor], dict[str, object]]:
    """Tensors in file order and all metadata.

    Raises:
        BadInputError: damaged header, data outside the file, overlaps.
        UnsupportedModelError: a quantized kind that cannot be dequantized.
    """
    header = read_header(path)
    available = path.stat().st_size - header.data_start
    problems: list[str] = []
    unsupported: list[str] = []
    tensors: dict[str, LazyTensor] = {}
    extents: list[tuple[int, int, str]] = []
    for info in header.tensors:
        kind = _kind(info.kind)
        if kind is None:
            unsupported.append(f"{info.name}: kind {info.kind}")
            continue
        name, block, size = kind
        columns = info.shape[-1] if info.shape else 1
        if columns % block:
            problems.append(f"{info.name}: {columns} columns are no multiple of {block} ({name})")
            continue
        length = math.prod(info.shape) // block * size
        if info.offset + length > available:
            problems.append(f"{info.name}: reaches past the end of the file")
            continue
        extents.append((info.offset, info.offset + length, info.name))
        tensors[info.name] = _tensor(path, info, kind, header.data_start + info.offset)
    extents.sort()
    for (_, end, first), (begin, _, second) in pairwise(extents):
        if begin < end:
            problems.append(f"{second}: overlaps {first}")
    if problems:
        raise BadInputError(
            f"{path}: damaged GGUF file of {path.stat().st_size} bytes",
            problems=problems[:20],
            expected="every tensor inside the file, none overlapping",
            todo="copy or download the file again; it is truncated or damaged",
        )
    if unsupported:
        raise UnsupportedModelError(
            f"{path}: quantization kinds that cannot be read",
            problems=unsupported[:20],
            expected="f32, f16, bf16 or a kind that the gguf package dequantizes",
            todo="convert the model to f16 or Q8_0 with llama.cpp",
        )
    return tensors, header.metadata


@lru_cache
def _kind(number: int) -> tuple[str, int, int] | None:
    """(name, elements per block, bytes per block), None if it cannot be read."""
    import numpy
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        if kind.name not in _PLAIN:
            dequantize(numpy.zeros((1, size), dtype=numpy.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return kind.name, block, size


def _tensor(path: Path, info: TensorInfo, kind: tuple[str, int, int], offset: int) -> LazyTensor:
    name, block, size = kind
    if name in _PLAIN:
        return file_tensor(info.name, path, offset, info.shape, _PLAIN[name])
    origin = f"{path.name}: {info.name}"
    # A vector is one row of blocks, and a slice of it may cut a block.
    matrix = len(info.shape) > 1
    row_shape = info.shape[1:] if matrix else info.shape
    row_bytes = math.prod(row_shape) // block * size

    def read(start: int, stop: int) -> NDArray[np.float32]:
        first, last = (start, stop) if matrix else (0, 1)
        data = read_bytes(path, offset + first * row_bytes, (last - first) * row_bytes, origin)
        values = _dequantized(data, name, block, size)
        return values.reshape(last - first, *row_shape) if matrix else values[start:stop]

    return LazyTensor(info.name, info.shape, name, origin, read, (str(path), offset))


def _dequantized(data: bytearray, kind: str, block: int, size: int) -> NDArray[np.float32]:
    """Float32 values of all blocks, in slices that keep the temporaries small."""
    import numpy
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks = numpy.frombuffer(data, dtype=numpy.uint8).reshape(-1, size)
    values = numpy.empty(len(blocks) * block, dtype=numpy.float32)
    step = max(1, _SLICE // block)
    for start in range(0, len(blocks), step):
        # One long row: the package works through rows in groups of 16, slow for short ones.
        row = blocks[start : start + step].reshape(1, -1)
        values[start * block : start * block + len(row[0]) // size * block] = dequantize(
            row, GGMLQuantizationType[kind]
        ).reshape(-1)
    return values
