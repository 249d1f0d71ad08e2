"""Attention over the used part of the cache: a branch per cache width, chosen by the position.

A static graph reads the whole cache at every step, although the slots after the last written one
are closed by the mask and weigh exactly 0. So each attention, from the product with the keys to the
product with the values, moves into a subgraph of its own. Copies of it that look at the first W
slots only stand beside it, and the narrowest that holds every written slot is run.

An IF chooses between two subgraphs only, and before it runs one it prepares all that is nested in
it. So IFs are not nested but follow each other, one per width: the one whose width fits computes
the attention, the others hand the result on (docs/performance.md).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from converters.flatbuffer import operator_name, pack_model, read_model, signature_inputs
from converters.flatbuffer_edit import (
    add_constant,
    add_tensor,
    if_operator,
    indices,
    new_operator,
    slice_operator,
)
from hermes.errors import NativeToolError
from hermes.recipe import ExportShapes, GraphOptions
from hermes.signatures import DECODE


def branch_attention(path: Path, shapes: ExportShapes, options: GraphOptions) -> None:
    """Rewrite every signature of the graph in place; nothing changes without widths.

    Raises:
        NativeToolError: a signature's attention does not have the expected form.
    """
    widths = [width for width in sorted(options.attention_widths) if width < shapes.context]
    if not widths:
        return
    model = read_model(path)
    # A subgraph with two signatures is decode's.
    by_graph = {one.subgraphIndex: one for one in model.signatureDefs}
    decode = next(one for one in model.signatureDefs if one.signatureKey == DECODE.encode())
    for signature in (by_graph | {decode.subgraphIndex: decode}).values():
        _Signature(model, signature, shapes.context).branch(widths)
    path.write_bytes(pack_model(model))


def prefill_widths(widths: Sequence[int]) -> Sequence[int]:
    """Every second one: a prefill waits for its int8 products, so half of them are enough."""
    return widths[1::2]


@dataclass(frozen=True)
class _Attention:
    """Operators [start, stop) of one layer: product with the keys to product with the values.

    Attributes:
        inputs: tensors made outside, queries, keys, mask and values in the order of their use.
        caches: the keys and the values among them, and the axis of their slots.
    """

    start: int
    stop: int
    inputs: tuple[int, ...]
    caches: dict[int, int]
    output: int


class _Signature:
    """One signature's subgraph."""

    def __init__(self, model: Any, signature: Any, context: int) -> None:
        self.model = model
        self.name = signature.signatureKey.decode()
        self.graph = model.subgraphs[signature.subgraphIndex]
        self.context = context
        inputs = signature_inputs(signature)
        self.positions, self.mask = inputs["input_pos"], inputs["mask"]
        self.length = int(self.graph.tensors[self.positions].shape[0])
        self.written = {
            int(operator.outputs[0])
            for operator in self.graph.operators
            if operator_name(model, operator) == "DYNAMIC_UPDATE_SLICE"
        }

    def branch(self, widths: Sequence[int]) -> None:
        """Replace every attention by IFs; their subgraphs are made once and serve all layers."""
        widths = widths if self.name == DECODE else prefill_widths(widths)
        widths = [width for width in widths if width >= self.length]
        attentions = self._attentions()
        if not widths or not attentions:
            return
        first = attentions[0]
        if any(self._form(other) != self._form(first) for other in attentions):
            raise NativeToolError(f"{self.name}: the attentions of the layers have other forms")
        before, conditions = self._conditions(widths)
        bodies = [_Body(self, first, width).index for width in (*widths, self.context)]
        handing_on = _Branch(self, first, "hand_on").index
        operators = list(self.graph.operators)
        for attention in reversed(attentions):
            operators[attention.start : attention.stop] = self._choices(
                attention, zip(conditions, bodies, strict=True), handing_on
            )
        self.graph.operators = before + operators

    def _choices(
        self, attention: _Attention, bodies: Iterable[tuple[int, int]], handing_on: int
    ) -> list[Any]:
        """One IF per (condition, body), each with the result of the one before.

        The first gets the queries in place of a result, which have the same shape.
        """
        operators, result = [], attention.inputs[0]
        for condition, body in bodies:
            inputs = [condition, result, *attention.inputs]
            result = self._like(attention.output)
            operators.append(if_operator(self.model, (body, handing_on), inputs, [result]))
        operators[-1].outputs = indices([attention.output])
        return operators

    def _like(self, tensor: int) -> int:
        self.graph.tensors.append(copy.copy(self.graph.tensors[tensor]))
        return len(self.graph.tensors) - 1

    def _attentions(self) -> list[_Attention]:
        """Every run of operators between two products with what the cache writes made."""
        operators = self.graph.operators
        products = [
            position
            for position, operator in enumerate(operators)
            if operator_name(self.model, operator) == "BATCH_MATMUL" and self._caches_of(operator)
        ]
        pairs = zip(products[::2], products[1::2], strict=True)
        return [self._attention(start, stop + 1) for start, stop in pairs]

    def _attention(self, start: int, stop: int) -> _Attention:
        operators = self.graph.operators[start:stop]
        made = {int(tensor) for operator in operators for tensor in operator.outputs}
        read = [int(tensor) for operator in operators for tensor in operator.inputs]
        inputs = [t for t in dict.fromkeys(read) if t not in made and not self._constant(t)]
        (keys,), (values,) = self._caches_of(operators[0]), self._caches_of(operators[-1])
        outside = {
            int(tensor)
            for position, operator in enumerate(self.graph.operators)
            if not start <= position < stop
            for tensor in operator.inputs
        } | {int(tensor) for tensor in self.graph.outputs}
        output = int(operators[-1].outputs[0])
        shapes = {tuple(self.graph.tensors[tensor].shape) for tensor in (inputs[0], output)}
        if (
            made & outside != {output}
            or len(inputs) != 4
            or self.mask not in inputs
            or len(shapes) > 1  # queries stand in for a result
        ):
            raise NativeToolError(
                f"{self.name}: operators {start} to {stop - 1} are no attention as it is traced",
                todo="set attention_widths = [] in the recipe's [graph] table",
            )
        return _Attention(start, stop, tuple(inputs), {keys: 2, values: 3, self.mask: 3}, output)

    def _form(self, attention: _Attention) -> tuple[list[int], list[int]]:
        """Operators, and which of their inputs is a cache or the mask."""
        operators = self.graph.operators[attention.start : attention.stop]
        codes = [int(operator.opcodeIndex) for operator in operators]
        return codes, [attention.caches.get(tensor, -1) for tensor in attention.inputs]

    def _caches_of(self, operator: Any) -> list[int]:
        """The operands that a cache write made: one, for a product with keys or values."""
        return [int(tensor) for tensor in operator.inputs if int(tensor) in self.written]

    def _constant(self, index: int) -> bool:
        return index < 0 or self.model.buffers[self.graph.tensors[index].buffer].data is not None

    def _conditions(self, widths: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Operators on the first row's position, and a boolean per width and for the whole cache.

        Exactly one of the booleans is true: of the narrowest width that has room for the last row.
        """
        operators, position = [], self.positions
        if self.length > 1:
            # Padding rows hold position 0; the first row is always a real one.
            position = self._computed("first_position", schema.TensorType.INT32)
            operators.append(
                slice_operator(self.model, self.graph, self.positions, position, [0], [1])
            )
        fits = []
        for width in widths:
            name, last = f"last_{width}", [width - self.length]
            limit = add_constant(self.model, self.graph, f"{self.name}:{name}", last)
            fits.append(self._computed(f"fits_{width}"))
            inputs = [position, limit]
            operators.append(self._new("LESS_EQUAL", "LessEqual", inputs, fits[-1]))
        conditions = [fits[0]]
        for narrower, wider, width in zip(fits, fits[1:], widths[1:], strict=False):
            # What fits the narrower width fits the wider one too.
            conditions.append(self._computed(f"only_{width}"))
            inputs = [narrower, wider]
            operators.append(self._new("NOT_EQUAL", "NotEqual", inputs, conditions[-1]))
        conditions.append(self._computed("fits_none"))
        operators.append(self._new("LOGICAL_NOT", "LogicalNot", [fits[-1]], conditions[-1]))
        return operators, conditions

    def _computed(self, name: str, kind: int = schema.TensorType.BOOL) -> int:
        return add_tensor(self.graph, f"{self.name}:{name}", [1], kind)

    def _new(self, code: str, options: str, inputs: list[int], output: int) -> Any:
        builtin = getattr(schema.BuiltinOperator, code)
        operator = new_operator(self.model, builtin, inputs, [output])
        operator.builtinOptionsType = getattr(schema.BuiltinOptions, f"{options}Options")
        operator.builtinOptions = getattr(schema, f"{options}OptionsT")()
        return operator


class _Branch:
    """A subgraph that takes an earlier result and an attention's inputs, and returns a result."""

    def __init__(self, signature: _Signature, attention: _Attention, name: str) -> None:
        self.signature, self.model = signature, signature.model
        self.graph = schema.SubGraphT()
        self.graph.name = f"{signature.name}:{name}".encode()
        self.graph.tensors, self.graph.operators = [], []
        self.earlier = self.copied(attention.output)
        self.copies = {tensor: self.copied(tensor) for tensor in attention.inputs}
        self.graph.inputs = indices([self.earlier, *self.copies.values()])
        self.graph.outputs = indices([self.earlier])
        self.model.subgraphs.append(self.graph)
        self.index = len(self.model.subgraphs) - 1

    def copied(self, tensor: int) -> int:
        """The same tensor in this subgraph."""
        duplicate = copy.copy(self.signature.graph.tensors[tensor])
        self.graph.tensors.append(duplicate)
        return len(self.graph.tensors) - 1


class _Body(_Branch):
    """The attention over the first `width` slots."""

    def __init__(self, signature: _Signature, attention: _Attention, width: int) -> None:
        super().__init__(signature, attention, f"attention_{width}")
        self.width, self.attention = width, attention
        self.narrowed = width < signature.context
        if self.narrowed:
            for tensor, axis in attention.caches.items():
                self.copies[tensor] = self._sliced(self.copies[tensor], axis)
        for operator in signature.graph.operators[attention.start : attention.stop]:
            self.graph.operators.append(self._copied_operator(operator))
        self.graph.outputs = indices([self.copies[attention.output]])

    def _sliced(self, tensor: int, axis: int) -> int:
        whole = self.graph.tensors[tensor]
        shape = [int(length) for length in whole.shape]
        shape[axis] = self.width
        narrow = add_tensor(self.graph, f"{whole.name.decode()}:narrow", shape, whole.type)
        self.graph.operators.append(
            slice_operator(self.model, self.graph, tensor, narrow, [0] * len(shape), shape)
        )
        return narrow

    def _copied_operator(self, operator: Any) -> Any:
        duplicate = copy.copy(operator)
        for tensor in (int(index) for index in operator.outputs):
            self.copies[tensor] = self.copied(tensor)
            if tensor != self.attention.output:
                self._narrow_shape(self.copies[tensor])
        duplicate.outputs = indices(self.copies[int(index)] for index in operator.outputs)
        duplicate.inputs = indices(self._operand(int(index)) for index in operator.inputs)
        if operator_name(self.model, operator) == "RESHAPE":
            self._reshape_to(duplicate)
        return duplicate

    def _operand(self, index: int) -> int:
        if index >= 0 and index not in self.copies:
            self.copies[index] = self.copied(index)
        return self.copies.get(index, -1)

    def _narrow_shape(self, index: int) -> None:
        """Computed tensors between the products have the slots as their last axis or before it."""
        tensor = self.graph.tensors[index]
        shape = [int(length) for length in tensor.shape]
        axes = [axis for axis in (-1, -2) if shape[axis] == self.signature.context]
        if not axes:
            raise NativeToolError(f"{self.signature.name}: {tensor.name} has no axis of slots")
        shape[axes[0]] = self.width
        tensor.shape = np.array(shape, dtype=np.int32)

    def _reshape_to(self, operator: Any) -> None:
        shape = self.graph.tensors[int(operator.outputs[0])].shape
        target = add_constant(self.model, self.graph, "shape", [int(length) for length in shape])
        operator.inputs = indices([int(operator.inputs[0]), target])
        if operator.builtinOptions is not None:
            operator.builtinOptions = copy.copy(operator.builtinOptions)
            operator.builtinOptions.newShape = np.array(shape, dtype=np.int32)
