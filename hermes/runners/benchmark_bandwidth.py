"""How fast this machine reads memory: the bound of decoding, which reads every weight per token."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ARRAY_BYTES = 512 * 2**20
"""Of all threads together; far more than any cache holds."""

_PASSES = 5


def read_bandwidth(threads: int, size: int = ARRAY_BYTES) -> float:
    """Bytes per second that `threads` threads read together, the best of five passes.

    Each thread takes the maximum of its own slice of one array of 64-bit integers, which numpy
    does with vector instructions and without Python's lock.
    """
    import numpy as np

    array = np.ones(size // 8, dtype=np.int64)
    slices = np.array_split(array, threads)
    best = min(_pass(slices) for _ in range(_PASSES))
    return array.nbytes / best


def _pass(slices: list[np.ndarray]) -> float:
    workers = [threading.Thread(target=part.max) for part in slices]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - started
