"""Rungs 3 and 4: however tokens are fed, a stage's logits equal its neighbour's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hermes.report.check import Check, at_most, measured
from hermes.runners.interface import Logits, LogitsRunner, PositionScorer, Scorer
from hermes.verify.feeding import Feed, Observation, equivalence_feeds, observe


@dataclass(frozen=True)
class FeedDifference:
    """One feed's logits against the wanted ones.

    Attributes:
        name: of the feed.
        positions: decode steps compared.
        largest: largest absolute logit difference; NaN if any logit is NaN.
        mean: mean absolute logit difference.
        worst: position of the largest.
    """

    name: str
    positions: int
    largest: float
    mean: float
    worst: int


def feeds_for(
    runner: LogitsRunner, most: int | None = None, widths: Sequence[int] = ()
) -> list[Feed]:
    """The feeds of `equivalence_feeds` for this runner's shapes, of at most `most` tokens."""
    capacity = runner.capacity if most is None else min(most, runner.capacity)
    lengths = [length for length in runner.prefill_lengths if length <= capacity]
    return equivalence_feeds(lengths, capacity, widths)


def observe_all(
    runner: LogitsRunner, ids: Sequence[int], widths: Sequence[int] = ()
) -> dict[str, Observation]:
    """Every feed of `feeds_for` on the same text, which must fill the context."""
    if len(ids) < runner.capacity:
        raise ValueError(f"{len(ids)} ids cannot fill {runner.capacity} slots")
    return observe(runner, ids, feeds_for(runner, widths=widths))


def wanted_rows(
    reference: Scorer, ids: Sequence[int], observations: Mapping[str, Observation]
) -> dict[int, Logits]:
    """The reference's logits at every observed position, from one pass without any chunking."""
    needed = {position for rows in observations.values() for position, _ in rows}
    ids = ids[: max(needed) + 1]
    if isinstance(reference, PositionScorer):
        return reference.score_at(ids, needed)
    scored = reference.score(ids)
    return {position: row for position, row in enumerate(scored) if position in needed}


def differences(
    observations: Mapping[str, Observation], wanted: Mapping[str, Mapping[int, Logits]]
) -> list[FeedDifference]:
    """Compare feed by feed with the wanted rows, given as feed name -> position -> logits."""
    found = []
    for name, rows in observations.items():
        gaps = [np.abs(row.astype(np.float64) - wanted[name][at]) for at, row in rows]
        peaks = [float(gap.max()) for gap in gaps]  # numpy's max keeps NaN
        worst = int(np.argmax([np.inf if np.isnan(peak) else peak for peak in peaks]))
        mean = float(np.mean([gap.mean() for gap in gaps]))
        found.append(FeedDifference(name, len(rows), peaks[worst], mean, rows[worst][0]))
    return found


def check_differences(
    rung: int, stage: str, neighbour: str, found: Sequence[FeedDifference], limit: float
) -> list[Check]:
    """One check per feed, and the figures over all of them."""
    checks = [
        at_most(
            f"{stage} = {neighbour}, {item.name}",
            rung,
            item.largest,
            limit,
            f"largest logit difference of {item.positions} positions, at position {item.worst}",
        )
        for item in found
    ]
    total = sum(item.positions for item in found)
    mean = sum(item.mean * item.positions for item in found) / total
    checks.append(measured("mean logit difference", rung, mean, f"{total} positions"))
    return checks


def by_position(
    observations: Mapping[str, Observation], wanted: Mapping[int, Logits]
) -> list[float]:
    """Largest absolute difference at each position of any feed; NaN where none was observed."""
    peaks = dict.fromkeys(range(max(wanted) + 1), float("nan"))
    for rows in observations.values():
        for position, row in rows:
            gap = float(np.abs(row.astype(np.float64) - wanted[position]).max())
            peaks[position] = gap if not gap <= peaks[position] else peaks[position]
    return list(peaks.values())


def check_against_reference(
    exported: Mapping[str, Observation], rows: Mapping[int, Logits], limit: float
) -> list[Check]:
    """Rung 3: the exportable module's observations against the reference's `wanted_rows`."""
    found = differences(exported, dict.fromkeys(exported, rows))
    return check_differences(3, "exportable", "reference", found, limit)


def check_against_exportable(
    flatbuffer: Mapping[str, Observation],
    exported: Mapping[str, Observation],
    limit: float,
    stage: str = "float flatbuffer",
) -> list[Check]:
    """Rung 4: the float flatbuffer's observations against the exportable module's."""
    found = differences(flatbuffer, {name: dict(rows) for name, rows in exported.items()})
    return check_differences(4, stage, "exportable", found, limit)
