"""What a worker process can suffer, one function each."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np

from hermes.errors import UnsupportedModelError


def add(first: int, second: int) -> int:
    return first + second


def double(values: np.ndarray) -> np.ndarray:
    return values * 2


def abort() -> None:
    os.write(2, b"check failed: weights.size() == 3\n")
    os.abort()


def segfault() -> None:
    ctypes.string_at(0)


def leave(status: int) -> None:
    os.write(1, b"LLVM ERROR: no space left\n")
    os._exit(status)


def hang() -> None:
    print("waiting for a lock")
    time.sleep(3600)


def hang_in_native_code(started: str) -> None:
    """Hold the interpreter lock for ever, as a native call without release does."""
    Path(started).write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(3600)


def allocate(mebibytes: int) -> int:
    blocks = []
    for _ in range(mebibytes // 16):
        blocks.append(np.ones(2**21))
        time.sleep(0.01)
    return len(blocks)


def chatter(lines: int) -> int:
    for number in range(lines):
        print(f"line {number} {'x' * 90}")
    return lines


def refuse() -> None:
    raise UnsupportedModelError("sliding window", expected="none", todo="give up", problems=["a"])


def raise_runtime_error() -> None:
    print("a warning", file=sys.stderr)
    raise RuntimeError("engine creation failed")


class Counter:
    """An object that lives in the child."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ValueError("start below 0")
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def pid(self) -> int:
        return os.getpid()

    def abort(self) -> None:
        os.abort()

    def hang(self) -> None:
        hang()
