"""What `inspect` says about a bundle, against a model built by hand; damaged models are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from tiny_bundle import CHAT_TEMPLATE, write_bundle

from converters.bundle import read_bundle
from converters.flatbuffer import pack_model
from converters.inspection import inspect_bundle
from hermes.errors import BadInputError


class ModelByHand:
    """x [1, 4] times three constants: float32 inside, int8 per channel and per tensor outside."""

    def __init__(self) -> None:
        self.model = schema.ModelT()
        self.model.version = 3
        self.model.buffers = [schema.BufferT()]
        self.model.operatorCodes = []
        for builtin in (schema.BuiltinOperator.ADD, schema.BuiltinOperator.FULLY_CONNECTED):
            code = schema.OperatorCodeT()
            code.builtinCode = code.deprecatedBuiltinCode = builtin
            self.model.operatorCodes.append(code)
        graph = schema.SubGraphT()
        graph.tensors, graph.operators = [], []
        self.graph = graph
        self.model.subgraphs = [graph]
        external = self.buffer(offset=64 * 50, size=12)
        x = self.tensor("x", [1, 4], schema.TensorType.FLOAT32)
        wide = self.tensor("wide", [3, 4], schema.TensorType.INT8, external, scales=3)
        # The same bytes under a second tensor, as a signature of its own would read them.
        self.tensor("wide again", [3, 4], schema.TensorType.INT8, external, scales=3)
        inside = self.buffer(data=np.arange(3, dtype=np.float32))
        bias = self.tensor("bias", [3], schema.TensorType.FLOAT32, inside)
        whole = self.buffer(offset=64 * 51, size=5)
        self.tensor("whole", [5], schema.TensorType.INT8, whole, scales=1)
        y = self.tensor("y", [1, 3], schema.TensorType.FLOAT32)
        z = self.tensor("z", [1, 3], schema.TensorType.FLOAT32)
        self.operator(1, [x, wide, -1], [y])
        self.operator(0, [y, bias], [z])
        graph.inputs, graph.outputs = np.array([x], np.int32), np.array([z], np.int32)
        signature = schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = b"decode", 0
        signature.inputs, signature.outputs = [self.entry("tokens", x)], [self.entry("logits", z)]
        self.model.signatureDefs = [signature]

    def buffer(self, data: Any = None, offset: int = 0, size: int = 0) -> int:
        buffer = schema.BufferT()
        buffer.offset, buffer.size = offset, size
        if data is not None:
            buffer.data = np.frombuffer(data.tobytes(), np.uint8)
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1

    def tensor(
        self, name: str, shape: list[int], kind: int, buffer: int = 0, scales: int = 0
    ) -> int:
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.type = name.encode(), np.array(shape, np.int32), kind
        tensor.buffer = buffer
        if scales:
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale = np.full(scales, 0.5, np.float32)
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def operator(self, code: int, inputs: list[int], outputs: list[int]) -> None:
        operator = schema.OperatorT()
        operator.opcodeIndex = code
        operator.inputs, operator.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        self.graph.operators.append(operator)

    @staticmethod
    def entry(name: str, index: int) -> Any:
        entry = schema.TensorMapT()
        entry.name, entry.tensorIndex = name.encode(), index
        return entry


MODEL = pack_model(ModelByHand().model)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected")
    data = MODEL.ljust(64 * 50, b"\0") + bytes(64) + bytes(64)
    (folder / "hand.tflite").write_bytes(data)
    return write_bundle(
        folder / "hand.tflite", folder / "hand.litertlm", stop_ids=(2, 7), start_id=1,
        max_num_tokens=32,
    )  # fmt: skip


def test_everything_is_reported(bundle: Path) -> None:
    facts = inspect_bundle(bundle)
    assert facts["path"] == str(bundle)
    assert facts["bytes"] == bundle.stat().st_size
    assert facts["prompt"]["start_token"] == (1,)
    assert facts["prompt"]["stop_tokens"] == [(2,), (7,)]
    assert facts["prompt"]["max_num_tokens"] == 32
    assert facts["prompt"]["suppressed_tokens"] == 0
    assert facts["prompt"]["chat_template"] == CHAT_TEMPLATE
    kinds = {section["kind"]: section for section in facts["sections"]}
    assert {"TFLiteModel", "SP_Tokenizer", "LlmMetadataProto"} <= set(kinds)
    assert kinds["TFLiteModel"]["bytes"] == 64 * 52
    (model,) = facts["models"]
    assert model["signatures"] == [
        {
            "name": "decode",
            "inputs": [{"name": "tokens", "type": "float32", "shape": [1, 4]}],
            "outputs": [{"name": "logits", "type": "float32", "shape": [1, 3]}],
            "operators": {"FULLY_CONNECTED": 1, "ADD": 1},
        }
    ]
    assert model["constants"] == {
        "int8 per channel": {"tensors": 1, "bytes": 12},
        "float32": {"tensors": 1, "bytes": 12},
        "int8 per tensor": {"tensors": 1, "bytes": 5},
    }


def test_facts_are_json(bundle: Path) -> None:
    json.dumps(inspect_bundle(bundle), allow_nan=False)


def test_not_a_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.litertlm").write_bytes(MODEL)
    with pytest.raises(BadInputError, match=r"a\.litertlm"):
        inspect_bundle(tmp_path / "a.litertlm")
    with pytest.raises(BadInputError):
        inspect_bundle(tmp_path / "absent.litertlm")


def test_a_damaged_model_never_crashes_the_reader(bundle: Path, tmp_path: Path) -> None:
    section = read_bundle(bundle).section("TFLiteModel")
    data = bundle.read_bytes()
    target = tmp_path / "damaged.litertlm"
    draw = random.Random(5)
    refused = 0
    for _ in range(200):
        changed = bytearray(data)
        for _ in range(draw.choice([1, 4, 40])):
            changed[section.offset + draw.randrange(len(MODEL))] = draw.randrange(256)
        target.write_bytes(changed)
        try:
            inspect_bundle(target)
        except BadInputError:
            refused += 1
    assert refused > 25
    overwritten = bytearray(data)
    overwritten[section.offset : section.offset + len(MODEL)] = b"\xff" * len(MODEL)
    target.write_bytes(overwritten)
    with pytest.raises(BadInputError, match="damaged model section"):
        inspect_bundle(target)


def test_an_unknown_element_type_is_refused(bundle: Path, tmp_path: Path) -> None:
    hand = ModelByHand()
    for tensor in hand.graph.tensors:
        tensor.type = 99
    section = read_bundle(bundle).section("TFLiteModel")
    data = bytearray(bundle.read_bytes())
    data[section.offset : section.offset + len(MODEL)] = pack_model(hand.model)
    target = tmp_path / "unknown.litertlm"
    target.write_bytes(data)
    with pytest.raises(BadInputError, match=r"unknown\.litertlm: damaged model section"):
        inspect_bundle(target)
