"""A tensor of a torch file: a strided view of a stretch of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hermes.checkpoint.source import (
    ITEM_SIZES,
    LazyTensor,
    array_from_bytes,
    file_tensor,
    read_bytes,
)
from hermes.checkpoint.tensor_pickle import PickledTensor, Storage
from hermes.errors import BadInputError

if TYPE_CHECKING:
    from hermes.checkpoint.source import Rows

AGAIN = "copy or download the file again"
RESAVE = (
    "save it again where it was made, with torch.save(model.state_dict(), ...), or as safetensors"
)

MakeTensor = Callable[[str, PickledTensor], LazyTensor]
"""Turns a tensor description into a lazy tensor of the given name."""


def tensor_maker(path: Path, locate: Callable[[Storage], tuple[int, int]]) -> MakeTensor:
    """`locate` gives a storage's position in the file and the bytes that are really there."""

    def make(name: str, tensor: PickledTensor) -> LazyTensor:
        item = ITEM_SIZES[tensor.dtype]
        begin, available = locate(tensor.storage)
        declared = tensor.storage.numel * ITEM_SIZES[tensor.storage.dtype or "uint8"]
        if available < declared:
            raise BadInputError(
                f"{path}: {name}: its storage has {available} bytes, {declared} are declared",
                expected="a storage record as long as its description says",
                todo=f"{AGAIN}; the missing bytes would be taken from its neighbours",
            )
        span = _span(tensor)
        if (tensor.offset + span) * item > declared:
            raise BadInputError(
                f"{path}: {name}: reaches past the end of its storage",
                expected=f"at most {declared} bytes for shape {tensor.shape}",
                todo=AGAIN,
            )
        offset = begin + tensor.offset * item
        if _is_contiguous(tensor):
            return file_tensor(name, path, offset, tensor.shape, tensor.dtype)
        return _strided(name, path, offset, span, tensor)

    return make


def _span(tensor: PickledTensor) -> int:
    """Elements from the first to the last one that the tensor touches."""
    if math.prod(tensor.shape) == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _is_contiguous(tensor: PickledTensor) -> bool:
    if math.prod(tensor.shape) == 0:
        return True
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _strided(name: str, path: Path, offset: int, span: int, tensor: PickledTensor) -> LazyTensor:
    """A transposed or sliced tensor: its stretch of the storage is read whole."""
    elements = math.prod(tensor.shape)
    origin = f"{path.name}: {name}"

    def read(start: int, stop: int) -> Rows:
        from numpy.lib.stride_tricks import as_strided

        if elements > span:
            raise BadInputError(
                f"{origin}: {elements} elements share {span} stored ones",
                expected="weights with their own storage",
                todo=RESAVE,
            )
        data = read_bytes(path, offset, span * ITEM_SIZES[tensor.dtype], origin)
        flat = array_from_bytes(data, tensor.dtype, (span,))
        strides = [step * flat.itemsize for step in tensor.stride]
        return as_strided(flat, tensor.shape, strides)[start:stop].copy()

    location = (str(path), offset, tensor.shape, tensor.stride, tensor.dtype)
    return LazyTensor(name, tensor.shape, tensor.dtype, origin, read, location)
