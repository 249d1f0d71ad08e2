"""The header of a model file: a skeleton whose weight inputs have become constants.

Nothing in it but scales, biases and the places of the weights depends on their values. So it is
packed once with zeros there, and the binder writes the values over them; and it is kept by the hash
of what it was made from, so that the next export of the same architecture packs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from converters.flatbuffer import (
    SharedQuantization,
    operator_name,
    pack_model,
    read_model,
    signature_inputs,
)
from converters.kept import fetch, keep
from converters.skeleton import WEIGHT_INPUT_PREFIX, bias_pattern
from converters.unpacking import unpack_before_use
from hermes.errors import NativeToolError, UsageError
from hermes.recipe import QuantizationRule
from hermes.signatures import GraphWeight

_READERS = {
    "matrix": {("FULLY_CONNECTED", 1), ("EMBEDDING_LOOKUP", 1)},
    "gain": {("MUL", 0), ("MUL", 1)},
}
_LOOKUP = ("EMBEDDING_LOOKUP", 1)
_TYPES = {
    "float32": schema.TensorType.FLOAT32,
    "float16": schema.TensorType.FLOAT16,
    "int8": schema.TensorType.INT8,
    "int4": schema.TensorType.INT4,
}
# Positions in the vtables of the schema's tables.
_BUFFER_DATA, _BUFFER_OFFSET, _BUFFER_SIZE, _SCALE = 4, 6, 8, 8


@dataclass(frozen=True)
class Place:
    """Positions in the header of what is known only when a weight is stored.

    Attributes:
        offset: of the uint64 with the weight's offset in the file.
        size: of the uint64 with its bytes.
        scales: of its float32 scales, one a row; 0 if it has none.
        blocks_offset: of the uint64 with the offset of scales outside the header; 0 if none are.
        blocks_size: of the uint64 with their bytes.
    """

    offset: int
    size: int
    scales: int
    blocks_offset: int = 0
    blocks_size: int = 0


@dataclass(frozen=True)
class Header:
    """A packed model without weights.

    Attributes:
        data: the flatbuffer, to be filled in.
        places: of every weight outside it, by graph weight name.
        biases: positions of the float32 values of every bias.
    """

    data: bytearray
    places: dict[str, Place]
    biases: dict[str, list[int]]


def obtain_header(
    skeleton: Path,
    weights: Sequence[GraphWeight],
    rules: Mapping[str, QuantizationRule],
    folder: Path | None,
) -> Header:
    """The header of a skeleton: the one kept in `folder`, or a new one that is kept there.

    Args:
        skeleton: file from `trace_skeleton`.
        weights: all of the graph's.
        rules: storage rule of every weight that is no bias.
        folder: of kept headers; None keeps nothing.

    Raises:
        NativeToolError: the skeleton is not one of these weights.
    """
    if folder is None:
        return make_header(skeleton, weights, rules)
    kept = folder / f"{_key(skeleton, weights, rules)}.header"
    data = fetch(kept)
    if data is not None:
        return _decoded(data)
    header = make_header(skeleton, weights, rules)
    keep(kept, _encoded(header))
    return header


def make_header(
    skeleton: Path, weights: Sequence[GraphWeight], rules: Mapping[str, QuantizationRule]
) -> Header:
    """Turn every weight input into a constant outside the flatbuffer; see `obtain_header`."""
    model = read_model(skeleton)
    slots = {w.name: _open_slot(model, w, rules[w.name]) for w in weights if w.kind != "bias"}
    biases = _bias_buffers(model, weights)
    examples = _drop_weight_inputs(model, slots)
    data = bytearray(pack_model(model))
    packed = schema.Model.GetRootAs(data, 0)
    places = {name: _place(packed, slot, examples.get(name)) for name, slot in slots.items()}
    positions = {
        name: [_vector(packed.Buffers(index)._tab, _BUFFER_DATA) for index in indices]
        for name, indices in biases.items()
    }
    return Header(data, places, positions)


@dataclass
class _Slot:
    """A weight of the unpacked model: its buffer, and its scales or their buffer."""

    weight: GraphWeight
    rule: QuantizationRule
    index: int
    quantization: SharedQuantization | None
    blocks: int


def _open_slot(model: Any, weight: GraphWeight, rule: QuantizationRule) -> _Slot:
    """New buffers for the weight and for the scales of its blocks."""
    index, blocks, quantization = _outside(model), 0, None
    if rule.block:
        if weight.shape[1] % rule.block:
            raise UsageError(
                f"{weight.parts[0]} has {weight.shape[1]} columns",
                expected=f"a multiple of {rule.block} for granularity {rule.granularity}",
                todo="give it a rule with granularity channel",
            )
        blocks = _outside(model)
    elif rule.integer:
        quantization = SharedQuantization()
        rows = weight.shape[0]
        # The packer writes equal vectors once, and these are to become different ones.
        quantization.scale = np.full(rows, index, dtype=np.float32)
        quantization.zeroPoint = np.zeros(rows, dtype=np.int64)
        quantization.quantizedDimension = 0
    return _Slot(weight, rule, index, quantization, blocks)


def _outside(model: Any) -> int:
    """Index of a new buffer outside the header; numbers that are not the default are written."""
    buffer = schema.BufferT()
    buffer.offset, buffer.size = 1, 1
    model.buffers.append(buffer)
    return len(model.buffers) - 1


def _drop_weight_inputs(model: Any, slots: Mapping[str, _Slot]) -> dict[str, tuple[int, int]]:
    """Make every weight input of every signature a constant; (subgraph, tensor) of one for each."""
    examples: dict[str, tuple[int, int]] = {}
    done: set[int] = set()
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
        # Two signatures may be of one subgraph.
        for name, index in found.items() if signature.subgraphIndex not in done else ():
            _make_constant(subgraph, index, slots[name], readers.get(index, set()))
            if slots[name].rule.unpacked:
                unpack_before_use(model, subgraph, index)
            examples.setdefault(name, (signature.subgraphIndex, index))
        done.add(signature.subgraphIndex)
        dropped = set(found.values())
        subgraph.inputs = [index for index in subgraph.inputs if index not in dropped]
        signature.inputs = [e for e in signature.inputs if e.tensorIndex not in dropped]
    return examples


def _make_constant(subgraph: Any, index: int, slot: _Slot, readers: set[tuple[str, int]]) -> None:
    tensor, weight, allowed = subgraph.tensors[index], slot.weight, _READERS[slot.weight.kind]
    shape = tuple(int(length) for length in tensor.shape)
    if readers - allowed or shape != weight.shape:
        raise NativeToolError(
            f"weight {weight.name} of shape {list(shape)} is read by {sorted(readers - allowed)}",
            expected=f"{list(weight.shape)}, {sorted(allowed)}",
        )
    if slot.rule.weights == "float16" and _LOOKUP in readers:
        raise UsageError(
            f"{weight.parts[0]} is looked up by token",
            expected="float32, int8 or int4: the runtime looks up no float16 table",
            todo="put a rule for it in front of the float16 one",
        )
    tensor.buffer = slot.index
    tensor.type = _TYPES[slot.rule.weights]
    if slot.blocks:
        tensor.quantization = _block_quantization(subgraph, tensor, slot)
    elif slot.quantization is not None:
        tensor.quantization = slot.quantization


def _block_quantization(subgraph: Any, tensor: Any, slot: _Slot) -> Any:
    """Scales of blocks are a tensor of their own, in every subgraph."""
    scales = schema.TensorT()
    scales.name = tensor.name + b":scales"
    scales.shape = np.array([tensor.shape[0], tensor.shape[1] // slot.rule.block], dtype=np.int32)
    scales.type, scales.buffer = schema.TensorType.FLOAT16, slot.blocks
    subgraph.tensors.append(scales)
    details = schema.BlockwiseQuantizationT()
    details.scales, details.zeroPoints = len(subgraph.tensors) - 1, -1
    details.blockSize = slot.rule.block
    quantization = schema.QuantizationParametersT()
    quantization.detailsType = schema.QuantizationDetails.BlockwiseQuantization
    quantization.details = details
    return quantization


def _readers(model: Any, subgraph: Any) -> dict[int, set[tuple[str, int]]]:
    """Tensor index -> (operator, operand position) of everything that reads it."""
    readers: dict[int, set[tuple[str, int]]] = {}
    for operator in subgraph.operators:
        name = operator_name(model, operator)
        for position, index in enumerate(operator.inputs):
            readers.setdefault(int(index), set()).add((name, position))
    return readers


def _bias_buffers(model: Any, weights: Sequence[GraphWeight]) -> dict[str, list[int]]:
    """Buffers in which the skeleton carries the patterns of the biases."""
    patterns = {
        bias_pattern(index, weight.shape[0]).tobytes(): weight.name
        for index, weight in enumerate(weights)
        if weight.kind == "bias"
    }
    found: dict[str, list[int]] = {}
    for index, buffer in enumerate(model.buffers) if patterns else ():
        name = patterns.get(b"" if buffer.data is None else bytes(buffer.data))
        if name is not None:
            found.setdefault(name, []).append(index)
    missing = set(patterns.values()) - found.keys()
    if missing:
        raise NativeToolError(f"biases not found in the traced graph: {sorted(missing)}")
    return found


def _place(packed: Any, slot: _Slot, example: tuple[int, int] | None) -> Place:
    buffer = packed.Buffers(slot.index)._tab
    scales = 0
    if slot.quantization is not None and example is not None:
        tensor = packed.Subgraphs(example[0]).Tensors(example[1])
        scales = _vector(tensor.Quantization()._tab, _SCALE)
    place = Place(_field(buffer, _BUFFER_OFFSET), _field(buffer, _BUFFER_SIZE), scales)
    if not slot.blocks:
        return place
    blocks = packed.Buffers(slot.blocks)._tab
    return replace(
        place,
        blocks_offset=_field(blocks, _BUFFER_OFFSET),
        blocks_size=_field(blocks, _BUFFER_SIZE),
    )


def _field(table: Any, entry: int) -> int:
    return int(table.Pos + table.Offset(entry))


def _vector(table: Any, entry: int) -> int:
    return int(table.Vector(table.Offset(entry)))


def _key(
    skeleton: Path, weights: Sequence[GraphWeight], rules: Mapping[str, QuantizationRule]
) -> str:
    here = Path(__file__).resolve().parent
    facts = {
        "skeleton": hashlib.sha256(skeleton.read_bytes()).hexdigest(),
        "weights": [asdict(weight) for weight in weights],
        "rules": {name: [rule.weights, rule.block, rule.unpacked] for name, rule in rules.items()},
        "code": [
            hashlib.sha256((here / name).read_bytes()).hexdigest()
            for name in ("header.py", "flatbuffer.py", "packing.py", "skeleton.py")
        ],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _encoded(header: Header) -> bytes:
    places = {name: asdict(place) for name, place in header.places.items()}
    index = json.dumps({"places": places, "biases": header.biases}).encode()
    return len(index).to_bytes(8, "little") + index + header.data


def _decoded(data: bytes) -> Header:
    end = 8 + int.from_bytes(data[:8], "little")
    index = json.loads(data[8:end])
    places = {name: Place(**place) for name, place in index["places"].items()}
    return Header(bytearray(data[end:]), places, index["biases"])
