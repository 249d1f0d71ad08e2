"""Derived prefill lengths are the traced ones; lengths that differ in more are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from graph_models import tiny_model
from same_graphs import graph_differences

import converters.lengths
import converters.skeleton
from converters.flatbuffer import pack_model, read_model, signature_inputs, signature_outputs
from converters.graph import make_graph
from converters.lengths import LengthsRefusedError, derive_lengths, shapes_to_trace
from converters.skeleton import trace_skeleton
from converters.stablehlo_rules import RULES
from hermes.config import HermesConfig
from hermes.recipe import ExportShapes, GraphOptions

SHAPES = ExportShapes(16, (2, 4, 6))
FEW = ("prefill_2", "prefill_4", "decode")


@dataclass
class Ladder:
    """All lengths traced, and a copy with those that `shapes_to_trace` names."""

    config: HermesConfig
    full: Path
    few: Path

    def edited(self, target: Path, edit: Callable[[Any, Any], None]) -> Path:
        """The few lengths with an edit of the longer one of the pair."""
        model = read_model(self.few)
        signature = next(s for s in model.signatureDefs if s.signatureKey == b"prefill_4")
        edit(model, signature)
        target.write_bytes(pack_model(model))
        return target


def only(path: Path, names: tuple[str, ...], target: Path) -> Path:
    """The file with some of its signatures."""
    model = read_model(path)
    model.signatureDefs = [s for s in model.signatureDefs if s.signatureKey.decode() in names]
    model.subgraphs = [model.subgraphs[s.subgraphIndex] for s in model.signatureDefs]
    for index, signature in enumerate(model.signatureDefs):
        signature.subgraphIndex = index
    target.write_bytes(pack_model(model))
    return target


def trace_all(folder: Path, options: GraphOptions, *, extras: bool, tied: bool) -> Ladder:
    config, _ = tiny_model(2, extras=extras, tied=tied)
    trace_skeleton(config, SHAPES, options, folder / "full.tflite")
    few = only(folder / "full.tflite", FEW, folder / "few.tflite")
    return Ladder(config, folder / "full.tflite", few)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Ladder:
    options = GraphOptions(norm_gains=False)
    return trace_all(tmp_path_factory.mktemp("fused"), options, extras=False, tied=False)


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> Ladder:
    options = GraphOptions(fuse_qkv=False, fuse_gate_up=False)
    return trace_all(tmp_path_factory.mktemp("extras"), options, extras=True, tied=True)


@pytest.mark.parametrize("name", ["fused", "extras"])
def test_derived_is_traced(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    ladder: Ladder = request.getfixturevalue(name)
    derive_lengths(ladder.few, ladder.config, SHAPES, tmp_path / "derived.tflite")
    names = [s.signatureKey.decode() for s in read_model(tmp_path / "derived.tflite").signatureDefs]
    assert names == ["prefill_2", "prefill_4", "prefill_6", "decode"]
    assert graph_differences(ladder.full, tmp_path / "derived.tflite") == []


@pytest.mark.parametrize("longer", [(), (4,)])
def test_length_1_is_decode_under_another_name(longer: tuple[int, ...], tmp_path: Path) -> None:
    config, _ = tiny_model(2, extras=False, tied=False)
    for name, prefill in (("without", longer), ("with", (*longer, 1))):
        make_graph(config, ExportShapes(16, prefill), GraphOptions(), tmp_path / name)
    without, shared = (read_model(tmp_path / name) for name in ("without", "with"))
    single, *others = shared.signatureDefs
    assert single.signatureKey == b"prefill_1"
    assert [one.signatureKey for one in others] == [
        one.signatureKey for one in without.signatureDefs
    ]
    decode = others[-1]
    assert single.subgraphIndex == decode.subgraphIndex
    assert len(shared.subgraphs) == len(without.subgraphs)
    for sides in (signature_inputs, signature_outputs):
        assert sides(single) == sides(decode)


def test_deriving_is_deterministic(fused: Ladder, tmp_path: Path) -> None:
    for name in ("one", "two"):
        derive_lengths(fused.few, fused.config, SHAPES, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(
    ("asked", "traced"),
    [
        ((8, 32, 128, 512), (8, 32)),
        ((512, 128), (128, 512)),
        ((), ()),
        ((8,), (8,)),
        ((8, 32, 64, 1280), (8, 32, 1280)),
    ],
)
def test_lengths_that_are_traced(asked: tuple[int, ...], traced: tuple[int, ...]) -> None:
    assert shapes_to_trace(ExportShapes(1280, asked)) == ExportShapes(1280, traced)


def first(graph: Any, wanted: Callable[[Any], bool]) -> Any:
    return next(tensor for tensor in graph.tensors if wanted(tensor))


def own_buffer(model: Any, tensor: Any, values: np.ndarray) -> None:
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(values.tobytes(), dtype=np.uint8)
    model.buffers.append(buffer)
    tensor.buffer = len(model.buffers) - 1


def change_constant(
    kind: int, dtype: type, change: Callable[[Any], Any]
) -> Callable[[Any, Any], None]:
    def edit(model: Any, signature: Any) -> None:
        graph = model.subgraphs[signature.subgraphIndex]
        tensor = first(graph, lambda t: t.type == kind and model.buffers[t.buffer].data is not None)
        data = np.frombuffer(bytes(model.buffers[tensor.buffer].data), dtype)
        own_buffer(model, tensor, change(data))

    return edit


def other_operator(model: Any, signature: Any) -> None:
    operators = model.subgraphs[signature.subgraphIndex].operators
    operators[7].opcodeIndex, operators[8].opcodeIndex = (
        operators[8].opcodeIndex, operators[7].opcodeIndex,
    )  # fmt: skip


def fewer_operators(model: Any, signature: Any) -> None:
    model.subgraphs[signature.subgraphIndex].operators.pop()


def other_option(model: Any, signature: Any) -> None:
    graph = model.subgraphs[signature.subgraphIndex]
    operator = next(o for o in graph.operators if hasattr(o.builtinOptions, "keepNumDims"))
    operator.builtinOptions.fusedActivationFunction = schema.ActivationFunctionType.RELU


def other_wiring(model: Any, signature: Any) -> None:
    graph = model.subgraphs[signature.subgraphIndex]
    inputs = signature_inputs(signature)
    one, two = inputs["weights_qkv_proj_0"], inputs["weights_qkv_proj_1"]
    for operator in graph.operators:
        operator.inputs = np.where(operator.inputs == two, one, operator.inputs).astype(np.int32)


def quadratic_shape(model: Any, signature: Any) -> None:
    """4 rows at length 2 and 16 at length 4: no multiple of the length."""
    tensor = first(
        model.subgraphs[signature.subgraphIndex],
        lambda t: t.type == schema.TensorType.FLOAT32 and 4 in list(t.shape),
    )
    tensor.shape = np.where(tensor.shape == 4, 16, tensor.shape).astype(np.int32)


def other_type(model: Any, signature: Any) -> None:
    graph = model.subgraphs[signature.subgraphIndex]
    graph.tensors[-1].type = schema.TensorType.FLOAT16


def other_rank(model: Any, signature: Any) -> None:
    graph = model.subgraphs[signature.subgraphIndex]
    graph.tensors[-1].shape = np.array([1, *graph.tensors[-1].shape], np.int32)


def swapped_inputs(model: Any, signature: Any) -> None:
    entries = {entry.name: entry for entry in signature.inputs}
    one, two = entries[b"kv_cache_k_0"], entries[b"kv_cache_k_1"]
    one.tensorIndex, two.tensorIndex = two.tensorIndex, one.tensorIndex


PLANTS = {
    "another operator": other_operator,
    "one operator less": fewer_operators,
    "another option": other_option,
    "another wiring": other_wiring,
    "a shape that is no multiple": quadratic_shape,
    "another type": other_type,
    "another rank": other_rank,
    "inputs under other names": swapped_inputs,
    "another float constant": change_constant(
        schema.TensorType.FLOAT32, np.float32, lambda data: data * np.float32(2)
    ),
    "a shifted integer constant": change_constant(
        schema.TensorType.INT32, np.int32, lambda data: data + 1
    ),
    "a longer integer constant": change_constant(
        schema.TensorType.INT32, np.int32, lambda data: np.concatenate([data, data])
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_lengths_that_differ_are_refused(fused: Ladder, tmp_path: Path, plant: str) -> None:
    planted = fused.edited(tmp_path / "planted.tflite", PLANTS[plant])
    with pytest.raises(LengthsRefusedError):
        derive_lengths(planted, fused.config, SHAPES, tmp_path / "target.tflite")
    assert not (tmp_path / "target.tflite").exists()


def test_repacking_alone_is_not_refused(fused: Ladder, tmp_path: Path) -> None:
    same = fused.edited(tmp_path / "same.tflite", lambda model, signature: None)
    derive_lengths(same, fused.config, SHAPES, tmp_path / "target.tflite")


def test_an_interface_of_another_model_is_refused(fused: Ladder, tmp_path: Path) -> None:
    longer = ExportShapes(32, SHAPES.prefill)
    with pytest.raises(LengthsRefusedError, match=r"prefill_2: mask came out with shape"):
        derive_lengths(fused.few, fused.config, longer, tmp_path / "target.tflite")


def test_a_refusal_traces_every_length(
    fused: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def traced(_: Any, shapes: ExportShapes, __: Any, target: Path) -> None:
        asked.append(shapes.prefill)
        whole = shapes.prefill == SHAPES.prefill
        target.write_bytes((fused.full if whole else planted).read_bytes())

    planted = fused.edited(tmp_path / "planted.tflite", other_option)
    monkeypatch.setattr(converters.skeleton, "trace_skeleton", traced)
    monkeypatch.delitem(RULES, "silu")
    target = tmp_path / "graph.tflite"
    reasons = make_graph(fused.config, SHAPES, GraphOptions(norm_gains=False), target)
    assert asked == [(2, 4), SHAPES.prefill]
    assert "differ" in reasons.lengths
    assert "silu" in reasons.tracer
    assert target.read_bytes() == fused.full.read_bytes()
