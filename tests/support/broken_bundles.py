"""Bundles that break one lint rule each: a clean one, taken apart, edited, and written again."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import tiny_bundle
import toy_tokenizers
from ai_edge_litert import schema_py_generated as tfl
from litert_lm_builder import litertlm_builder as official
from litert_lm_builder.runtime.proto import llm_metadata_pb2, sampler_params_pb2
from table_model import successor_table, write_table_model

START = "{% for m in messages %}<s>{{ m.role }}:"
PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}</s>{% endfor %}"
OPEN = "{% if add_generation_prompt %}<s>{% endif %}"
SENTENCEPIECE, JSON = "sentencepiece", "json"


@dataclass
class Pieces:
    """What a bundle is made of, free to be edited.

    Attributes:
        model: a ModelT; None leaves the section out.
        metadata: an LlmMetadata; None leaves the section out.
        tokenizers: kind and content.
        raw: the model section as bytes, instead of `model`.
        after: edits of the finished file.
        name: of the file.
    """

    model: Any
    metadata: Any
    tokenizers: list[tuple[str, bytes]]
    raw: bytes | None = None
    after: list[Callable[[Path], None]] = field(default_factory=list)
    name: str = "model.litertlm"

    def subgraph(self, signature: str) -> Any:
        return self.model.subgraphs[self.definition(signature).subgraphIndex]

    def definition(self, signature: str) -> Any:
        key = signature.encode()
        return next(item for item in self.model.signatureDefs if item.signatureKey == key)

    def rename(self, signature: str, old: str, new: str, *, outputs: bool = False) -> None:
        found = self.definition(signature)
        for entry in found.outputs if outputs else found.inputs:
            if entry.name == old.encode():
                entry.name = new.encode()

    def tensor(self, signature: str, name: str, *, output: bool = False) -> Any:
        found = self.definition(signature)
        entries = found.outputs if output else found.inputs
        index = next(entry.tensorIndex for entry in entries if entry.name == name.encode())
        return self.subgraph(signature).tensors[index]

    def add_matrix(
        self, shape: list[int], kind: int, scales: int, operator: str, index: str | None = None
    ) -> None:
        """A constant read by an operator of decode; `index` is the input that looks it up."""
        graph = self.subgraph("decode")
        buffer = tfl.BufferT()
        buffer.data = np.zeros(int(np.prod(shape)), np.uint8)
        self.model.buffers.append(buffer)
        tensor = tfl.TensorT()
        tensor.name, tensor.shape, tensor.type = b"added", np.array(shape, np.int32), kind
        tensor.buffer = len(self.model.buffers) - 1
        if scales:
            tensor.quantization = tfl.QuantizationParametersT()
            tensor.quantization.scale = np.full(scales, 0.5, np.float32)
        result = tfl.TensorT()
        result.name, result.shape = b"result", np.array([1], np.int32)
        result.type, result.buffer = tfl.TensorType.FLOAT32, 0
        graph.tensors += [tensor, result]
        code = tfl.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = getattr(tfl.BuiltinOperator, operator)
        code.version = 1
        self.model.operatorCodes.append(code)
        entries = {entry.name: entry.tensorIndex for entry in self.definition("decode").inputs}
        source = entries[(index or "tokens").encode()]
        step = tfl.OperatorT()
        step.opcodeIndex = len(self.model.operatorCodes) - 1
        step.inputs = np.array([source, len(graph.tensors) - 2], np.int32)
        step.outputs = np.array([len(graph.tensors) - 1], np.int32)
        graph.operators.append(step)


def clean(folder: Path, *, vocab: int = 0, prefill: int = 1, kind: str = SENTENCEPIECE) -> Pieces:
    """A bundle that breaks no rule: context 64, its template prints `<s>` and `</s>`."""
    settings = toy_tokenizers.byte_level_json(400) if kind == JSON else {}
    table = successor_table(vocab or (len(settings["model"]["vocab"]) if settings else 128))
    path = write_table_model(folder / "table.tflite", table, prefill=prefill)
    model = tfl.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
    metadata = llm_metadata_pb2.LlmMetadata(max_num_tokens=64)
    metadata.llm_model_type.generic_model.SetInParent()
    metadata.stop_tokens.add().token_ids.ids.append(2)
    template = START + PARTS + OPEN
    if kind == JSON:
        template = template.replace("</s>", "<|im_end|>").replace("<s>", "<|im_start|>")
    metadata.jinja_prompt_template = template
    metadata.sampler_params.type = sampler_params_pb2.SamplerParameters.TOP_P
    metadata.sampler_params.k, metadata.sampler_params.p = 1, 1.0
    data = json.dumps(settings).encode() if settings else tiny_bundle.train_sentencepiece()
    return Pieces(model, metadata, [(kind, data)])


def write(pieces: Pieces, folder: Path) -> Path:
    """The file, through the official builder."""
    target = folder / pieces.name
    builder = official.LitertLmFileBuilder()
    builder.add_system_metadata(official.Metadata("Authors", "test", official.DType.STRING))
    if pieces.metadata is not None:
        (folder / "m.pb").write_bytes(pieces.metadata.SerializeToString())
        builder.add_llm_metadata(str(folder / "m.pb"))
    for number, (kind, data) in enumerate(pieces.tokenizers):
        builder._tokenizers_by_model_type.clear()  # it would refuse a second one
        path = folder / f"tokenizer{number}.zlib"
        if kind == JSON:
            path.write_bytes(len(data).to_bytes(8, "little") + zlib.compress(data))
            builder.add_hf_tokenizer(str(path))
        else:
            path.write_bytes(data)
            builder.add_sentencepiece_tokenizer(str(path))
    if pieces.raw is not None or pieces.model is not None:
        (folder / "edited.tflite").write_bytes(pieces.raw or packed(pieces.model))
        builder.add_tflite_model(
            str(folder / "edited.tflite"), official.TfLiteModelType.PREFILL_DECODE
        )
    with target.open("wb") as stream:
        builder.build(stream)
    for edit in pieces.after:
        edit(target)
    return target


def packed(model: Any) -> bytes:
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def move_last_section(path: Path, *, by: int = 0, grow: int = 0) -> None:
    """Shift the last section by some bytes, or let it grow (sparsely) at its end."""
    from converters.bundle_reader import read_bundle

    bundle = read_bundle(path, hashes=False)
    last = max(bundle.sections, key=lambda section: section.offset)
    data = path.read_bytes()
    begin, end = last.offset, last.offset + last.size
    head = data[:begin]
    for old, new in ((begin, begin + by), (end, end + by + grow)):
        assert head.count(old.to_bytes(8, "little")) == 1
        head = head.replace(old.to_bytes(8, "little"), new.to_bytes(8, "little"))
    path.write_bytes(head + bytes(by) + data[begin:end])
    if grow:
        with path.open("r+b") as file:
            file.truncate(end + by + grow)
