"""Safetensors, written as a stream: one tensor in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from hermes.checkpoint.source import ITEM_SIZES, LazyTensor
from hermes.errors import BadInputError, ResourceError

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
}
_CHUNK_ELEMENTS = 2**24


def write_safetensors(
    path: Path, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write in place; the same tensors give the same bytes as the safetensors library.

    The file is complete only when this returns, and none of the tensors may be read from it.
    Dequantized GGUF kinds are written as float32.

    Raises:
        BadInputError: a dtype that is not a float weight's.
        ResourceError: the disk is full or the folder cannot be written.
    """
    plan = {name: _stored_dtype(tensor) for name, tensor in tensors.items()}
    # The library puts wide elements first and sorts names, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-ITEM_SIZES[plan[name]], plan[name], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name in order:
        size = math.prod(tensors[name].shape) * ITEM_SIZES[plan[name]]
        header[name] = {
            "dtype": _CODES[plan[name]],
            "shape": list(tensors[name].shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                _write_rows(file, tensors[name])
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error.strerror}") from error


def _stored_dtype(tensor: LazyTensor) -> str:
    dtype = "float32" if tensor.dtype.isupper() else tensor.dtype
    if dtype not in _CODES:
        raise BadInputError(f"{tensor.origin}: {tensor.dtype} is not a float weight's dtype")
    return dtype


def _write_rows(file: IO[bytes], tensor: LazyTensor) -> None:
    step = max(1, _CHUNK_ELEMENTS * tensor.rows // max(tensor.numel, 1))
    for start in range(0, tensor.rows, step):
        file.write(tensor.stored(start, min(start + step, tensor.rows)).tobytes())
