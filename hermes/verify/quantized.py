"""Rung 5: how much of the float model is left after quantization, over real text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from hermes.recipe import Limits
from hermes.report.check import Check, at_least, at_most, measured
from hermes.runners.interface import Logits, LogitsRunner, Scorer, score_by_steps
from hermes.verify.feeding import Observation
from hermes.verify.metrics import Comparison, Interval, compare


@dataclass(frozen=True)
class QuantizedResult:
    """The comparison, the checks made of it, and the model's logits where they were wanted."""

    comparison: Comparison
    checks: list[Check]
    rows: dict[int, Logits] = field(default_factory=dict)


def windows(ids: Sequence[int], positions: int, capacity: int) -> list[Sequence[int]]:
    """The first `positions` ids, cut where the context is full."""
    ids = ids[:positions]
    return [ids[start : start + capacity] for start in range(0, len(ids), capacity)]


def check_quantized(
    reference: Scorer,
    flatbuffer: LogitsRunner,
    ids: Sequence[int],
    limits: Limits,
    *,
    rung: int = 5,
    keep: Collection[int] = (),
) -> QuantizedResult:
    """Compare next-token distributions at `limits.positions` positions of a text.

    The flatbuffer is fed token by token, as in decoding; the reference in one pass. The
    flatbuffer's logits at the positions `keep` of the first window are returned.
    """
    parts = windows(ids, limits.positions, min(reference.capacity, flatbuffer.capacity))
    following: list[int | None] = [
        *chain.from_iterable([*part[1:], None] for part in parts),
    ]
    rows: dict[int, Logits] = {}
    comparison = compare(
        chain.from_iterable(reference.score(part) for part in parts),
        _kept(_stepped(flatbuffer, parts), set(keep) & set(range(len(parts[0]))), rows),
        following,
    )
    return QuantizedResult(comparison, _checks(comparison, limits, rung, flatbuffer.name), rows)


def _stepped(runner: LogitsRunner, parts: Sequence[Sequence[int]]) -> Iterator[Logits]:
    for part in parts:
        # A runner in a process of its own computes one step ahead.
        yield from (
            runner.score(part) if isinstance(runner, Scorer) else score_by_steps(runner, part)
        )


def _kept(
    rows: Iterator[Logits], wanted: Collection[int], kept: dict[int, Logits]
) -> Iterator[Logits]:
    for position, row in enumerate(rows):
        if position in wanted:
            kept[position] = row
        yield row


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
