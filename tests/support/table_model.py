"""The smallest flatbuffer that the runtime runs: the next token's logits are a row of a table.

Assembled operator by operator, so tests of bundles, templates and stop tokens need no tracing.
"""

from __future__ import annotations

from pathlib import Path

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as tfl


class ModelParts:
    """Collects buffers and subgraphs of one model."""

    def __init__(self) -> None:
        self.model = tfl.ModelT()
        self.model.version, self.model.description = 3, "table"
        self.model.buffers, self.model.subgraphs, self.model.signatureDefs = [], [], []
        self.model.operatorCodes = []
        self.buffer(None)

    def buffer(self, data: np.ndarray | None) -> int:
        buffer = tfl.BufferT()
        if data is not None:
            buffer.data = np.frombuffer(data.tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1

    def code(self, builtin: int) -> int:
        code = tfl.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = builtin
        code.version = 1
        self.model.operatorCodes.append(code)
        return len(self.model.operatorCodes) - 1


def add_tensor(
    graph: tfl.SubGraphT, name: str, shape: list[int], kind: int, buffer: int = 0
) -> int:
    tensor = tfl.TensorT()
    tensor.name, tensor.shape, tensor.type, tensor.buffer = name, shape, kind, buffer
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


def add_operator(graph: tfl.SubGraphT, code: int, inputs: list[int], output: int) -> tfl.OperatorT:
    operator = tfl.OperatorT()
    operator.opcodeIndex, operator.inputs, operator.outputs = code, inputs, [output]
    graph.operators.append(operator)
    return operator


def add_signature(key: str, index: int, graph: tfl.SubGraphT) -> tfl.SignatureDefT:
    signature = tfl.SignatureDefT()
    signature.signatureKey, signature.subgraphIndex = key, index
    signature.inputs, signature.outputs = [], []
    for numbers, maps, prefix in (
        (graph.inputs, signature.inputs, f"{key}_"),
        (graph.outputs, signature.outputs, f"{key}_out_"),
    ):
        for number in numbers:
            entry = tfl.TensorMapT()
            entry.name = graph.tensors[number].name.removeprefix(prefix)
            entry.tensorIndex = number
            maps.append(entry)
    return signature


def write_table_model(
    target: Path, table: np.ndarray, *, context: int = 64, prefill: int = 8
) -> Path:
    """A .tflite whose logits after token t are `table[t]`; signatures prefill_N and decode.

    Args:
        table: float32 [vocab, vocab].
        context: rows of the (unused) cache.
        prefill: tokens of the prefill signature.
    """
    whole = ModelParts()
    add, gather = whole.code(tfl.BuiltinOperator.ADD), whole.code(tfl.BuiltinOperator.GATHER)
    table_buffer = whole.buffer(table.astype(np.float32))
    zero_buffer = whole.buffer(np.zeros(1, np.float32))
    vocab = len(table)
    cache = [1, 1, context, 4]
    for index, (key, length) in enumerate(((f"prefill_{prefill}", prefill), ("decode", 1))):
        graph = tfl.SubGraphT()
        graph.name, graph.tensors, graph.operators = key, [], []
        integer, real = tfl.TensorType.INT32, tfl.TensorType.FLOAT32
        tokens = add_tensor(graph, f"{key}_tokens", [1, length], integer)
        position = add_tensor(graph, f"{key}_input_pos", [length], integer)
        mask = add_tensor(graph, f"{key}_mask", [1, 1, length, context], real)
        zero = add_tensor(graph, "zero", [1], real, zero_buffer)
        graph.inputs, graph.outputs = [tokens, position, mask], []
        for name in ("kv_cache_k_0", "kv_cache_v_0"):
            before = add_tensor(graph, f"{key}_{name}", cache, real)
            after = add_tensor(graph, f"{key}_out_{name}", cache, real)
            operator = add_operator(graph, add, [before, zero], after)
            operator.builtinOptionsType = tfl.BuiltinOptions.AddOptions
            operator.builtinOptions = tfl.AddOptionsT()
            graph.inputs.append(before)
            graph.outputs.append(after)
        if key == "decode":
            constant = add_tensor(graph, "table", [vocab, vocab], real, table_buffer)
            logits = add_tensor(graph, f"{key}_out_logits", [1, 1, vocab], real)
            operator = add_operator(graph, gather, [constant, tokens], logits)
            operator.builtinOptionsType = tfl.BuiltinOptions.GatherOptions
            operator.builtinOptions = tfl.GatherOptionsT()
            graph.outputs.append(logits)
        whole.model.subgraphs.append(graph)
        whole.model.signatureDefs.append(add_signature(key, index, graph))
    builder = flatbuffers.Builder(1024)
    builder.Finish(whole.model.Pack(builder), b"TFL3")
    target.write_bytes(bytes(builder.Output()))
    return target


def successor_table(vocab: int) -> np.ndarray:
    """After token t comes t + 1, and after the last one the first."""
    return np.eye(vocab, dtype=np.float32)[(np.arange(vocab) + 1) % vocab] * 10
