"""Who computes on how many cores while native code in a child process works beside PyTorch.

Both let their threads spin for a while where they wait, so more threads than cores cost more than
they bring.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX, _SUFFIX = "scipy_openblas_", "_num_threads64_"
"""What numpy's wheels call the functions of their own OpenBLAS."""


class Cores:
    """The cores of this machine, shared between PyTorch here and one child at a time.

    Args:
        threads: most that the child's kernels may have.

    Attributes:
        kernels: threads of the child's kernels, at most half of the cores.
    """

    def __init__(self, threads: int) -> None:
        self.kernels = max(1, min(threads, usable_cores() // 2))
        self._own = 0

    def settle(self, beside: bool) -> None:
        """Give PyTorch the threads it came with, less the child's while that works `beside` it."""
        import torch

        self._own = self._own or torch.get_num_threads()
        torch.set_num_threads(max(1, self._own - self.kernels) if beside else self._own)


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within the block numpy multiplies in the thread that asks.

    OpenBLAS lets its threads wait for each other in a busy loop, which beside other work takes ten
    times as long as the product. Another BLAS than that of numpy's wheels is left as it is.
    """
    import numpy as np

    folder = Path(np.__file__).parent.parent / "numpy.libs"
    library = next((ctypes.CDLL(str(file)) for file in folder.glob("libscipy_openblas*")), None)
    if library is None or not hasattr(library, f"{_PREFIX}set{_SUFFIX}"):
        yield
        return
    change = getattr(library, f"{_PREFIX}set{_SUFFIX}")
    before = getattr(library, f"{_PREFIX}get{_SUFFIX}")()
    change(1)
    try:
        yield
    finally:
        change(before)
