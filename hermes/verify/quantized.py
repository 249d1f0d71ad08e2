"""Rung 5: how much of the float model is left after quantization, over real text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from hermes.recipe import Limits
from hermes.report.check import Check, at_least, at_most, measured
from hermes.runners.interface import Logits, LogitsRunner, Scorer, score_by_steps
from hermes.verify.equivalence import feeds_for
from hermes.verify.feeding import Observation, observe
from hermes.verify.metrics import Comparison, Interval, compare
from hermes.verify.scores import KnownScores


@dataclass(frozen=True)
class QuantizedResult:
    """The comparison, and the checks made of it."""

    comparison: Comparison
    checks: list[Check]


def windows(ids: Sequence[int], positions: int, capacity: int) -> list[Sequence[int]]:
    """The first `positions` ids, cut where the context is full."""
    ids = ids[:positions]
    return [ids[start : start + capacity] for start in range(0, len(ids), capacity)]


@dataclass(frozen=True)
class Stepped:
    """What a file says about a text, before anything is compared with it.

    Attributes:
        scores: its logits, token by token.
        positions: as many as are compared.
        prefilled: what it says after prefills, by feed; empty where its graph is proved elsewhere.
    """

    scores: KnownScores
    positions: int
    prefilled: Mapping[str, Observation]


def step_through(
    flatbuffer: LogitsRunner,
    ids: Sequence[int],
    positions: int,
    capacity: int,
    *,
    prefills: bool,
    widths: Sequence[int] = (),
) -> Stepped:
    """Feed a file the text as `check_quantized` will ask for it.

    Args:
        flatbuffer: the file.
        ids: the text.
        positions: of it that are compared.
        capacity: of the reference.
        prefills: feed it in all other ways too, to the last slot.
        widths: numbers of cache slots at which the graph changes its path.
    """
    capacity = min(capacity, flatbuffer.capacity)
    prefilled: Mapping[str, Observation] = {}
    if prefills:
        # So that there is a row for every position that a feed shows.
        most = min(len(ids), capacity)
        positions = max(positions, most)
        prefilled = observe(flatbuffer, ids, feeds_for(flatbuffer, most, widths))
    scores = KnownScores(flatbuffer, *windows(ids, positions, capacity))
    scores.remember()
    return Stepped(scores, positions, prefilled)


def check_stepped(
    reference: Scorer, stepped: Stepped, ids: Sequence[int], limits: Limits
) -> QuantizedResult:
    """`check_quantized` of what was recorded, and where there are prefills `check_prefilled`."""
    compared = replace(limits, positions=stepped.positions)
    result = check_quantized(reference, stepped.scores, ids, compared)
    if stepped.prefilled:
        first = windows(ids, stepped.positions, min(reference.capacity, stepped.scores.capacity))[0]
        rows = dict(enumerate(stepped.scores.score(first)))
        result.checks.extend(check_prefilled(stepped.prefilled, rows, limits.kl_mean))
    return result


def check_quantized(
    reference: Scorer,
    flatbuffer: Scorer | LogitsRunner,
    ids: Sequence[int],
    limits: Limits,
    *,
    rung: int = 5,
) -> QuantizedResult:
    """Compare next-token distributions at `limits.positions` positions of a text.

    The flatbuffer is fed token by token, as in decoding; the reference in one pass.
    """
    parts = windows(ids, limits.positions, min(reference.capacity, flatbuffer.capacity))
    following: list[int | None] = [
        *chain.from_iterable([*part[1:], None] for part in parts),
    ]
    comparison = compare(
        chain.from_iterable(reference.score(part) for part in parts),
        _scored(flatbuffer, parts),
        following,
    )
    return QuantizedResult(comparison, _checks(comparison, limits, rung, flatbuffer.name))


def _scored(runner: Scorer | LogitsRunner, parts: Sequence[Sequence[int]]) -> Iterator[Logits]:
    for part in parts:
        # A runner in a process of its own computes one step ahead.
        yield from (
            runner.score(part) if isinstance(runner, Scorer) else score_by_steps(runner, part)
        )


def check_prefilled(
    observations: Mapping[str, Observation], stepped: Mapping[int, Logits], limit: float
) -> list[Check]:
    """The same file fed by prefill and token by token: its answers may differ by rounding only.

    For files whose graph nothing else proves. Int8 rounds by rows, so what is left is far below
    what quantization costs, and a cache that is wrong is far above it.
    """
    checks = []
    for name, rows in observations.items():
        known = [(at, row) for at, row in rows if at in stepped]
        found = compare(
            [stepped[at] for at, _ in known], [row for _, row in known], [None] * len(known)
        )
        detail = f"mean KL at {found.positions} positions of the same file fed token by token"
        checks.append(at_most(f"prefill = steps, {name}", 5, found.kl.mean(), limit, detail))
    return checks


def repeated(checks: Sequence[Check], stage: str) -> list[Check]:
    """Of a second interpreter's checks only those that are about it."""
    return [check for check in checks if check.name.endswith(stage)]


def _checks(result: Comparison, limits: Limits, rung: int, stage: str) -> list[Check]:
    over = f"{result.positions} positions of text"
    worst = int(np.argmax(np.nan_to_num(result.kl, nan=np.inf)))
    reference, model = result.perplexities()
    return [
        at_least("positions compared", rung, result.positions, limits.positions),
        at_most(f"mean KL, {stage}", rung, float(result.kl.mean()), limits.kl_mean, over),
        at_least(f"top-1 agreement, {stage}", rung, float(result.top1.mean()), limits.top1, over),
        measured("top-5 agreement", rung, float(result.top5.mean())),
        measured("99th percentile of KL", rung, float(np.quantile(result.kl, 0.99))),
        measured("largest KL", rung, float(result.kl.max()), f"at position {worst}"),
        measured("largest logit difference", rung, float(result.largest.max())),
        measured("mean logit difference", rung, float(result.mean.mean())),
        measured("perplexity of the reference", rung, reference.value, _bounds(reference)),
        measured(f"perplexity of the {stage}", rung, model.value, _bounds(model)),
    ]


def _bounds(interval: Interval) -> str:
    return f"95 % bootstrap interval {interval.low:.4g} to {interval.high:.4g}"
