"""Large arrays that are made and dropped all the time, without asking the system for each."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1
_TRIM_DEFAULT, _MMAP_DEFAULT = 128 * 2**10, 65536


@contextmanager
def reused_memory() -> Iterator[None]:
    """Within the block, freed memory stays with the process for the next array.

    glibc hands every array above some megabytes back to the system at once, and each page of the
    next one is then cleared anew: in attention over a long cache that costs as much as the
    arithmetic. Other C libraries are left as they are.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        library.mallopt(_MMAP_MAX, _MMAP_DEFAULT)
        library.mallopt(_TRIM_THRESHOLD, _TRIM_DEFAULT)
        library.malloc_trim(0)
