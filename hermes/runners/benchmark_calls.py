"""Time single calls of a signature, of several models in turns within one process.

Runs of whole processes differ by a tenth and more: by where their memory happens to lie, and by
what else the machine did in those seconds. Here every model is loaded a few times, so that its
places differ, and each round calls all of them once in random order, so that a busy moment meets
all alike. That tells graphs apart that differ by one per cent.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from hermes.errors import UsageError
from hermes.runners.child import run_in_child
from hermes.runners.roles import POSITION_NAMES

if TYPE_CHECKING:
    from hermes.runners.litert_native import CompiledGraph

_WARM_UP = 2
_SEED = 0


class ModelPlace(NamedTuple):
    """A .tflite model that lies inside a file."""

    path: Path
    offset: int
    size: int


@dataclass(frozen=True)
class CallPlan:
    """What is called, and how often.

    Attributes:
        signature: its name in every model.
        positions: of the first row; each is measured by itself.
        threads: of the kernels.
        rounds: calls of every copy at each position.
        copies: times that every model is loaded.
    """

    signature: str
    positions: tuple[int, ...] = (0,)
    threads: int = 2
    rounds: int = 40
    copies: int = 3

    def __post_init__(self) -> None:
        if min(self.threads, self.rounds, self.copies) < 1 or min(self.positions, default=-1) < 0:
            raise UsageError(
                f"calls cannot be timed as asked: {self}",
                expected="positions from 0; threads, rounds and copies from 1",
            )


@dataclass(frozen=True)
class CallTimes:
    """One model at one position.

    Attributes:
        position: of the first row.
        wall_ms: median wall time of a call, for each copy.
        cpu_ms: median processor time of all threads, for each copy.
        ratio: median over the rounds of this model's time (mean of its copies) divided by the
            first model's.
    """

    position: int
    wall_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]
    ratio: float


def time_calls(
    models: Sequence[ModelPlace], plan: CallPlan, timeout: float = 1800.0
) -> list[list[CallTimes]]:
    """For every position of the plan, the times of every model.

    The buffers hold zeros but for the positions; the cost of a call does not depend on values.

    Raises:
        NativeToolError: the library died, hung or refused, or a model has no such signature.
    """
    times = run_in_child(
        "hermes.runners.benchmark_calls:run_calls",
        list(models),
        plan,
        tool="LiteRT runtime",
        timeout=timeout,
    )
    return cast("list[list[CallTimes]]", times)


def run_calls(models: Sequence[ModelPlace], plan: CallPlan) -> list[list[CallTimes]]:
    """The child's side."""
    from hermes.runners.litert_native import CompiledGraph

    # The copies of a model are not neighbours, and the first is not always the same one's.
    copies = [
        (index, CompiledGraph(*models[index], plan.signature, plan.threads))
        for copy in range(plan.copies)
        for index in sorted(range(len(models)), reverse=bool(copy % 2))
    ]
    return [_at(position, copies, len(models), plan) for position in plan.positions]


class _Copy(NamedTuple):
    model: int
    graph: CompiledGraph
    wall: list[float]
    cpu: list[float]


def _at(
    position: int, loaded: Sequence[tuple[int, CompiledGraph]], models: int, plan: CallPlan
) -> list[CallTimes]:
    copies = [_Copy(index, graph, [], []) for index, graph in loaded]
    for copy in copies:
        copy.graph.set_positions(position, POSITION_NAMES)
        for _ in range(_WARM_UP):
            copy.graph.run()
    order = random.Random(_SEED)
    for _ in range(plan.rounds):
        for copy in order.sample(copies, len(copies)):
            cpu, wall = time.process_time(), time.perf_counter()
            copy.graph.run()
            copy.wall.append(1000 * (time.perf_counter() - wall))
            copy.cpu.append(1000 * (time.process_time() - cpu))
    of = [[copy for copy in copies if copy.model == model] for model in range(models)]
    rounds = [
        [statistics.mean(turn) for turn in zip(*(copy.wall for copy in own), strict=True)]
        for own in of
    ]
    return [
        CallTimes(
            position,
            tuple(statistics.median(copy.wall) for copy in own),
            tuple(statistics.median(copy.cpu) for copy in own),
            statistics.median(a / b for a, b in zip(mine, rounds[0], strict=True)),
        )
        for own, mine in zip(of, rounds, strict=True)
    ]
