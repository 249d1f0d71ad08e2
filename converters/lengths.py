"""Derive the prefill signatures of all lengths from traces of two; length 1 is decode itself.

Tracing costs seconds per signature, yet prefills of different lengths are one graph over other
shapes. So two lengths are traced and compared: the same operators, options and wiring, and every
dimension and every integer constant either equal in both or proportional to the length. Then the
graph of any other length follows. Whatever the comparison does not cover raises
`LengthsRefusedError`, and the caller traces every length instead.

Length 1 is another graph, because axes of length 1 vanish. It is decode's: a second signature of
that subgraph costs nothing to load, and the logits that a prefill has no use for cost less than a
subgraph of its own. A length that fills the context is another graph too, because its cache write
replaces the whole cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from converters.flatbuffer import pack_model, read_model, signature_inputs, signature_outputs
from converters.layer_block import plain
from hermes.config import HermesConfig
from hermes.recipe import ExportShapes
from hermes.signatures import DECODE, Signature, build_signatures, prefill_name

_INTEGERS = {schema.TensorType.INT32: np.int32, schema.TensorType.INT64: np.int64}
_TENSOR_TYPES = {"int32": schema.TensorType.INT32, "float32": schema.TensorType.FLOAT32}


class LengthsRefusedError(Exception):
    """The traced lengths are not provably one graph; says why."""


def shapes_to_trace(shapes: ExportShapes) -> ExportShapes:
    """The lengths from which `derive_lengths` makes the others: two, and those that stand alone."""
    ladder = sorted(n for n in shapes.prefill if n < shapes.context)
    alone = [n for n in shapes.prefill if n == shapes.context]
    return replace(shapes, prefill=tuple(ladder[:2] + alone))


def derive_lengths(traced: Path, config: HermesConfig, shapes: ExportShapes, target: Path) -> None:
    """Write the skeleton with all prefill lengths, given one of `shapes_to_trace(shapes)`.

    Raises:
        LengthsRefusedError: the two traced lengths differ in more than their shapes.
    """
    model = read_model(traced)
    known = {definition.signatureKey.decode(): definition for definition in model.signatureDefs}
    pair = sorted(n for n in shapes_to_trace(shapes).prefill if n < shapes.context)
    family = _Family.prove(model, known, pair) if len(pair) == 2 else None
    graphs, definitions = [], []
    for signature in build_signatures(config, shapes.context, shapes.prefill):
        if signature.name in known:
            definition = known[signature.name]
            graph = model.subgraphs[definition.subgraphIndex]
        elif family is not None:
            graph, definition = family.member(signature.length)
        else:
            raise LengthsRefusedError(f"{signature.name}: no two traced lengths to derive it from")
        _check_interface(graph, definition, signature)
        graphs.append(graph)
        definitions.append((definition, len(graphs) - 1))
    for definition, index in definitions:
        definition.subgraphIndex = index
    model.subgraphs = graphs
    model.signatureDefs = [definition for definition, _ in definitions]
    target.write_bytes(pack_model(model))


def share_decode(path: Path) -> None:
    """Give decode's subgraph the signature of a prefill of length 1 as well, in place.

    The runtime wants every output of the subgraph in both, so this prefill has logits.
    """
    model = read_model(path)
    (decode,) = [one for one in model.signatureDefs if one.signatureKey == DECODE.encode()]
    single = copy.copy(decode)
    single.signatureKey = prefill_name(1).encode()
    model.signatureDefs.insert(0, single)
    path.write_bytes(pack_model(model))


@dataclass(frozen=True)
class _Law:
    """How an integer depends on the length: not at all, or in proportion."""

    shorter: int
    longer: int

    def at(self, length: int, one: int, two: int, where: str) -> int:
        """The value at `length`, where the traced lengths have `one` and `two`."""
        if one == two:
            return one
        if one * self.longer != two * self.shorter or one % self.shorter:
            raise LengthsRefusedError(
                f"{where}: {one} at length {self.shorter} and {two} at length {self.longer} are "
                "neither equal nor multiples of the length"
            )
        return one // self.shorter * length


Pair = tuple[int, int]
"""A tensor of the shorter graph and the one that takes its place in the longer."""


@dataclass(frozen=True)
class _Family:
    """Two traced lengths that were proven to be one graph.

    `pairs` numbers the tensors of every further member. Constants that happen to be equal at one
    length are one tensor there and several at another, so only computed tensors pair one to one.
    """

    model: Any
    law: _Law
    definitions: tuple[Any, Any]
    shorter: Any
    longer: Any
    pairs: dict[Pair, int]

    @classmethod
    def prove(cls, model: Any, known: Mapping[str, Any], lengths: list[int]) -> _Family:
        """Compare everything but the numbers that depend on the length."""
        one, two = (known[prefill_name(length)] for length in lengths)
        left, right = (model.subgraphs[definition.subgraphIndex] for definition in (one, two))
        family = cls(model, _Law(*lengths), (one, two), left, right, {})
        family._pair(left.inputs, right.inputs, "the graph's inputs")
        _require(len(left.operators) == len(right.operators), "other numbers of operators")
        for position, (a, b) in enumerate(zip(left.operators, right.operators, strict=True)):
            _require(_unwired(a) == _unwired(b), f"operators {position} differ")
            family._pair(a.inputs, b.inputs, f"operands of operator {position}")
            family._pair(a.outputs, b.outputs, f"results of operator {position}")
        known_pairs = len(family.pairs)
        family._pair(left.outputs, right.outputs, "the graph's outputs")
        for names in (signature_inputs, signature_outputs):
            _require(list(names(one)) == list(names(two)), "the signatures have other names")
            family._pair(names(one).values(), names(two).values(), "the signatures' tensors")
        _require(len(family.pairs) == known_pairs, "the interfaces name other tensors")
        for pair in family.pairs:
            family.tensor(pair, lengths[0])
        return family

    def member(self, length: int) -> tuple[Any, Any]:
        """Subgraph and signature of another length."""
        name, template = prefill_name(length), self.definitions[0].signatureKey.decode()
        graph, definition = copy.copy(self.shorter), copy.copy(self.definitions[0])
        graph.name = definition.signatureKey = name.encode()
        graph.tensors = [self.tensor(pair, length) for pair in self.pairs]
        graph.inputs, graph.outputs = self._numbered("inputs"), self._numbered("outputs")
        graph.operators = []
        for one, two in zip(self.shorter.operators, self.longer.operators, strict=True):
            operator = copy.copy(one)
            operator.inputs = self._of(one.inputs, two.inputs)
            operator.outputs = self._of(one.outputs, two.outputs)
            graph.operators.append(operator)
        for side in ("inputs", "outputs"):
            entries = zip(*(getattr(each, side) for each in self.definitions), strict=True)
            moved = [_entry(a, self.pairs[a.tensorIndex, b.tensorIndex]) for a, b in entries]
            setattr(definition, side, moved)
        _rename(graph, template, name)
        return graph, definition

    def tensor(self, pair: Pair, length: int) -> Any:
        """The tensor as that length has it; raises where the traced ones follow no law."""
        one, two = self.shorter.tensors[pair[0]], self.longer.tensors[pair[1]]
        where = f"tensor {pair[0]}"
        same = one.type == two.type and one.isVariable == two.isVariable
        _require(same, f"{where} has other types")
        _require(plain(one.quantization) == plain(two.quantization), f"{where}: quantization")
        _require(one.shapeSignature is None and two.shapeSignature is None, f"{where} is dynamic")
        tensor = copy.copy(one)
        tensor.shape = self._integers(one.shape, two.shape, length, f"the shape of {where}")
        tensor.buffer = self._buffer(one, two, length, where)
        return tensor

    def _pair(self, left: Iterable[int], right: Iterable[int], where: str) -> None:
        one, two = _list(left), _list(right)
        _require(len(one) == len(two), f"{where}: {len(one)} and {len(two)}")
        for pair in zip(one, two, strict=True):
            if -1 in pair:
                _require(pair == (-1, -1), f"{where}: one is left out")
            elif pair not in self.pairs:
                computed = self._data(self.shorter, pair[0]) is None
                clash = any(pair[0] == a or pair[1] == b for a, b in self.pairs)
                _require(not (computed and clash), f"{where} are other tensors")
                self.pairs[pair] = len(self.pairs)

    def _data(self, graph: Any, index: int) -> Any:
        return self.model.buffers[graph.tensors[index].buffer].data

    def _of(self, left: Iterable[int], right: Iterable[int]) -> np.ndarray:
        pairs = zip(_list(left), _list(right), strict=True)
        # An operand that is left out stays -1.
        return np.array([self.pairs.get(pair, -1) for pair in pairs], dtype=np.int32)

    def _numbered(self, side: str) -> np.ndarray:
        return self._of(getattr(self.shorter, side), getattr(self.longer, side))

    def _integers(self, one: Iterable[int], two: Iterable[int], length: int, where: str) -> Any:
        left, right = _list(one), _list(two)
        _require(len(left) == len(right), f"{where} has another rank")
        values = [self.law.at(length, a, b, where) for a, b in zip(left, right, strict=True)]
        return np.array(values, dtype=np.int32)

    def _buffer(self, one: Any, two: Any, length: int, where: str) -> int:
        first, second = (self.model.buffers[tensor.buffer].data for tensor in (one, two))
        _require((first is None) == (second is None), f"{where} is constant in one of them")
        if first is None or bytes(first) == bytes(second):
            return int(one.buffer)
        kind = _INTEGERS.get(one.type)
        if kind is None:
            raise LengthsRefusedError(f"{where}: constants that are no integers differ")
        left, right = (np.frombuffer(bytes(data), kind) for data in (first, second))
        values = self._integers(left, right, length, f"constant {where}").astype(kind)
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(values.tobytes(), dtype=np.uint8)
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1


def _check_interface(graph: Any, definition: Any, signature: Signature) -> None:
    """Every runtime input and output has the shape and type that the signature states."""
    sides = (
        (signature.inputs, signature_inputs(definition)),
        (signature.outputs, signature_outputs(definition)),
    )
    for specs, found in sides:
        for spec in specs:
            _require(spec.name in found, f"{signature.name} has no {spec.name}")
            tensor = graph.tensors[found[spec.name]]
            shaped = tuple(_list(tensor.shape)) == spec.shape
            _require(
                shaped and tensor.type == _TENSOR_TYPES[spec.dtype],
                f"{signature.name}: {spec.name} came out with shape {_list(tensor.shape)}",
            )


def _unwired(operator: Any) -> list[Any]:
    """Everything of an operator but the tensors it reads and makes."""
    fields = vars(operator)
    return [plain(fields[name]) for name in sorted(fields) if name not in ("inputs", "outputs")]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise LengthsRefusedError(what)


def _list(values: Iterable[int]) -> list[int]:
    return [int(value) for value in values]


def _renumbered(indices: Iterable[int], number: Callable[[int], int]) -> np.ndarray:
    return np.array([number(int(index)) for index in indices], dtype=np.int32)


def _entry(entry: Any, index: int) -> Any:
    """A signature's entry that names another tensor."""
    moved = copy.copy(entry)
    moved.tensorIndex = index
    return moved


def _rename(graph: Any, old: str, new: str) -> None:
    """Tensor names begin with their signature's where they are inputs."""
    prefix = f"{old}_".encode()
    for tensor in graph.tensors:
        if tensor.name.startswith(prefix):
            tensor.name = f"{new}_".encode() + tensor.name.removeprefix(prefix)
