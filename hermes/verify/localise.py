"""Where two float stages part: their caches compared layer by layer.

Keys and values of a layer depend on everything before it, so the first layer whose tensors differ
names the place of a fault that the logits only show the sum of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hermes.report.check import Check, at_most
from hermes.runners.interface import LogitsRunner
from hermes.verify.feeding import Prefill, greedy_feed

CacheRows = dict[str, NDArray[np.float32]]
"""`k_<layer>` and `v_<layer>` -> [kv_heads, rows, head_dim], in layer order, keys first."""

SHORT = 33
"""One prefill call of 32 rows, and a step."""
_WORDS = {"k": "keys", "v": "values"}


@runtime_checkable
class CacheReader(Protocol):
    """A runner that shows what it has cached."""

    def cache_rows(self, count: int) -> CacheRows:
        """The first `count` rows of every cache tensor."""
        ...


@dataclass(frozen=True)
class LayerDifference:
    """One cache tensor of two stages.

    Attributes:
        name: `k_<layer>` or `v_<layer>`.
        largest: absolute difference, divided by the tensor's largest value if that is above 1.
        position: row of it.
    """

    name: str
    largest: float
    position: int

    @property
    def words(self) -> str:
        """The tensor as a reader would call it."""
        kind, layer = self.name.split("_")
        return f"layer {layer} {_WORDS[kind]}, position {self.position}"


def snapshot(runner: LogitsRunner, ids: Sequence[int], count: int) -> CacheRows | None:
    """Cache after the first `count` ids, fed as the runtime would; None if it cannot be seen."""
    if not isinstance(runner, CacheReader):
        return None
    runner.reset()
    position = 0
    for part in greedy_feed("", count, runner.prefill_lengths, runner.capacity).parts:
        if isinstance(part, Prefill):
            runner.prefill(ids[position : position + part.count], position, part.length)
            position += part.count
            continue
        for _ in range(part.count):
            runner.step(ids[position], position)
            position += 1
    return runner.cache_rows(count)


def layer_differences(
    found: Mapping[str, NDArray[np.float32]], wanted: Mapping[str, NDArray[np.float32]]
) -> list[LayerDifference]:
    """Compare tensor by tensor; NaN counts as infinitely far."""
    differences = []
    for name, expected in wanted.items():
        gap = np.abs(found[name].astype(np.float64) - expected)
        gap /= max(1.0, float(np.abs(expected).max()))
        rows = np.nan_to_num(gap, nan=np.inf).max(axis=(0, 2))
        differences.append(LayerDifference(name, float(rows.max()), int(rows.argmax())))
    return differences


def check_layers(
    rung: int, stage: str, neighbour: str, differences: Sequence[LayerDifference], limit: float
) -> Check:
    """The largest difference of all, and which tensor is the first above the limit."""
    worst = max(differences, key=lambda item: item.largest)
    first = next((item for item in differences if not item.largest <= limit), None)
    where = f"largest at {worst.words}" if first is None else f"first above it: {first.words}"
    name = f"cache of the {stage} = {neighbour}'s, all layers"
    detail = f"difference relative to values above 1; {where}"
    return at_most(name, rung, worst.largest, limit, detail)


def by_layer(differences: Sequence[LayerDifference]) -> list[float]:
    """One number per layer, the larger of keys and values, for the plot."""
    largest: dict[str, float] = {}
    for item in differences:
        layer = item.name.split("_")[1]
        largest[layer] = max(item.largest, largest.get(layer, 0.0))
    return list(largest.values())


def keys_only(rows: CacheRows) -> CacheRows:
    """Without the values, where a rewrite gives these another scale."""
    return {name: row for name, row in rows.items() if name.startswith("k_")}
