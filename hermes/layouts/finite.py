"""Weights that are not numbers are found while they stream by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes.checkpoint.source import LazyTensor, as_floats
from hermes.errors import BadInputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hermes.checkpoint.source import Rows

_INFINITIES = {
    "float32": ("uint32", "int32", 0x7F800000),
    "bfloat16": ("uint16", "int16", 0x7F80),
    "float16": ("uint16", "int16", 0x7C00),
}
"""Integers of that width, and the bits of infinity: those of every finite magnitude are smaller,
NaN's are larger."""


def checked(tensor: LazyTensor) -> LazyTensor:
    """The same tensor; reading rows with NaN or infinity raises BadInputError."""

    def read(start: int, stop: int) -> Rows:
        rows = tensor.stored(start, stop)
        if not _all_finite(rows, tensor.dtype):
            raise not_finite(as_floats(rows, tensor.dtype), tensor.origin, start)
        return rows

    return tensor.derived(read)


def check_finite(values: NDArray[np.float32], origin: str, first_row: int = 0) -> None:
    """Name the first NaN or infinity, with its index in the whole tensor.

    Raises:
        BadInputError: there is one.
    """
    if not _all_finite(values, "float32"):
        raise not_finite(values, origin, first_row)


def not_finite(values: NDArray[np.float32], origin: str, first_row: int = 0) -> BadInputError:
    """The error for values of which one is NaN or infinite."""
    import numpy as np

    bad = np.argwhere(~np.isfinite(values))
    first = bad[0].tolist()
    value = float(values[tuple(first)])
    if first:
        first[0] += first_row
    return BadInputError(
        f"{origin}: {value} at index {first}, {len(bad)} such values",
        expected="finite weights",
        todo="use an earlier checkpoint; this one was saved after training had diverged",
    )


def _all_finite(rows: Rows, dtype: str) -> bool:
    import numpy as np

    if not rows.size:
        return True
    if dtype in _INFINITIES:
        unsigned, signed, infinity = _INFINITIES[dtype]
        negative = infinity + (1 << 8 * rows.itemsize - 1)
        # As signed integers the largest are positive floats, as unsigned ones negative floats.
        largest = int(rows.view(signed).max()), int(rows.view(unsigned).max())
        return largest[0] < infinity and largest[1] < negative
    # Two passes without a temporary: NaN and infinity both survive into the extremes.
    return bool(np.isfinite(rows.min()) and np.isfinite(rows.max()))


def narrowed(tensor: LazyTensor) -> LazyTensor:
    """float64 weights as float32, everything else as stored."""
    if tensor.dtype != "float64":
        return tensor
    return tensor.derived(tensor.floats, dtype="float32")
