"""Weights that are not numbers are found while they stream by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes.checkpoint.source import LazyTensor
from hermes.errors import BadInputError

if TYPE_CHECKING:
    from torch import Tensor


def checked(tensor: LazyTensor) -> LazyTensor:
    """The same tensor; reading rows with NaN or infinity raises BadInputError."""

    def read(start: int, stop: int) -> Tensor:
        values = tensor.read(start, stop)
        check_finite(values, tensor.origin, start)
        return values

    return tensor.derived(read)


def check_finite(values: Tensor, origin: str, first_row: int = 0) -> None:
    """Name the first NaN or infinity, with its index in the whole tensor.

    Raises:
        BadInputError: there is one.
    """
    if not values.numel():
        return
    # One pass without a temporary: NaN and infinity both survive into the extremes.
    low, high = values.aminmax()
    if low.isfinite() and high.isfinite():
        return
    bad = (~values.isfinite()).nonzero()
    first = bad[0].tolist()
    value = values[tuple(first)].item()
    if first:
        first[0] += first_row
    raise BadInputError(
        f"{origin}: {value} at index {first}, {len(bad)} such values",
        expected="finite weights",
        todo="use an earlier checkpoint; this one was saved after training had diverged",
    )


def narrowed(tensor: LazyTensor) -> LazyTensor:
    """float64 weights as float32, everything else as stored."""
    if tensor.dtype != "float64":
        return tensor

    def read(start: int, stop: int) -> Tensor:
        return tensor.read(start, stop).float()

    return tensor.derived(read, dtype="float32")
