"""DEQUANTIZE in front of the matmuls whose weights are stored small and multiplied as floats.

The runtime runs it once, when it loads the model, because its input is a constant.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from converters.flatbuffer import operator_name

_MATMUL = "FULLY_CONNECTED"
_VERSION = 6
"""Of the operator: knows scales by channel and int4."""


def unpack_before_use(model: Any, subgraph: Any, weight: int) -> None:
    """Let the matmuls that read tensor `weight` read its float32 form; lookups stay as they are."""
    readers = [
        operator
        for operator in subgraph.operators
        if operator_name(model, operator) == _MATMUL and operator.inputs[1] == weight
    ]
    if not readers:
        return
    tensor = schema.TensorT()
    tensor.name = subgraph.tensors[weight].name + b":floats"
    tensor.shape, tensor.type = subgraph.tensors[weight].shape, schema.TensorType.FLOAT32
    tensor.buffer = 0
    subgraph.tensors.append(tensor)
    unpacked = len(subgraph.tensors) - 1
    for operator in readers:
        operator.inputs = _indices(operator.inputs[0], unpacked, *operator.inputs[2:])
    operator = schema.OperatorT()
    operator.opcodeIndex = _opcode(model)
    operator.inputs, operator.outputs = _indices(weight), _indices(unpacked)
    operator.builtinOptionsType = schema.BuiltinOptions.DequantizeOptions
    operator.builtinOptions = schema.DequantizeOptionsT()
    subgraph.operators.insert(0, operator)


def multiply_as_stored(model: Any, subgraph: Any, weights: set[int]) -> None:
    """Take the DEQUANTIZE of these weights out again."""
    replaced = {}
    kept = []
    for operator in subgraph.operators:
        if operator_name(model, operator) == "DEQUANTIZE" and int(operator.inputs[0]) in weights:
            replaced[int(operator.outputs[0])] = int(operator.inputs[0])
        else:
            kept.append(operator)
    for operator in kept if replaced else ():
        operator.inputs = _indices(*(replaced.get(int(index), index) for index in operator.inputs))
    subgraph.operators = kept


def _indices(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def _opcode(model: Any) -> int:
    for index, code in enumerate(model.operatorCodes):
        if max(code.builtinCode, code.deprecatedBuiltinCode) == schema.BuiltinOperator.DEQUANTIZE:
            code.version = max(code.version, _VERSION)
            return index
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
    code.version = _VERSION
    model.operatorCodes.append(code)
    return len(model.operatorCodes) - 1
