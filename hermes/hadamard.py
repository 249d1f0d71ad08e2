"""Sylvester's Hadamard matrices, products with them, and the width of those in the graph."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from hermes.config import HermesConfig

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    Numbers = NDArray[np.floating]

WIDEST_BLOCK = 64
"""Wider blocks spread outliers further and cost more at run time; see docs/quantization.md."""
_MOST_PARTS = 64


def hadamard(size: int) -> NDArray[np.float64]:
    """The orthogonal, symmetric matrix [size, size] of a power of two (Sylvester 1867)."""
    import numpy as np

    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)


def mixing_block(config: HermesConfig) -> int:
    """Width of the blocks of the feed-forward's product that are mixed; 1 mixes nothing."""
    return math.gcd(config.intermediate_size, WIDEST_BLOCK)


def transform_rows(values: Numbers, signs: Numbers, odd: Numbers) -> Numbers:
    """[R, W] times diag(signs) (odd (x) H), with H the Hadamard matrix of 1 and -1.

    Args:
        values: [R, W], float32 or float64.
        signs: [W], of the same dtype; any factors.
        odd: [D, D], likewise, W = D N with N a power of two.
    """
    parts, size = _factors(values.shape[1], signs, odd)
    kernels = _kernels(parts, size)
    if kernels is not None:
        found: Numbers = kernels.transform_rows(values, signs, odd)
        return found
    mixed = odd.T @ (values * signs).reshape(-1, parts, size)
    result: Numbers = (mixed @ _unscaled(size, values.dtype)).reshape(values.shape)
    return result


def transform_columns(values: Numbers, signs: Numbers, odd: Numbers) -> Numbers:
    """The transpose of `transform_rows`' matrix times [W, C]."""
    parts, size = _factors(len(values), signs, odd)
    kernels = _kernels(parts, size)
    if kernels is not None:
        found: Numbers = kernels.transform_columns(values, signs, odd)
        return found
    mixed = odd.T @ (values * signs[:, None]).reshape(parts, -1)
    whole = _unscaled(size, values.dtype) @ mixed.reshape(parts, size, -1)
    result: Numbers = whole.reshape(values.shape)
    return result


def _factors(width: int, signs: Numbers, odd: Numbers) -> tuple[int, int]:
    """(D, N) of shapes that fit: machine code reads wherever it is told to."""
    size = width // len(odd)
    if len(signs) != width or len(odd) * size != width or size & size - 1:
        raise ValueError(f"vectors of {width}, {len(signs)} signs and an odd factor of {len(odd)}")
    return len(odd), size


def _unscaled(size: int, dtype: DTypeLike) -> Numbers:
    matrix: Numbers = (hadamard(size) * math.sqrt(size)).astype(dtype)
    return matrix


def _kernels(parts: int, size: int) -> ModuleType | None:
    """Machine code, where LLVM is installed and the shape suits it; else numpy multiplies."""
    # Code for every part is written out, and vectors have eight values.
    return _machine_code() if parts <= _MOST_PARTS and size % 8 == 0 else None


@functools.cache
def _machine_code() -> ModuleType | None:
    try:
        from hermes.kernels import transform
    except ImportError:
        return None
    return transform
