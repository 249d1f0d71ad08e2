"""Turn a skeleton's weight inputs into constants, streaming the weights into the file.

The file is a flatbuffer header followed by the constants, each at a 64-byte aligned offset that its
Buffer names, so that files may pass 2 GB and no weight is ever held whole. The header is packed
twice: once with placeholders to learn its length, and again when the scales are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from converters.flatbuffer import (
    SharedQuantization,
    operator_name,
    pack_model,
    read_model,
    signature_inputs,
)
from converters.quantize import quantize_rows
from converters.skeleton import WEIGHT_INPUT_PREFIX, bias_pattern
from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import NativeToolError, UsageError
from hermes.layouts.finite import check_finite
from hermes.recipe import QuantizationRule, Recipe
from hermes.signatures import GraphWeight, graph_weights

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64
CHUNK_BYTES = 4 << 20
"""Float32 bytes of one weight that are in memory at a time."""

_READERS = {
    "matrix": {("FULLY_CONNECTED", 1), ("EMBEDDING_LOOKUP", 1)},
    "gain": {("MUL", 0), ("MUL", 1)},
}


@dataclass(frozen=True)
class BoundWeight:
    """What one weight became: element type, granularity and bytes in the file."""

    name: str
    stored: str
    granularity: str
    size: int


@dataclass
class _Slot:
    """A weight on its way into the file."""

    weight: GraphWeight
    rule: QuantizationRule
    buffer: Any
    quantization: SharedQuantization | None

    @property
    def size(self) -> int:
        count = int(np.prod(self.weight.shape))
        return count if self.rule.weights == "int8" else 4 * count


def bind_weights(
    skeleton: Path,
    config: HermesConfig,
    recipe: Recipe,
    weights: Mapping[str, LazyTensor],
    target: Path,
    on_weight: Callable[[str, int], None] = lambda name, size: None,
) -> tuple[BoundWeight, ...]:
    """Write the model with its weights to `target`.

    Args:
        skeleton: file from `trace_skeleton` for this config and recipe.
        config: the model.
        recipe: storage rule of every matrix.
        weights: Hermes parameter name -> tensor.
        target: .tflite to write.
        on_weight: called with a weight's name and stored bytes when it is in the file.
    """
    recipe.check_rules(
        part for w in graph_weights(config, recipe.graph) if w.kind == "matrix" for part in w.parts
    )
    model = read_model(skeleton)
    slots = [
        _open_slot(model, weight, _rule_of(weight, recipe))
        for weight in graph_weights(config, recipe.graph)
        if weight.kind != "bias"
    ]
    _replace_biases(model, config, recipe, weights)
    _drop_weight_inputs(model, {slot.weight.name: slot for slot in slots})
    reserved = _aligned(len(pack_model(model)))
    with _one_thread(), target.open("wb") as file:
        offset = reserved
        for slot in slots:
            file.seek(offset)
            _stream(slot, weights, file)
            slot.buffer.offset, slot.buffer.size = offset, slot.size
            offset = _aligned(offset + slot.size)
            on_weight(slot.weight.name, slot.size)
        file.truncate(offset)
        header = pack_model(model)
        if len(header) > reserved:
            raise NativeToolError(
                f"the header grew from {reserved} to {len(header)} bytes while weights were bound"
            )
        file.seek(0)
        file.write(header)
    return tuple(
        BoundWeight(slot.weight.name, slot.rule.weights, slot.rule.granularity, slot.size)
        for slot in slots
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Element-wise work gains nothing from threads and loses much on busy cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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


def _open_slot(model: Any, weight: GraphWeight, rule: QuantizationRule) -> _Slot:
    """A new buffer for the weight; offset and size are placeholders of the final fields' width."""
    buffer = schema.BufferT()
    buffer.offset, buffer.size = 1, 1
    model.buffers.append(buffer)
    quantization = None
    if rule.weights == "int8":
        quantization = SharedQuantization()
        rows = weight.shape[0]
        quantization.scale = np.zeros(rows, dtype=np.float32)
        quantization.zeroPoint = np.zeros(rows, dtype=np.int64)
        quantization.quantizedDimension = 0
    return _Slot(weight, rule, buffer, quantization)


def _drop_weight_inputs(model: Any, slots: Mapping[str, _Slot]) -> None:
    """Make every weight input of every signature a constant that reads its slot's buffer."""
    buffer_index = {id(buffer): index for index, buffer in enumerate(model.buffers)}
    for signature in model.signatureDefs:
        subgraph = model.subgraphs[signature.subgraphIndex]
        found = {
            name.removeprefix(WEIGHT_INPUT_PREFIX): index
            for name, index in signature_inputs(signature).items()
            if name.startswith(WEIGHT_INPUT_PREFIX)
        }
        if set(found) != set(slots):
            raise NativeToolError(
                f"signature {signature.signatureKey.decode()} of the traced graph has other weight "
                f"inputs than the model: {sorted(set(found) ^ set(slots))}"
            )
        readers = _readers(model, subgraph)
        for name, index in found.items():
            slot, tensor = slots[name], subgraph.tensors[index]
            shape = tuple(int(length) for length in tensor.shape)
            unknown = readers.get(index, set()) - _READERS[slot.weight.kind]
            if unknown or shape != slot.weight.shape:
                raise NativeToolError(
                    f"weight {name} of shape {list(shape)} is read by {sorted(unknown)}",
                    expected=f"{list(slot.weight.shape)}, {sorted(_READERS[slot.weight.kind])}",
                )
            tensor.buffer = buffer_index[id(slot.buffer)]
            if slot.quantization is not None:
                tensor.type = schema.TensorType.INT8
                tensor.quantization = slot.quantization
        dropped = set(found.values())
        subgraph.inputs = [index for index in subgraph.inputs if index not in dropped]
        signature.inputs = [e for e in signature.inputs if e.tensorIndex not in dropped]


def _readers(model: Any, subgraph: Any) -> dict[int, set[tuple[str, int]]]:
    """Tensor index -> (operator, operand position) of everything that reads it."""
    readers: dict[int, set[tuple[str, int]]] = {}
    for operator in subgraph.operators:
        name = operator_name(model, operator)
        for position, index in enumerate(operator.inputs):
            readers.setdefault(int(index), set()).add((name, position))
    return readers


def _replace_biases(
    model: Any, config: HermesConfig, recipe: Recipe, weights: Mapping[str, LazyTensor]
) -> None:
    """Put the biases where the skeleton carries their patterns."""
    import torch

    patterns = {
        bias_pattern(index, weight.shape[0]).tobytes(): weight
        for index, weight in enumerate(graph_weights(config, recipe.graph))
        if weight.kind == "bias"
    }
    missing = {weight.name for weight in patterns.values()}
    for buffer in model.buffers if patterns else ():
        weight = patterns.get(b"" if buffer.data is None else bytes(buffer.data))
        if weight is not None:
            value = torch.cat([_finite(weights[part], 0, None) for part in weight.parts])
            buffer.data = np.frombuffer(value.numpy().tobytes(), dtype=np.uint8)
            missing.discard(weight.name)
    if missing:
        raise NativeToolError(f"biases not found in the traced graph: {sorted(missing)}")


def _stream(slot: _Slot, weights: Mapping[str, LazyTensor], file: IO[bytes]) -> None:
    """Read, quantize and write a weight chunk by chunk; fills in its scales."""
    amplitude = None
    if slot.rule.weights == "int8" and slot.rule.granularity == "tensor":
        amplitude = max(float(chunk.abs().max()) for _, chunk in _chunks(slot.weight, weights))
    for start, rows in _chunks(slot.weight, weights):
        stored = quantize_rows(rows, slot.rule, amplitude)
        file.write(stored.data)
        if slot.quantization is not None and stored.scales is not None:
            slot.quantization.scale[start : start + len(stored.scales)] = stored.scales


def _chunks(weight: GraphWeight, weights: Mapping[str, LazyTensor]) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of the weight's parts one after the other, float32."""
    columns = weight.shape[1] if len(weight.shape) > 1 else 1
    step = max(1, CHUNK_BYTES // (4 * columns))
    first = 0
    for part in weight.parts:
        rows = weights[part].shape[0]
        for start in range(0, rows, step):
            yield first + start, _finite(weights[part], start, min(start + step, rows))
        first += rows


def _finite(tensor: LazyTensor, start: int, stop: int | None) -> Tensor:
    rows = tensor.read(start, stop).float().contiguous()
    # The mapping checks what it reads; rewrites and other callers' weights are checked here.
    check_finite(rows, f"{tensor.origin}: tensor {tensor.name}", start)
    return rows
