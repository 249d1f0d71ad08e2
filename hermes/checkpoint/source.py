"""What an opened checkpoint is: names, shapes and readers; no tensor data is loaded yet."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes.errors import BadInputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Rows = NDArray[Any]
    """Rows as they are stored: numpy's type of that name, bfloat16 and float8 as their bits."""

ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every plain dtype, by PyTorch's name."""

WEIGHT_DTYPES = ("float32", "float16", "bfloat16", "float64")
"""Dtypes that hold weights as they are; everything else is quantized or not a weight."""

_BITS = {"bfloat16": "uint16", **{kind: "uint8" for kind in ITEM_SIZES if kind[:6] == "float8"}}
"""Dtypes that numpy lacks -> the integers that carry their bits."""
_KEPT_OPEN = 8


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a checkpoint; `read` fetches its rows from disk.

    Attributes:
        name: key in the file.
        shape: as PyTorch would show it.
        dtype: PyTorch's dtype name, or a GGUF kind such as `Q8_0`.
        origin: file (and key) for messages.
        reader: gives rows start..stop of dimension 0 as they are stored; GGUF kinds as float32.
        location: identifies the stored bytes, so that two names of one tensor can be told.
        raw: gives the bytes of rows start..stop, where they lie in the file as they are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    origin: str
    reader: Callable[[int, int], Rows] = field(repr=False, compare=False)
    location: tuple[object, ...] | None = field(default=None, repr=False)
    raw: Callable[[int, int], bytearray] | None = field(default=None, repr=False, compare=False)

    @property
    def rows(self) -> int:
        """Length of dimension 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def stored(self, start: int = 0, stop: int | None = None) -> Rows:
        """Rows start..stop (all by default) as `reader` gives them; nothing here needs torch."""
        last = self.rows if stop is None else stop
        if not 0 <= start <= last <= self.rows:
            raise ValueError(f"{self.name}: rows {start}..{last} of {self.rows}")
        return self.reader(start, last)

    def floats(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """The same rows as contiguous float32 values, rounded where they were float64."""
        return as_floats(self.stored(start, stop), self.dtype)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The same rows as a torch tensor in the stored float dtype; GGUF kinds as float32."""
        import torch

        rows = self.stored(start, stop)
        tensor = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        return tensor.view(getattr(torch, self.dtype)) if self.dtype in _BITS else tensor

    def derived(
        self,
        reader: Callable[[int, int], Rows],
        *,
        shape: tuple[int, ...] | None = None,
        dtype: str | None = None,
    ) -> LazyTensor:
        """A tensor computed from this one: other data, so neither its bytes nor its place."""
        return replace(
            self,
            reader=reader,
            shape=self.shape if shape is None else shape,
            dtype=self.dtype if dtype is None else dtype,
            location=None,
            raw=None,
        )

    def renamed(self, name: str) -> LazyTensor:
        """The same data under another name."""
        return replace(self, name=name)


@dataclass
class Checkpoint:
    """An opened checkpoint after unwrapping containers and wrapper prefixes.

    Attributes:
        path: what the user named.
        tensors: by name, in file order.
        config: the model configuration as found, or None.
        config_origin: where it was found; empty if it was not.
        generation_config: `generation_config.json` as found, or None.
        tokenizer_files: by file name, those present beside the weights.
        gguf_metadata: all metadata of a GGUF file, or None.
        adapter: configuration of a LoRA adapter whose tensors are among these, or None.
        ignored: (key, reason) of everything seen and left out.
        notes: statements for the report.
    """

    path: Path
    tensors: dict[str, LazyTensor]
    config: Mapping[str, object] | None = None
    config_origin: str = ""
    generation_config: Mapping[str, object] | None = None
    tokenizer_files: dict[str, Path] = field(default_factory=dict)
    gguf_metadata: Mapping[str, object] | None = None
    adapter: Mapping[str, object] | None = None
    ignored: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_bytes(path: Path, offset: int, size: int, origin: str) -> bytearray:
    """Exactly `size` bytes at `offset`.

    Raises:
        BadInputError: the file has become shorter or unreadable since it was opened.
    """
    data = bytearray(size)
    read_into(memoryview(data), path, offset, origin)
    return data


def read_into(view: memoryview, path: Path, offset: int, origin: str) -> None:
    """Fill the bytes of a view with those at `offset`; raises as `read_bytes`."""
    size, done = len(view), 0
    try:
        found = path.stat()
        file = _opened(path, found.st_dev, found.st_ino)
        while done < size:
            count = os.preadv(file.fileno(), [view[done:]], offset + done)
            if not count:
                break
            done += count
    except OSError as error:
        raise BadInputError(f"{origin}: cannot be read: {error.strerror}") from error
    if done < size:
        raise BadInputError(
            f"{origin}: the file ends {size - done} bytes too early",
            expected=f"{size} bytes at offset {offset}",
            todo="copy or download the file again; it changed or is truncated",
        )


@lru_cache(maxsize=_KEPT_OPEN)
def _opened(path: Path, device: int, inode: int) -> FileIO:
    """The file, kept open: opening it for every piece of a tensor costs as much as reading it."""
    return path.open("rb", buffering=0)


def file_tensor(
    name: str, path: Path, offset: int, shape: tuple[int, ...], dtype: str
) -> LazyTensor:
    """A contiguous tensor whose bytes lie at `offset` of `path`, little-endian."""
    origin = f"{path.name}: {name}"
    row_shape = shape[1:]
    row_bytes = ITEM_SIZES[dtype] * math.prod(row_shape)

    def raw(start: int, stop: int) -> bytearray:
        return read_bytes(path, offset + start * row_bytes, (stop - start) * row_bytes, origin)

    def read(start: int, stop: int) -> Rows:
        import numpy as np

        # Unlike a bytearray it is not filled with zeros first.
        rows = np.empty((stop - start, *row_shape) if shape else (), _BITS.get(dtype, dtype))
        view = rows.reshape(-1).view(np.uint8).data
        read_into(view, path, offset + start * row_bytes, origin)
        return rows

    return LazyTensor(name, shape, dtype, origin, read, (str(path), offset, shape, dtype), raw)


def array_from_bytes(data: bytearray, dtype: str, shape: tuple[int, ...]) -> Rows:
    """Interpret little-endian bytes without a copy."""
    import numpy as np

    return np.frombuffer(data, dtype=_BITS.get(dtype, dtype)).reshape(shape)


def as_floats(rows: Rows, dtype: str) -> NDArray[np.float32]:
    """Stored rows of a weight's dtype as contiguous float32 values."""
    import numpy as np

    if dtype == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        wide = np.asarray(np.left_shift(rows, 16, dtype=np.uint32, order="C"))
        return wide.view(np.float32)
    if dtype in _BITS:
        raise ValueError(f"{dtype} holds no weights")
    return np.ascontiguousarray(rows, dtype=np.float32).reshape(rows.shape)


def stored_rows(tensor: Tensor) -> Rows:
    """A torch tensor as a reader gives it."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    contiguous = tensor.detach().contiguous()
    bits = contiguous.view(getattr(torch, _BITS[name])) if name in _BITS else contiguous
    rows: Rows = bits.numpy()
    return rows


def same_values(first: LazyTensor, second: LazyTensor) -> bool:
    """Bit-equal data, compared in slices of about 16 MB."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if first.location is not None and first.location == second.location:
        return True
    step = max(1, 2**22 * first.rows // max(first.numel, 1))
    for start in range(0, first.rows, step):
        stop = min(start + step, first.rows)
        if _row_bytes(first, start, stop) != _row_bytes(second, start, stop):
            return False
    return True


def _row_bytes(tensor: LazyTensor, start: int, stop: int) -> bytes | bytearray:
    if tensor.raw is not None and tensor.location is not None:
        return tensor.raw(start, stop)
    return tensor.stored(start, stop).tobytes()
