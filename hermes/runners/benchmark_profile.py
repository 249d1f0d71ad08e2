"""Where the time of one call of a signature goes, operator by operator, in the real kernels."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hermes.runners.child import run_in_child

_WARM_UP = 5
_RUNS = 30
_OPERATOR_KINDS = 2 | 8 | 16
"""TFLite's event types: an operator's own kernel, one inside a delegate, and one it has timed.

The others time whole calls, and some hold a marker in place of a time.
"""


@dataclass(frozen=True)
class OperatorTime:
    """One kind of operator: calls and milliseconds per call of the signature."""

    operator: str
    calls: float
    milliseconds: float


@dataclass(frozen=True)
class Profile:
    """One signature's time.

    Attributes:
        signature: its name.
        milliseconds: wall time of a call, profiler off.
        profiled_milliseconds: the same while every operator is timed.
        operators: largest first.
    """

    signature: str
    milliseconds: float
    profiled_milliseconds: float
    operators: tuple[OperatorTime, ...]


def profile_signature(
    path: Path, offset: int, size: int, signature: str, threads: int, timeout: float = 600.0
) -> Profile:
    """Time a signature of the model at that place of a file, on zeros.

    Raises:
        NativeToolError: the library died, hung or refused.
    """
    profile = run_in_child(
        "hermes.runners.benchmark_profile:run_profile",
        path,
        offset,
        size,
        signature,
        threads,
        tool="LiteRT profiler",
        timeout=timeout,
    )
    return cast("Profile", profile)


def run_profile(path: Path, offset: int, size: int, signature: str, threads: int) -> Profile:
    """The child's side."""
    from hermes.runners.litert_native import CompiledGraph

    graph = CompiledGraph(path, offset, size, signature, threads)
    for _ in range(_WARM_UP):
        graph.run()
    started = time.perf_counter()
    for _ in range(_RUNS):
        graph.run()
    seconds = time.perf_counter() - started
    graph.profile(1)
    started = time.perf_counter()
    events = graph.profile(_RUNS)
    profiled = time.perf_counter() - started
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if not event.kind & _OPERATOR_KINDS:
            continue
        spent[event.tag] += event.microseconds
        calls[event.tag] += 1
    operators = tuple(
        OperatorTime(tag, calls[tag] / _RUNS, microseconds / _RUNS / 1000)
        for tag, microseconds in spent.most_common()
    )
    return Profile(signature, 1000 * seconds / _RUNS, 1000 * profiled / _RUNS, operators)
