"""New operators, tensors and constants for a TFLite flatbuffer that is being edited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema


def if_operator(
    model: Any, branches: tuple[int, int], inputs: Iterable[int], outputs: Iterable[int]
) -> Any:
    """An IF whose first input is its condition."""
    operator = new_operator(model, schema.BuiltinOperator.IF, inputs, outputs)
    operator.builtinOptionsType = schema.BuiltinOptions.IfOptions
    operator.builtinOptions = schema.IfOptionsT()
    operator.builtinOptions.thenSubgraphIndex, operator.builtinOptions.elseSubgraphIndex = branches
    return operator


def slice_operator(
    model: Any, graph: Any, source: int, target: int, begin: list[int], size: list[int]
) -> Any:
    """A SLICE with constant begin and size."""
    constants = [
        add_constant(model, graph, "begin", begin),
        add_constant(model, graph, "size", size),
    ]
    operator = new_operator(model, schema.BuiltinOperator.SLICE, [source, *constants], [target])
    operator.builtinOptionsType = schema.BuiltinOptions.SliceOptions
    operator.builtinOptions = schema.SliceOptionsT()
    return operator


def new_operator(model: Any, builtin: int, inputs: Iterable[int], outputs: Iterable[int]) -> Any:
    """An operator without options; its code is added to the model where it is new."""
    operator = schema.OperatorT()
    operator.opcodeIndex = _code(model, builtin)
    operator.inputs, operator.outputs = indices(inputs), indices(outputs)
    return operator


def _code(model: Any, builtin: int) -> int:
    for index, code in enumerate(model.operatorCodes):
        if max(code.builtinCode, code.deprecatedBuiltinCode) == builtin:
            return index
    code = schema.OperatorCodeT()
    code.builtinCode, code.deprecatedBuiltinCode, code.version = builtin, min(builtin, 127), 1
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1


def add_tensor(graph: Any, name: str, shape: Sequence[int], kind: int) -> int:
    """A computed tensor."""
    tensor = schema.TensorT()
    tensor.name, tensor.type, tensor.buffer = name.encode(), kind, 0
    tensor.shape = np.array(shape, dtype=np.int32)
    tensor.hasRank = True
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


def add_constant(model: Any, graph: Any, name: str, values: Sequence[int]) -> int:
    """A constant vector of int32."""
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(np.array(values, dtype=np.int32).tobytes(), dtype=np.uint8)
    model.buffers.append(buffer)
    index = add_tensor(graph, name, [len(values)], schema.TensorType.INT32)
    graph.tensors[index].buffer = len(model.buffers) - 1
    return index


def indices(values: Iterable[int]) -> np.ndarray:
    """Tensor numbers as the schema wants them."""
    return np.array([int(value) for value in values], dtype=np.int32)
