"""Put the weights behind a header, streaming them into the file.

The file is a flatbuffer header followed by the constants, each at a 64-byte aligned offset that its
Buffer names, so that files may pass 2 GB and no weight is ever held whole. Weights are independent
of each other, so two threads work on them and write each to its place.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from converters.header import Header, Place, obtain_header
from converters.quantize import QuantizedRows, quantize_rows
from converters.rounding import ErrorFeedback, Floats
from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import UsageError
from hermes.layouts.finite import check_finite
from hermes.plan import THREADS
from hermes.recipe import QuantizationRule, Recipe
from hermes.rewrite.inputs import Inputs
from hermes.signatures import GraphWeight, graph_weights

ALIGNMENT = 64
CHUNK_BYTES = 1 << 21
"""Float32 bytes of one weight that a thread works on at a time: each step costs calls, however few
the rows, and more leaves the cache."""


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
    offset: int = 0,
) -> tuple[BoundWeight, ...]:
    """Write the model with its weights to `target`, or behind what the file holds already.

    Args:
        skeleton: file from `trace_skeleton` for this config and recipe.
        config: the model.
        recipe: storage rule of every matrix.
        weights: Hermes parameter name -> tensor.
        target: file to write.
        on_weight: called with a weight's name and stored bytes when it is in the file.
        inputs: calibration inputs of the matrices, for rules that round by them. A table that is
            only looked up has none and is rounded to nearest.
        headers: folder of headers kept from earlier exports.
        offset: where in an existing file the model begins, a multiple of the alignment.
    """
    graph = graph_weights(config, recipe.graph)
    recipe.check_rules(part for w in graph if w.kind == "matrix" for part in w.parts)
    rules = {w.name: _rule_of(w, recipe) for w in graph if w.kind != "bias"}
    header = obtain_header(skeleton, graph, rules, headers)
    _fill_biases(header, graph, weights)
    slots = _lay_out(header, graph, rules)
    for seen in itertools.islice((inputs or {}).values(), 1):
        seen()  # One walk through the model makes the inputs of all matrices.
    with target.open("r+b" if offset else "wb") as file:
        stream = _Stream(
            weights, inputs or {}, recipe.calibration.directions, file.fileno(), offset
        )
        for slot, scales in _written(slots, stream):
            position = slot.place.scales
            header.data[position : position + len(scales)] = scales
            on_weight(slot.weight.name, slot.size)
        file.truncate(offset + _aligned(slots[-1].end))
        file.seek(offset)
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
            parts = [_Chunk(0, weights[part].floats(), weights[part], 0) for part in weight.parts]
            for part in parts:
                part.demand_finite()
            data = np.concatenate([part.rows for part in parts]).tobytes()
            for position in header.biases[weight.name]:
                header.data[position : position + len(data)] = data


def _written(slots: list[_Slot], stream: _Stream) -> Iterator[tuple[_Slot, bytes]]:
    """Stream every weight: each with its scales for the header, in the order they are done."""
    pool = ThreadPoolExecutor(THREADS)
    try:
        running = {pool.submit(stream.write, group): group for group in stream.groups(slots)}
        for done in as_completed(running):
            yield from zip(running[done], done.result(), strict=True)
    finally:
        # After an error or an interrupt nothing more is begun, and no chunk after this one.
        stream.ended = True
        pool.shutdown(cancel_futures=True)


class _Stream:
    """Reads, quantizes and writes weights chunk by chunk."""

    def __init__(
        self,
        weights: Mapping[str, LazyTensor],
        inputs: Mapping[str, Inputs],
        directions: int,
        file: int,
        start: int,
    ) -> None:
        self.ended = False
        self._file = file
        self._start = start
        self._directions = directions
        self._weights = weights
        self._inputs = inputs

    def groups(self, slots: Sequence[_Slot]) -> list[list[_Slot]]:
        """Weights that are rounded by the same inputs together; the largest group first."""
        groups: dict[object, list[_Slot]] = {}
        for slot in slots:
            groups.setdefault(self._seen(slot) or slot.weight.name, []).append(slot)
        return sorted(groups.values(), key=lambda group: -sum(slot.size for slot in group))

    def write(self, group: Sequence[_Slot]) -> list[bytes]:
        """A group of weights; gives the scales of each that the header holds."""
        seen = self._seen(group[0])
        feedback = None
        if seen is not None:
            feedback = ErrorFeedback(seen(), self._directions)
        return [self._write(slot, feedback) for slot in group]

    def _write(self, slot: _Slot, feedback: ErrorFeedback | None) -> bytes:
        offset, scales = slot.offset, bytearray()
        for first, stored in self._quantized(slot, feedback):
            self._put(stored.data, offset)
            offset += len(stored.data)
            if stored.scales is None:
                continue
            data = stored.scales.tobytes()
            if slot.rule.block:
                row = len(data) // len(stored.scales)
                self._put(data, slot.blocks + first * row)
            else:
                scales += data
        return bytes(scales)

    def _quantized(
        self, slot: _Slot, feedback: ErrorFeedback | None
    ) -> Iterator[tuple[int, QuantizedRows]]:
        """(first row, stored rows), in order."""
        amplitude = self._amplitude(slot)
        for chunk in self._chunks(slot.weight):
            with np.errstate(invalid="ignore"):
                stored = quantize_rows(chunk.rows, slot.rule, amplitude, feedback)
            # A row with NaN or infinity has such a scale.
            if stored.scales is None or not np.isfinite(stored.scales).all():
                chunk.demand_finite()
            if self.ended:
                return
            yield chunk.first, stored

    def _put(self, data: bytes, offset: int) -> None:
        view, place = memoryview(data), self._start + offset
        while view:
            count = os.pwrite(self._file, view, place)
            view, place = view[count:], place + count

    def _seen(self, slot: _Slot) -> Inputs | None:
        """Projections that share a matmul have the same inputs."""
        if slot.rule.rounding != "calibrated":
            return None
        return self._inputs.get(slot.weight.parts[0])

    def _amplitude(self, slot: _Slot) -> float | None:
        if not slot.rule.integer or slot.rule.granularity != "tensor":
            return None
        largest = 0.0
        for chunk in self._chunks(slot.weight):
            chunk.demand_finite()
            largest = max(largest, float(np.abs(chunk.rows).max()))
        return largest

    def _chunks(self, weight: GraphWeight) -> Iterator[_Chunk]:
        """The rows of the weight's parts one after the other, as they fit a cache."""
        first = 0
        for part in weight.parts:
            tensor = self._weights[part]
            step = max(1, CHUNK_BYTES // (4 * math.prod(tensor.shape[1:])))
            for start in range(0, tensor.rows, step):
                rows = tensor.floats(start, min(start + step, tensor.rows))
                yield _Chunk(first, rows, tensor, start)
                first += len(rows)


@dataclass(frozen=True)
class _Chunk:
    """Rows of a weight: the first one's number, and where in which tensor they were."""

    first: int
    rows: Floats
    tensor: LazyTensor
    start: int

    def demand_finite(self) -> None:
        """Refuse NaN and infinity; the mapping looks at what it reads, rewrites do not."""
        origin = f"{self.tensor.origin}: tensor {self.tensor.name}"
        check_finite(self.rows, origin, self.start)
