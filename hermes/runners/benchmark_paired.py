"""Bundles measured against each other: interleaved runs, so that a busy minute hits all of them."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hermes.errors import BadInputError
from hermes.runners.benchmark import Speed, benchmark

METRICS = (
    "prefill",
    "decode",
    "first_token_seconds",
    "load_seconds",
    "peak_memory",
    "first_load_seconds",
    "first_peak_memory",
)
"""Of `BundleRuns`; those that begin with `first_load` and `first_peak` are of first starts."""

_FIRST_START_TOKENS = 2


@dataclass(frozen=True)
class BenchmarkPlan:
    """What is run, how often.

    Attributes:
        prompt: tokens fed.
        generate: tokens decoded after them.
        threads: of the CPU kernels.
        repeat: runs of each bundle.
        timeout: seconds for one run.
    """

    prompt: int = 256
    generate: int = 128
    threads: int = 2
    repeat: int = 5
    timeout: float = 600.0


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class BundleRuns:
    """All runs of one bundle, in time order.

    Attributes:
        path: the bundle.
        first: first starts, which pack the weights and write the runtime's cache of them; a few
            tokens only, so that just their load and memory count.
        later: starts that find this cache.
    """

    path: Path
    first: tuple[Speed, ...]
    later: tuple[Speed, ...]

    def spread(self, metric: str) -> Spread:
        """Of one of `METRICS`."""
        return Spread.of(self.values(metric))

    def values(self, metric: str) -> list[float]:
        """The metric of every run."""
        of_first = metric in ("first_load_seconds", "first_peak_memory")
        runs, name = (self.first, metric[6:]) if of_first else (self.later, metric)
        return [float(getattr(run, name)) for run in runs]


def measure_paired(
    paths: Sequence[Path],
    plan: BenchmarkPlan,
    on_run: Callable[[Path, Speed], None] = lambda path, speed: None,
) -> tuple[BundleRuns, ...]:
    """Start every bundle twice per turn, without and with a weight cache.

    Every other turn runs backwards. The cache is in a temporary folder: nothing is written beside
    a bundle.

    Raises:
        BadInputError: no such file.
        NativeToolError: the runtime died, hung or refused a bundle.
    """
    for path in paths:
        if not path.is_file():
            raise BadInputError(f"{path}: no such file", expected="a .litertlm file")
    first: list[list[Speed]] = [[] for _ in paths]
    later: list[list[Speed]] = [[] for _ in paths]
    for turn in range(plan.repeat):
        order = range(len(paths)) if turn % 2 == 0 else reversed(range(len(paths)))
        for index in order:
            # The cache's key has no content hash: two bundles may not share a folder.
            with tempfile.TemporaryDirectory(prefix="hermes-bench-") as folder:
                few = _FIRST_START_TOKENS
                first[index].append(_run(paths[index], plan, folder, prompt=few, generate=few))
                later[index].append(
                    _run(paths[index], plan, folder, prompt=plan.prompt, generate=plan.generate)
                )
            on_run(paths[index], later[index][-1])
    return tuple(
        BundleRuns(path, tuple(one), tuple(two))
        for path, one, two in zip(paths, first, later, strict=True)
    )


def paired_ratio(one: BundleRuns, other: BundleRuns, metric: str) -> Spread:
    """`one` divided by `other`, run by run of the same turn."""
    pairs = zip(one.values(metric), other.values(metric), strict=True)
    return Spread.of([left / right for left, right in pairs])


def _run(path: Path, plan: BenchmarkPlan, folder: str, *, prompt: int, generate: int) -> Speed:
    return benchmark(
        path,
        prefill_tokens=prompt,
        decode_tokens=generate,
        threads=plan.threads,
        cache_folder=folder,
        timeout=plan.timeout,
    )
