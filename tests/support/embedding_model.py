"""A decoder that takes embeddings, and the table that makes them of ids, as tiny flatbuffers."""

from __future__ import annotations

from pathlib import Path

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as tfl
from table_model import ModelParts, add_operator, add_signature, add_tensor
from tiny_bundle import train_sentencepiece

REAL, INTEGER = tfl.TensorType.FLOAT32, tfl.TensorType.INT32


def write_embedding_decoder(
    target: Path, width: int, output: str, *, context: int = 64, prefill: int = 8
) -> Path:
    """Signatures prefill and decode whose input is `embeddings` [1, T, width].

    The output of decode, called `output`, is the embedding itself.
    """
    whole = ModelParts()
    add, zeros = whole.code(tfl.BuiltinOperator.ADD), whole.buffer(np.zeros(1, np.float32))

    def copy(graph: tfl.SubGraphT, before: int, zero: int, after: int) -> None:
        operator = add_operator(graph, add, [before, zero], after)
        operator.builtinOptionsType = tfl.BuiltinOptions.AddOptions
        operator.builtinOptions = tfl.AddOptionsT()
        graph.outputs.append(after)

    for key, length in ((f"prefill_{prefill}", prefill), ("decode", 1)):
        graph = _subgraph(key)
        embeddings = add_tensor(graph, f"{key}_embeddings", [1, length, width], REAL)
        position = add_tensor(graph, f"{key}_input_pos", [length], INTEGER)
        mask = add_tensor(graph, f"{key}_mask", [1, 1, length, context], REAL)
        zero = add_tensor(graph, "zero", [1], REAL, zeros)
        graph.inputs = [embeddings, position, mask]
        for name in ("kv_cache_k_0", "kv_cache_v_0"):
            before = add_tensor(graph, f"{key}_{name}", [1, 1, context, 4], REAL)
            graph.inputs.append(before)
            copy(
                graph,
                before,
                zero,
                add_tensor(graph, f"{key}_out_{name}", [1, 1, context, 4], REAL),
            )
        if key == "decode":
            after = add_tensor(graph, f"{key}_out_{output}", [1, 1, width], REAL)
            copy(graph, embeddings, zero, after)
        _add(whole, key, graph)
    return _write(whole, target)


def write_embedder(target: Path, table: np.ndarray) -> Path:
    """One signature: `token_ids` [1, 1] to the table's row."""
    whole = ModelParts()
    gather = whole.code(tfl.BuiltinOperator.GATHER)
    key = "serving_default"
    graph = _subgraph(key)
    ids = add_tensor(graph, f"{key}_token_ids", [1, 1], INTEGER)
    rows = add_tensor(graph, "table", list(table.shape), REAL, whole.buffer(table))
    found = add_tensor(graph, f"{key}_out_embeddings", [1, 1, table.shape[1]], REAL)
    operator = add_operator(graph, gather, [rows, ids], found)
    operator.builtinOptionsType = tfl.BuiltinOptions.GatherOptions
    operator.builtinOptions = tfl.GatherOptionsT()
    graph.inputs, graph.outputs = [ids], [found]
    _add(whole, key, graph)
    return _write(whole, target)


def write_bundle_around(decoder: Path, embedder: Path | None, target: Path) -> Path:
    """A .litertlm of a decoder and perhaps an embedder, with the tiny tokenizer."""
    from litert_lm_builder import litertlm_builder as builder
    from litert_lm_builder.runtime.proto import llm_metadata_pb2

    metadata = llm_metadata_pb2.LlmMetadata(max_num_tokens=64)
    metadata.llm_model_type.generic_model.SetInParent()
    metadata.stop_tokens.add().token_ids.ids.append(2)
    described, tokenizer = target.with_suffix(".pb"), target.with_suffix(".model")
    described.write_bytes(metadata.SerializeToString())
    tokenizer.write_bytes(train_sentencepiece())
    writer = builder.LitertLmFileBuilder()
    writer.add_system_metadata(builder.Metadata("Authors", "test", builder.DType.STRING))
    writer.add_llm_metadata(str(described))
    writer.add_sentencepiece_tokenizer(str(tokenizer))
    if embedder is not None:
        writer.add_tflite_model(str(embedder), builder.TfLiteModelType.EMBEDDER)
    writer.add_tflite_model(str(decoder), builder.TfLiteModelType.PREFILL_DECODE)
    with target.open("wb") as stream:
        writer.build(stream)
    return target


def _subgraph(name: str) -> tfl.SubGraphT:
    graph = tfl.SubGraphT()
    graph.name, graph.tensors, graph.operators = name, [], []
    graph.inputs, graph.outputs = [], []
    return graph


def _add(whole: ModelParts, key: str, graph: tfl.SubGraphT) -> None:
    whole.model.signatureDefs.append(add_signature(key, len(whole.model.subgraphs), graph))
    whole.model.subgraphs.append(graph)


def _write(whole: ModelParts, target: Path) -> Path:
    builder = flatbuffers.Builder(1024)
    builder.Finish(whole.model.Pack(builder), b"TFL3")
    target.write_bytes(bytes(builder.Output()))
    return target
