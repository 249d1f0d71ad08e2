"""Sylvester's Hadamard matrices and the block width in which the graph applies one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hermes.config import HermesConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WIDEST_BLOCK = 64
"""Wider blocks spread outliers further and cost more at run time; see docs/quantization.md."""


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
