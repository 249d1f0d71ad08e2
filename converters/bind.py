"""Put the weights behind a header, streaming them into the file.

The file is a flatbuffer header followed by the constants, each at a 64-byte aligned offset that its
Buffer names, so that files may pass 2 GB and no weight is ever held whole. Weights are independent
of each other, so two threads work on them; what numpy computes and what is read and written runs
without Python's lock.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from converters.header import Header, Place, obtain_header
from converters.quantize import QuantizedRows, quantize_rows
from converters.rounding import ErrorFeedback
from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import UsageError
from hermes.layouts.finite import check_finite
from hermes.recipe import QuantizationRule, Recipe
from hermes.rewrite.inputs import Inputs
from hermes.signatures import GraphWeight, graph_weights

ALIGNMENT = 64
CHUNK_BYTES = 1 << 19
"""Float32 bytes of one weight that a thread works on at a time: what a core's own cache holds."""
ROUNDED_ROWS = 512
"""Rows that are rounded with feedback at a time: a step costs calls, however few rows there are,
and more rows leave the cache."""
WORKERS = 2


@dataclass(frozen=True)
class BoundWeight:
    """What one weight became: element type, granularity and bytes in the file."""

    name: str
    stored: str
    granularity: str
    size: int


@dataclass(frozen=True)
class _Slot:
    """A weight on its way into the file: where its bytes and its scales go."""

    weight: GraphWeight
    rule: QuantizationRule
    place: Place
    offset: int

    @property
    def values(self) -> int:
        """Bytes of its values."""
        return self.rule.value_bytes(math.prod(self.weight.shape))

    @property
    def blocks(self) -> int:
        """Offset of the float16 scales of its blocks."""
        return _aligned(self.offset + self.values)

    @property
    def blocks_size(self) -> int:
        """Bytes of these scales."""
        if not self.rule.block:
            return 0
        rows, columns = self.weight.shape
        return self.rule.scale_bytes(rows, columns)

    @property
    def end(self) -> int:
        """First byte after all of it."""
        return self.blocks + self.blocks_size if self.rule.block else self.offset + self.values

    @property
    def size(self) -> int:
        """Bytes of values and scales outside the header."""
        return self.values + self.blocks_size


def bind_weights(
    skeleton: Path,
    config: HermesConfig,
    recipe: Recipe,
    weights: Mapping[str, LazyTensor],
    target: Path,
    on_weight: Callable[[str, int], None] = lambda name, size: None,
    *,
    inputs: Mapping[str, Inputs] | None = None,
    headers: Path | None = None,
) -> tuple[BoundWeight, ...]:
    """Write the model with its weights to `target`.

    Args:
        skeleton: file from `trace_skeleton` for this config and recipe.
        config: the model.
        recipe: storage rule of every matrix.
        weights: Hermes parameter name -> tensor.
        target: .tflite to write.
        on_weight: called with a weight's name and stored bytes when it is in the file.
        inputs: calibration inputs of the matrices, for rules that round by them. A table that is
            only looked up has none and is rounded to nearest.
        headers: folder of headers kept from earlier exports.
    """
    graph = graph_weights(config, recipe.graph)
    recipe.check_rules(part for w in graph if w.kind == "matrix" for part in w.parts)
    rules = {w.name: _rule_of(w, recipe) for w in graph if w.kind != "bias"}
    header = obtain_header(skeleton, graph, rules, headers)
    _fill_biases(header, graph, weights)
    slots = _lay_out(header, graph, rules)
    with target.open("wb") as file:
        stream = _Stream(weights, inputs or {}, header.data, file.fileno())
        _write_all(slots, stream, on_weight)
        file.truncate(_aligned(slots[-1].end))
        file.write(header.data)
    return tuple(
        BoundWeight(slot.weight.name, slot.rule.weights, slot.rule.granularity, slot.size)
        for slot in slots
    )


def _lay_out(
    header: Header, graph: tuple[GraphWeight, ...], rules: Mapping[str, QuantizationRule]
) -> list[_Slot]:
    """Give every weight its offset, in the file's order, and write it into the header."""
    slots, offset = [], _aligned(len(header.data))
    for weight in graph:
        if weight.kind != "bias":
            place, rule = header.places[weight.name], rules[weight.name]
            slot = _Slot(weight, rule, place, offset)
            struct.pack_into("<Q", header.data, place.offset, offset)
            struct.pack_into("<Q", header.data, place.size, slot.values)
            if rule.block:
                struct.pack_into("<Q", header.data, place.blocks_offset, slot.blocks)
                struct.pack_into("<Q", header.data, place.blocks_size, slot.blocks_size)
            slots.append(slot)
            offset = _aligned(slot.end)
    return slots


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _rule_of(weight: GraphWeight, recipe: Recipe) -> QuantizationRule:
    if weight.kind != "matrix":
        return QuantizationRule("*", "float32")
    rules = {part: recipe.rule_for(part) for part in weight.parts}
    if len({replace(rule, tensors="") for rule in rules.values()}) > 1:
        raise UsageError(
            f"recipe {recipe.name}: the fused matmul {weight.name} gets different rules",
            problems=[
                f"{part}: {rule.weights} by {rule.granularity}, {rule.rounding}"
                for part, rule in rules.items()
            ],
            expected="one rule for projections that share a matmul",
            todo="give them the same rule, or set fuse_qkv / fuse_gate_up to false in [graph]",
        )
    return next(iter(rules.values()))


def _fill_biases(
    header: Header, graph: tuple[GraphWeight, ...], weights: Mapping[str, LazyTensor]
) -> None:
    """Put the biases where the header carries their patterns."""
    for weight in graph:
        if weight.kind == "bias":
            parts = [_finite(weights[part], 0, None) for part in weight.parts]
            data = np.concatenate(parts).tobytes()
            for position in header.biases[weight.name]:
                header.data[position : position + len(data)] = data


def _write_all(slots: list[_Slot], stream: _Stream, on_weight: Callable[[str, int], None]) -> None:
    """Stream every weight; the first error stops the rest."""
    with _pool() as pool:
        running = [pool.submit(stream.write, slot) for slot in slots]
        for slot, done in zip(slots, running, strict=True):
            done.result()
            on_weight(slot.weight.name, slot.size)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(WORKERS)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class _Stream:
    """Reads, quantizes and writes weights chunk by chunk; their scales go into the header."""

    def __init__(
        self,
        weights: Mapping[str, LazyTensor],
        inputs: Mapping[str, Inputs],
        header: bytearray,
        file: int,
    ) -> None:
        self._weights = weights
        self._inputs = inputs
        self._header = header
        self._file = file
        # Projections that read the same inputs follow each other.
        self._feedback_of = functools.lru_cache(2 * WORKERS)(lambda seen: ErrorFeedback(seen()))

    def write(self, slot: _Slot) -> None:
        """One weight."""
        offset, amplitude, feedback = slot.offset, self._amplitude(slot), self._feedback(slot)
        for first, rows in self._chunks(slot.weight, ROUNDED_ROWS if feedback else 0):
            stored = quantize_rows(rows, slot.rule, amplitude, feedback)
            _write(self._file, stored.data, offset)
            offset += len(stored.data)
            self._write_scales(slot, first, stored)

    def _write_scales(self, slot: _Slot, row: int, stored: QuantizedRows) -> None:
        if stored.scales is None:
            return
        data = stored.scales.tobytes()
        if slot.rule.block:
            _write(self._file, data, slot.blocks + row * (len(data) // len(stored.scales)))
        else:
            position = slot.place.scales + 4 * row
            self._header[position : position + len(data)] = data

    def _amplitude(self, slot: _Slot) -> float | None:
        if not slot.rule.integer or slot.rule.granularity != "tensor":
            return None
        return max(float(np.abs(rows).max()) for _, rows in self._chunks(slot.weight))

    def _feedback(self, slot: _Slot) -> ErrorFeedback | None:
        """Projections that share a matmul have the same inputs."""
        if slot.rule.rounding != "calibrated":
            return None
        seen = self._inputs.get(slot.weight.parts[0])
        return None if seen is None else self._feedback_of(seen)

    def _chunks(
        self, weight: GraphWeight, least: int = 0
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(first row, rows) of the weight's parts one after the other, float32.

        At least `least` rows come at a time, or all that are left.
        """
        first, waiting, count = 0, list[NDArray[np.float32]](), 0
        for part in weight.parts:
            tensor = self._weights[part]
            step = max(1, CHUNK_BYTES // (4 * math.prod(tensor.shape[1:])))
            for start in range(0, tensor.shape[0], step):
                waiting.append(_finite(tensor, start, min(start + step, tensor.shape[0])))
                count += len(waiting[-1])
                if count >= least:
                    yield first, waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
                    first, waiting, count = first + count, [], 0
        if waiting:
            yield first, np.concatenate(waiting)


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def _finite(tensor: LazyTensor, start: int, stop: int | None) -> NDArray[np.float32]:
    rows = tensor.floats(start, stop)
    # The mapping checks what it reads; rewrites and other callers' weights are checked here.
    check_finite(rows, f"{tensor.origin}: tensor {tensor.name}", start)
    return rows
