"""Put the weights behind a header, streaming them into the file.

The file is a flatbuffer header followed by the constants, each at a 64-byte aligned offset that its
Buffer names, so that files may pass 2 GB and no weight is ever held whole. Weights are independent
of each other, so two threads work on them; what numpy computes and what is read and written runs
without Python's lock.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from converters.header import Header, Place, obtain_header
from converters.quantize import quantize_rows
from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import UsageError
from hermes.layouts.finite import check_finite
from hermes.recipe import QuantizationRule, Recipe
from hermes.signatures import GraphWeight, graph_weights

ALIGNMENT = 64
CHUNK_BYTES = 1 << 19
"""Float32 bytes of one weight that a thread works on at a time: what a core's own cache holds."""
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
    def size(self) -> int:
        return _stored_size(self.weight, self.rule)


def bind_weights(
    skeleton: Path,
    config: HermesConfig,
    recipe: Recipe,
    weights: Mapping[str, LazyTensor],
    target: Path,
    on_weight: Callable[[str, int], None] = lambda name, size: None,
    *,
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
        headers: folder of headers kept from earlier exports.
    """
    graph = graph_weights(config, recipe.graph)
    recipe.check_rules(part for w in graph if w.kind == "matrix" for part in w.parts)
    rules = {w.name: _rule_of(w, recipe) for w in graph if w.kind != "bias"}
    header = obtain_header(skeleton, graph, rules, headers)
    _fill_biases(header, graph, weights)
    slots = _lay_out(header, graph, rules)
    with target.open("wb") as file:
        _write_all(slots, weights, header, file.fileno(), on_weight)
        file.truncate(_aligned(slots[-1].offset + slots[-1].size))
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
            size = _stored_size(weight, rule)
            struct.pack_into("<Q", header.data, place.offset, offset)
            struct.pack_into("<Q", header.data, place.size, size)
            slots.append(_Slot(weight, rule, place, offset))
            offset = _aligned(offset + size)
    return slots


def _stored_size(weight: GraphWeight, rule: QuantizationRule) -> int:
    count = math.prod(weight.shape)
    return count if rule.weights == "int8" else 4 * count


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _rule_of(weight: GraphWeight, recipe: Recipe) -> QuantizationRule:
    if weight.kind != "matrix":
        return QuantizationRule("*", "float32")
    rules = {part: recipe.rule_for(part) for part in weight.parts}
    if len({(rule.weights, rule.granularity) for rule in rules.values()}) > 1:
        raise UsageError(
            f"recipe {recipe.name}: the fused matmul {weight.name} gets different rules",
            problems=[
                f"{part}: {rule.weights} by {rule.granularity}" for part, rule in rules.items()
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


def _write_all(
    slots: list[_Slot],
    weights: Mapping[str, LazyTensor],
    header: Header,
    file: int,
    on_weight: Callable[[str, int], None],
) -> None:
    """Stream every weight; the first error stops the rest."""
    with _pool() as pool:
        running = [pool.submit(_stream, slot, weights, header.data, file) for slot in slots]
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


def _stream(slot: _Slot, weights: Mapping[str, LazyTensor], header: bytearray, file: int) -> None:
    """Read, quantize and write a weight chunk by chunk; its scales go into the header."""
    amplitude = None
    if slot.rule.weights == "int8" and slot.rule.granularity == "tensor":
        amplitude = max(float(np.abs(rows).max()) for _, rows in _chunks(slot.weight, weights))
    offset = slot.offset
    for start, rows in _chunks(slot.weight, weights):
        stored = quantize_rows(rows, slot.rule, amplitude)
        _write(file, stored.data, offset)
        offset += len(stored.data)
        if stored.scales is not None:
            position = slot.place.scales + 4 * start
            header[position : position + 4 * len(stored.scales)] = stored.scales.tobytes()


def _write(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def _chunks(
    weight: GraphWeight, weights: Mapping[str, LazyTensor]
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(first row, rows) of the weight's parts one after the other, float32."""
    columns = weight.shape[1] if len(weight.shape) > 1 else 1
    step = max(1, CHUNK_BYTES // (4 * columns))
    first = 0
    for part in weight.parts:
        rows = weights[part].shape[0]
        for start in range(0, rows, step):
            yield first + start, _finite(weights[part], start, min(start + step, rows))
        first += rows


def _finite(tensor: LazyTensor, start: int, stop: int | None) -> NDArray[np.float32]:
    rows = tensor.floats(start, stop)
    # The mapping checks what it reads; rewrites and other callers' weights are checked here.
    check_finite(rows, f"{tensor.origin}: tensor {tensor.name}", start)
    return rows
