"""Rung 5: how much of the float model is left after quantization, over real text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hermes.recipe import Limits
from hermes.report.check import Check, at_least, at_most, measured
from hermes.runners.interface import Logits, LogitsRunner, Scorer, score_by_steps
from hermes.verify.metrics import Comparison, Interval, compare


@dataclass(frozen=True)
class QuantizedResult:
    """The comparison and the checks made of it."""

    comparison: Comparison
    checks: list[Check]


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
) -> QuantizedResult:
    """Compare next-token distributions at `limits.positions` positions of a text.

    The flatbuffer is fed token by token, as in decoding; the reference in one pass.
    """
    parts = windows(ids, limits.positions, min(reference.capacity, flatbuffer.capacity))
    following: list[int | None] = [
        *chain.from_iterable([*part[1:], None] for part in parts),
    ]
    comparison = compare(
        _scored(reference, parts),
        chain.from_iterable(score_by_steps(flatbuffer, part) for part in parts),
        following,
    )
    return QuantizedResult(comparison, _checks(comparison, limits, rung, flatbuffer.name))


def _scored(reference: Scorer, parts: Sequence[Sequence[int]]) -> Iterator[Logits]:
    for part in parts:
        yield from reference.score(part)


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
