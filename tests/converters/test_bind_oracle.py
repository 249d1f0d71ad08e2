"""Skeleton plus binding against the plain road: constants traced in, ai-edge-quantizer over it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from graph_models import lazy, tiny_model
from interpreted import assert_identical, outputs_of
from plain_road import quantize_file, trace_with_constants
from tiny_llama import PROMPT_IDS
from torch import Tensor

import converters.bind
from converters.bind import bind_weights
from converters.flatbuffer import operator_name, pack_model, read_model, signature_inputs
from converters.rounding import leading_directions
from converters.skeleton import bias_pattern, matrix_weights, trace_skeleton
from hermes.config import HermesConfig
from hermes.errors import BadInputError, NativeToolError, UsageError
from hermes.recipe import ExportShapes, GraphOptions, QuantizationRule, Recipe
from hermes.signatures import graph_weights

SHAPES = ExportShapes(16, (4,))
INT8 = (QuantizationRule("*"),)
FLOAT = (QuantizationRule("*", "float32"),)
CALIBRATED = QuantizationRule("*", rounding="calibrated")
BLOCKS = QuantizationRule("*", "int4", "block32")
ONE_SCALE = QuantizationRule("*", "int8", "tensor")


@dataclass
class Case:
    """A model, its weightless graph, and recipes for it."""

    folder: Path
    config: HermesConfig
    state: dict[str, Tensor]
    recipe: Recipe

    @property
    def skeleton(self) -> Path:
        return self.folder / "skeleton.tflite"

    def bind(self, name: str, **changes: Any) -> Path:
        """Bind the model's weights under a changed recipe."""
        target = self.folder / f"{name}.tflite"
        recipe = replace(self.recipe, **changes)
        bind_weights(self.skeleton, self.config, recipe, lazy(self.state), target)
        return target


def make_case(folder: Path, recipe: Recipe, *, extras: bool, tied: bool) -> Case:
    config, state = tiny_model(2, extras=extras, tied=tied)
    case = Case(folder, config, state, recipe)
    trace_skeleton(config, SHAPES, recipe.graph, case.skeleton)
    return case


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Untied head, fused matmuls, norms without gains: the form the default recipe exports."""
    recipe = Recipe("own", rewrites=("fold_norm_gains",), quantization=INT8)
    return make_case(tmp_path_factory.mktemp("fused"), recipe, extras=False, tied=False)


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Tied head, biases everywhere, query and key norms, one matmul per projection."""
    recipe = Recipe("own", graph=GraphOptions(False, False), quantization=INT8)
    return make_case(tmp_path_factory.mktemp("extras"), recipe, extras=True, tied=True)


@pytest.mark.parametrize("name", ["fused", "extras"])
def test_bit_identical_to_the_plain_road(name: str, request: pytest.FixtureRequest) -> None:
    case: Case = request.getfixturevalue(name)
    plain, quantized = case.folder / "plain.tflite", case.folder / "plain8.tflite"
    trace_with_constants(case.config, SHAPES, case.recipe.graph, case.state, plain)
    quantize_file(plain, quantized, (case.config.vocab_size, case.config.hidden_size))
    expected = outputs_of(plain, PROMPT_IDS[:7], 4)
    assert_identical(
        outputs_of(case.bind("float32", quantization=FLOAT), PROMPT_IDS[:7], 4), expected
    )
    expected8 = outputs_of(quantized, PROMPT_IDS[:7], 4)
    assert_identical(outputs_of(case.bind("int8"), PROMPT_IDS[:7], 4), expected8)
    # The two differ, or the comparison would be blind to what was stored.
    assert not np.array_equal(expected[-1]["logits"], expected8[-1]["logits"])


@pytest.mark.parametrize("name", ["fused", "extras"])
def test_a_weight_that_is_off_by_a_row_is_seen(name: str, request: pytest.FixtureRequest) -> None:
    """The planted fault of the comparison: two rows of one matrix change places."""
    case: Case = request.getfixturevalue(name)
    state = dict(case.state)
    matrix = state["layers.1.self_attn.k_proj.weight"].clone()
    matrix[[3, 4]] = matrix[[4, 3]]
    wrong = replace(case, state=state | {"layers.1.self_attn.k_proj.weight": matrix})
    right = outputs_of(case.bind("right"), PROMPT_IDS[:5], 4)
    with pytest.raises(AssertionError, match="kv_cache_k_1"):
        assert_identical(right, outputs_of(wrong.bind("swapped"), PROMPT_IDS[:5], 4))


def test_the_file_is_laid_out_for_large_offsets(fused: Case) -> None:
    path = fused.bind("layout")
    data = path.read_bytes()
    model = schema.ModelT.InitFromPackedBuf(data, 0)
    spans = sorted((b.offset, b.size) for b in model.buffers if b.offset > 1)
    matrices = matrix_weights(fused.config, fused.recipe.graph)
    assert len(spans) == len(graph_weights(fused.config, fused.recipe.graph)) == len(matrices)
    end = spans[0][0]
    # The header is whole without the weights behind it.
    header = schema.ModelT.InitFromPackedBuf(data[:end], 0)
    assert len(header.subgraphs) == len(model.subgraphs)
    for offset, size in spans:
        assert offset % 64 == 0
        assert 0 <= offset - end < 64
        end = offset + size
    assert 0 <= len(data) - end < 64
    assert sum(size for _, size in spans) == sum(int(np.prod(w.shape)) for w in matrices)


def test_all_signatures_share_one_scale_table_per_weight(fused: Case) -> None:
    model = schema.Model.GetRootAs(fused.bind("shared").read_bytes(), 0)
    tables: dict[int, set[int]] = {}
    uses = 0
    for index in range(model.SubgraphsLength()):
        graph = model.Subgraphs(index)
        for position in range(graph.TensorsLength()):
            tensor = graph.Tensors(position)
            if tensor.Quantization() is not None and tensor.Quantization().ScaleLength():
                assert tensor.Type() == schema.TensorType.INT8
                assert tensor.Quantization().ScaleLength() == tensor.Shape(0)
                assert tensor.Quantization().ZeroPointLength() == tensor.Shape(0)
                tables.setdefault(tensor.Buffer(), set()).add(tensor.Quantization()._tab.Pos)
                uses += 1
    assert len(tables) == len(matrix_weights(fused.config, fused.recipe.graph))
    assert all(len(places) == 1 for places in tables.values())
    assert uses > len(tables)


def test_binding_is_deterministic_and_does_not_depend_on_chunks(
    fused: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fused.bind("first").read_bytes()
    assert fused.bind("second").read_bytes() == first
    monkeypatch.setattr(converters.bind, "CHUNK_BYTES", 4 * 64 * 5)
    assert fused.bind("chunks").read_bytes() == first


def test_halved_weights_are_bound_as_their_float32_values(fused: Case) -> None:
    halved = {name: value.bfloat16() for name, value in fused.state.items()}
    widened = {name: value.float() for name, value in halved.items()}
    first = replace(fused, state=halved).bind("bfloat16").read_bytes()
    assert replace(fused, state=widened).bind("widened").read_bytes() == first


def test_progress_names_every_weight(fused: Case, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    bound = bind_weights(
        fused.skeleton, fused.config, fused.recipe, lazy(fused.state), tmp_path / "a.tflite",
        lambda name, size: seen.append((name, size)),
    )  # fmt: skip
    assert sorted(seen) == sorted((weight.name, weight.size) for weight in bound)
    assert {weight.stored for weight in bound} == {"int8"}
    assert [w.name for w in bound] == [
        w.name for w in graph_weights(fused.config, fused.recipe.graph)
    ]


def test_rounding_looks_at_as_many_directions_as_the_recipe_says(fused: Case) -> None:
    generator = np.random.default_rng(12)
    seen = {
        part: generator.standard_normal((24, fused.state[part].shape[1])).astype(np.float32)
        for weight in graph_weights(fused.config, fused.recipe.graph)
        if weight.kind == "matrix"
        for part in weight.parts
    }
    few = {part: leading_directions(rows, 2) for part, rows in seen.items()}
    quantization = (replace(INT8[0], rounding="calibrated"),)

    def bound(inputs: dict[str, np.ndarray], directions: int) -> bytes:
        calibration = replace(fused.recipe.calibration, directions=directions)
        recipe = replace(fused.recipe, quantization=quantization, calibration=calibration)
        target = fused.folder / "directions.tflite"
        read = {part: functools.partial(np.copy, rows) for part, rows in inputs.items()}
        weights = lazy(fused.state)
        bind_weights(fused.skeleton, fused.config, recipe, weights, target, inputs=read)
        return target.read_bytes()

    assert bound(seen, 2) == bound(few, 24)
    assert bound(seen, 2) != bound(seen, 24)


def stored_matrix(path: Path, name: str, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The int8 values and the scales of a graph weight, found by its tensor's name."""
    data = path.read_bytes()
    model = schema.ModelT.InitFromPackedBuf(data, 0)
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            if tensor.name.decode().split(":")[0].endswith(f"weights_{name}"):
                buffer = model.buffers[tensor.buffer]
                values = data[buffer.offset : buffer.offset + buffer.size]
                return np.frombuffer(values, np.int8).reshape(shape), tensor.quantization.scale
    raise KeyError(name)


def test_one_scale_per_tensor_is_one_scale(fused: Case) -> None:
    down = QuantizationRule("*.down_proj.weight", "int8", "tensor")
    path = fused.bind("tensor", quantization=(down, *INT8))
    original = fused.state["layers.1.mlp.down_proj.weight"].numpy()
    values, scales = stored_matrix(path, "down_proj_1", (64, 96))
    assert set(scales.tolist()) == {float(np.abs(original).max() / np.float32(127))}
    assert np.array_equal(values, np.rint(original / scales[:, None]))
    _, others = stored_matrix(path, "o_proj_1", (64, 64))
    assert len(set(others.tolist())) > 60
    assert not np.array_equal(
        outputs_of(path, PROMPT_IDS[:5], 4)[-1]["logits"],
        outputs_of(fused.bind("channel"), PROMPT_IDS[:5], 4)[-1]["logits"],
    )


@pytest.mark.parametrize(
    ("name", "index", "value", "rule"),
    [
        ("layers.1.mlp.up_proj.weight", (77, 5), float("nan"), INT8[0]),
        ("layers.1.mlp.up_proj.weight", (77, 5), float("inf"), CALIBRATED),
        ("layers.1.mlp.up_proj.weight", (77, 5), float("nan"), CALIBRATED),
        ("layers.1.mlp.up_proj.weight", (77, 5), float("-inf"), BLOCKS),
        ("layers.1.mlp.up_proj.weight", (77, 5), float("nan"), BLOCKS),
        ("layers.1.mlp.up_proj.weight", (77, 5), float("nan"), FLOAT[0]),
        ("layers.0.self_attn.v_proj.weight", (31, 63), float("-inf"), ONE_SCALE),
        ("embed_tokens.weight", (127, 0), float("inf"), INT8[0]),
        ("layers.1.self_attn.k_norm.weight", (3,), float("nan"), INT8[0]),
        ("layers.0.mlp.gate_proj.bias", (95,), float("nan"), INT8[0]),
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    extras: Case,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    index: tuple[int, ...],
    value: float,
    rule: QuantizationRule,
) -> None:
    """Also where only the scales of integers are looked at."""
    monkeypatch.setattr(converters.bind, "CHUNK_BYTES", 4 * 64 * 10)
    broken = extras.state[name].clone()
    broken[index] = value
    weights = lazy(extras.state | {name: broken})
    recipe = replace(extras.recipe, quantization=(rule,))
    seen = {
        part: functools.partial(np.eye, 16, tensor.shape[1], dtype=np.float32)
        for part, tensor in extras.state.items()
        if tensor.ndim == 2
    }
    with pytest.raises(BadInputError) as caught:
        bind_weights(
            extras.skeleton, extras.config, recipe, weights, tmp_path / "broken", inputs=seen
        )
    assert f"tiny.pt: tensor {name}: {value} at index {list(index)}" in str(caught.value)


def test_different_rules_in_one_matmul_are_refused(fused: Case, extras: Case) -> None:
    rules = (QuantizationRule("*.up_proj.weight", "float32"), *INT8)
    with pytest.raises(UsageError) as caught:
        fused.bind("mixed", quantization=rules)
    for word in ("gate_up_proj_0", "mlp.up_proj.weight: float32", "fuse_gate_up"):
        assert word in str(caught.value)
    extras.bind("mixed", quantization=rules)
    with pytest.raises(UsageError, match="mlp_up"):
        fused.bind("unused", quantization=(QuantizationRule("*.mlp_up.*"), *INT8))


def replant(case: Case, tmp_path: Path, change: Callable[[Any], None]) -> Case:
    """The case with a changed skeleton."""
    model = read_model(case.skeleton)
    change(model)
    (tmp_path / "skeleton.tflite").write_bytes(pack_model(model))
    return replace(case, folder=tmp_path)


def reader_of(model: Any, weight: str) -> tuple[Any, int]:
    """The first operator of the first signature that reads a weight, and the weight's tensor."""
    index = signature_inputs(model.signatureDefs[0])[f"weights_{weight}"]
    graph = model.subgraphs[model.signatureDefs[0].subgraphIndex]
    return next(op for op in graph.operators if index in list(op.inputs)), index


def test_a_weight_read_by_another_operator_is_refused(fused: Case, tmp_path: Path) -> None:
    def add_instead(model: Any) -> None:
        _, index = reader_of(model, "o_proj_0")
        graph = model.subgraphs[model.signatureDefs[0].subgraphIndex]
        add = next(op for op in graph.operators if operator_name(model, op) == "ADD")
        add.inputs = np.array([add.inputs[0], index], np.int32)

    with pytest.raises(NativeToolError, match=r"weight o_proj_0 .*\('ADD', 1\)") as caught:
        replant(fused, tmp_path, add_instead).bind("bound")
    assert caught.value.exit_code == 7


def test_a_weight_read_as_the_other_operand_is_refused(fused: Case, tmp_path: Path) -> None:
    def swap(model: Any) -> None:
        operator, _ = reader_of(model, "o_proj_0")
        operator.inputs = operator.inputs[[1, 0, *range(2, len(operator.inputs))]]

    with pytest.raises(NativeToolError, match=r"weight o_proj_0 .*\('FULLY_CONNECTED', 0\)"):
        replant(fused, tmp_path, swap).bind("bound")


def test_a_graph_of_another_model_is_refused(fused: Case, extras: Case, tmp_path: Path) -> None:
    with pytest.raises(NativeToolError, match="other weight inputs than the model"):
        replace(fused, folder=extras.folder).bind("other")

    def narrow(model: Any) -> None:
        _, index = reader_of(model, "o_proj_0")
        graph = model.subgraphs[model.signatureDefs[0].subgraphIndex]
        graph.tensors[index].shape = np.array([64, 32], np.int32)

    with pytest.raises(NativeToolError, match=r"weight o_proj_0 of shape \[64, 32\]"):
        replant(fused, tmp_path, narrow).bind("bound")


def test_a_bias_that_is_not_in_the_graph_is_refused(extras: Case, tmp_path: Path) -> None:
    weights = graph_weights(extras.config, extras.recipe.graph)
    position = next(i for i, w in enumerate(weights) if w.name == "o_proj_bias_1")
    pattern = bias_pattern(position, 64).tobytes()

    def erase(model: Any) -> None:
        found = [b for b in model.buffers if b.data is not None and bytes(b.data) == pattern]
        assert found
        for buffer in found:
            buffer.data = np.zeros(len(pattern), np.uint8)

    with pytest.raises(NativeToolError, match=r"biases not found .*o_proj_bias_1"):
        replant(extras, tmp_path, erase).bind("bound")


def test_biases_of_every_projection_differ(extras: Case) -> None:
    """Patterns are told apart by their bytes alone."""
    weights = graph_weights(extras.config, extras.recipe.graph)
    patterns = [bias_pattern(i, w.shape[0]).tobytes() for i, w in enumerate(weights)]
    assert len(set(patterns)) == len(patterns)
    assert torch.isfinite(torch.frombuffer(bytearray(patterns[0]), dtype=torch.float32)).all()
