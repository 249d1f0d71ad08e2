"""A stamped graph is the fully traced one; layers that differ are refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from graph_models import lazy, tiny_model
from interpreted import assert_identical, outputs_of
from same_graphs import graph_differences, operator_counts
from tiny_llama import PROMPT_IDS
from torch import Tensor

from converters.bind import bind_weights
from converters.flatbuffer import operator_name, pack_model, read_model, signature_inputs
from converters.skeleton import bias_pattern, trace_skeleton
from converters.stamp import TRACED_LAYERS, StampRefusedError, refusal, stamp_layers
from hermes.config import HermesConfig
from hermes.recipe import ExportShapes, GraphOptions, QuantizationRule, Recipe
from hermes.signatures import graph_weights

SHAPES = ExportShapes(16, (4,))


@dataclass
class Stamped:
    """A traced short graph, its stamped form and the full trace, of one model."""

    folder: Path
    config: HermesConfig
    state: dict[str, Tensor]
    recipe: Recipe

    @property
    def few(self) -> HermesConfig:
        return replace(self.config, num_layers=TRACED_LAYERS)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.tflite"

    def stamp(self, traced: Path, target: Path, config: HermesConfig | None = None) -> Path:
        stamp_layers(traced, self.few, config or self.config, SHAPES, self.recipe.graph, target)
        return target


def trace_both(folder: Path, recipe: Recipe, layers: int, *, extras: bool, tied: bool) -> Stamped:
    config, state = tiny_model(layers, extras=extras, tied=tied)
    case = Stamped(folder, config, state, recipe)
    trace_skeleton(case.few, SHAPES, recipe.graph, case.path("short"))
    trace_skeleton(config, SHAPES, recipe.graph, case.path("full"))
    case.stamp(case.path("short"), case.path("stamped"))
    return case


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Stamped:
    """Untied head, fused matmuls, norms without gains: the form the default recipe exports."""
    recipe = Recipe("own", rewrites=("fold_norm_gains",), quantization=(QuantizationRule("*"),))
    return trace_both(tmp_path_factory.mktemp("fused"), recipe, 6, extras=False, tied=False)


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> Stamped:
    """Tied head, biases everywhere, query and key norms, one matmul per projection."""
    recipe = Recipe("own", graph=GraphOptions(False, False), quantization=(QuantizationRule("*"),))
    return trace_both(tmp_path_factory.mktemp("extras"), recipe, 5, extras=True, tied=True)


@pytest.mark.parametrize("name", ["fused", "extras"])
def test_stamped_is_the_full_trace(name: str, request: pytest.FixtureRequest) -> None:
    case: Stamped = request.getfixturevalue(name)
    assert graph_differences(case.path("full"), case.path("stamped")) == []
    counts, short = operator_counts(case.path("stamped")), operator_counts(case.path("short"))
    assert list(counts) == ["prefill_4", "decode"]
    for signature, count in counts.items():
        assert count > short[signature] + 20 * (case.config.num_layers - TRACED_LAYERS)


@pytest.mark.parametrize("name", ["fused", "extras"])
def test_stamped_runs_bit_identically(name: str, request: pytest.FixtureRequest) -> None:
    case: Stamped = request.getfixturevalue(name)
    outputs = []
    for skeleton in ("full", "stamped"):
        target = case.path(f"{skeleton}_bound")
        bind_weights(case.path(skeleton), case.config, case.recipe, lazy(case.state), target)
        outputs.append(outputs_of(target, PROMPT_IDS[:6], 4))
    assert_identical(*outputs)
    assert np.isfinite(outputs[0][-1]["logits"]).all()
    assert np.ptp(outputs[0][-1]["logits"]) > 1


@pytest.mark.parametrize("name", ["fused", "extras"])
def test_stamping_is_deterministic(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case: Stamped = request.getfixturevalue(name)
    again = case.stamp(case.path("short"), tmp_path / "again.tflite")
    assert again.read_bytes() == case.path("stamped").read_bytes()


def test_one_layer_more_than_traced(fused: Stamped, tmp_path: Path) -> None:
    five = replace(fused.config, num_layers=5)
    target = fused.stamp(fused.path("short"), tmp_path / "five.tflite", five)
    short, full = operator_counts(fused.path("short")), operator_counts(fused.path("full"))
    for name, count in operator_counts(target).items():
        assert 2 * (count - short[name]) == full[name] - short[name]


# Planted differences: what `Planted` changes in the second of the two layers that are compared.


class Planted:
    """One signature of a traced model, with edits by layer."""

    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        self.signature = next(s for s in model.signatureDefs if s.signatureKey.decode() == name)
        self.graph = model.subgraphs[self.signature.subgraphIndex]
        self.inputs = signature_inputs(self.signature)

    def layer_one(self, operator: str) -> int:
        return self.in_layer(1, operator)

    def layer_two(self, operator: str) -> int:
        return self.in_layer(2, operator)

    def in_layer(self, layer: int, operator: str) -> int:
        """Position of the first such operator from the layer's first matmul on."""
        first = self.reader(self.inputs[f"weights_qkv_proj_{layer}"])
        for position in range(first, len(self.graph.operators)):
            if operator_name(self.model, self.graph.operators[position]) == operator:
                return position
        raise KeyError(operator)

    def reader(self, index: int) -> int:
        return next(p for p, op in enumerate(self.graph.operators) if index in list(op.inputs))

    def extra_operator(self, layer: int = 2) -> None:
        """The result of the layer's first addition is squared."""
        position = self.in_layer(layer, "ADD")
        made = int(self.graph.operators[position].outputs[0])
        multiply = copy.deepcopy(self.graph.operators[self.layer_two("MUL")])
        self.graph.tensors.append(copy.deepcopy(self.graph.tensors[made]))
        new = len(self.graph.tensors) - 1
        multiply.inputs = np.array([made, made], np.int32)
        multiply.outputs = np.array([new], np.int32)
        for operator in self.graph.operators[position + 1 :]:
            operator.inputs = np.where(operator.inputs == made, new, operator.inputs)
        self.graph.operators.insert(position + 1, multiply)

    def other_constant(self) -> None:
        """The first operator of layer 2 that reads a float constant gets another one."""
        start = self.reader(self.inputs["weights_qkv_proj_2"])
        for operator in self.graph.operators[start:]:
            for slot, index in enumerate(operator.inputs):
                tensor = self.graph.tensors[index]
                data = self.model.buffers[tensor.buffer].data
                if data is not None and tensor.type == schema.TensorType.FLOAT32:
                    changed = np.frombuffer(bytes(data), np.float32) * np.float32(1.25)
                    buffer = schema.BufferT()
                    buffer.data = np.frombuffer(changed.tobytes(), np.uint8)
                    self.model.buffers.append(buffer)
                    twin = copy.deepcopy(tensor)
                    twin.buffer = len(self.model.buffers) - 1
                    self.graph.tensors.append(twin)
                    operator.inputs = operator.inputs.copy()
                    operator.inputs[slot] = len(self.graph.tensors) - 1
                    return
        raise KeyError("no constant")

    def other_option(self) -> None:
        """Layer 2's first matmul gets an activation."""
        operator = self.graph.operators[self.layer_two("FULLY_CONNECTED")]
        operator.builtinOptions.fusedActivationFunction = schema.ActivationFunctionType.RELU

    def other_operator(self) -> None:
        """Layer 2's first addition becomes a multiplication."""
        operator = self.graph.operators[self.layer_two("ADD")]
        multiply = self.graph.operators[self.layer_two("MUL")]
        operator.opcodeIndex = multiply.opcodeIndex
        operator.builtinOptionsType = multiply.builtinOptionsType
        operator.builtinOptions = copy.deepcopy(multiply.builtinOptions)

    def wrong_weight(self) -> None:
        """Layer 2 reads layer 1's output projection."""
        right, wrong = self.inputs["weights_o_proj_2"], self.inputs["weights_o_proj_1"]
        operator = self.graph.operators[self.reader(right)]
        operator.inputs = np.where(operator.inputs == right, wrong, operator.inputs)

    def wrong_cache(self) -> None:
        """Layer 2 writes into layer 1's keys."""
        right, wrong = self.inputs["kv_cache_k_2"], self.inputs["kv_cache_k_1"]
        operator = self.graph.operators[self.reader(right)]
        operator.inputs = np.where(operator.inputs == right, wrong, operator.inputs)

    def earlier_result(self) -> None:
        """Layer 2's rotation adds what layer 1's adds, a tensor that is no layer's in common."""
        two = self.layer_two("ADD")
        one = two - (self.layer_two("FULLY_CONNECTED") - self.layer_one("FULLY_CONNECTED"))
        wrong = self.graph.operators[one].inputs[0]
        two_inputs = self.graph.operators[two].inputs
        self.graph.operators[two].inputs = np.array([wrong, two_inputs[1]], np.int32)

    def other_shape(self) -> None:
        """A tensor of layer 2 claims another shape."""
        operator = self.graph.operators[self.layer_two("MUL")]
        tensor = self.graph.tensors[int(operator.outputs[0])]
        tensor.shape = np.array([*tensor.shape[:-1], tensor.shape[-1] + 1], np.int32)


PLANTS: dict[str, Callable[[Planted], None]] = {
    "an extra operator": Planted.extra_operator,
    "another constant": Planted.other_constant,
    "another option": Planted.other_option,
    "another operator": Planted.other_operator,
    "a weight of the wrong layer": Planted.wrong_weight,
    "a cache of the wrong layer": Planted.wrong_cache,
    "another layer's result": Planted.earlier_result,
    "another shape": Planted.other_shape,
}


@pytest.mark.parametrize("signature", ["prefill_4", "decode"])
@pytest.mark.parametrize("plant", PLANTS)
def test_a_layer_that_differs_is_refused(
    fused: Stamped, tmp_path: Path, plant: str, signature: str
) -> None:
    model = read_model(fused.path("short"))
    PLANTS[plant](Planted(model, signature))
    (tmp_path / "planted.tflite").write_bytes(pack_model(model))
    with pytest.raises(StampRefusedError, match=signature):
        fused.stamp(tmp_path / "planted.tflite", tmp_path / "target.tflite")
    assert not (tmp_path / "target.tflite").exists()


def test_the_same_extra_operator_in_every_layer_is_stamped(fused: Stamped, tmp_path: Path) -> None:
    """The control: what is refused above is the difference, not the operator."""
    model = read_model(fused.path("short"))
    for layer in range(TRACED_LAYERS):
        Planted(model, "decode").extra_operator(layer)
    (tmp_path / "planted.tflite").write_bytes(pack_model(model))
    target = fused.stamp(tmp_path / "planted.tflite", tmp_path / "target.tflite")
    counts, full = operator_counts(target), operator_counts(fused.path("full"))
    assert counts == full | {"decode": full["decode"] + fused.config.num_layers}


def test_repacking_alone_is_not_refused(fused: Stamped, tmp_path: Path) -> None:
    """So that the planted difference is what the test above sees."""
    (tmp_path / "same.tflite").write_bytes(pack_model(read_model(fused.path("short"))))
    fused.stamp(tmp_path / "same.tflite", tmp_path / "target.tflite")
    assert graph_differences(fused.path("full"), tmp_path / "target.tflite") == []


@pytest.mark.parametrize("plant", PLANTS)
def test_the_comparison_sees_planted_differences(
    fused: Stamped, tmp_path: Path, plant: str
) -> None:
    """`graph_differences` itself, seen red."""
    model = read_model(fused.path("full"))
    PLANTS[plant](Planted(model, "decode"))
    (tmp_path / "planted.tflite").write_bytes(pack_model(model))
    found = graph_differences(fused.path("full"), tmp_path / "planted.tflite")
    assert len(found) == 1
    assert found[0].startswith("decode: ")


def test_biases_of_one_layer_are_not_shared_with_another(extras: Stamped, tmp_path: Path) -> None:
    """Layer 2 adds layer 1's bias: the bytes are a bias of the wrong layer, not a shared one."""
    names = [w.name for w in graph_weights(extras.few, extras.recipe.graph)]
    right, wrong = (
        bias_pattern(names.index(f"o_proj_bias_{layer}"), 64).tobytes() for layer in (2, 1)
    )
    model = read_model(extras.path("short"))
    found = [b for b in model.buffers if b.data is not None and bytes(b.data) == right]
    assert found
    for buffer in found:
        buffer.data = np.frombuffer(wrong, np.uint8)
    (tmp_path / "planted.tflite").write_bytes(pack_model(model))
    with pytest.raises(StampRefusedError):
        extras.stamp(tmp_path / "planted.tflite", tmp_path / "target.tflite")


def test_three_traced_layers_are_too_few(fused: Stamped, tmp_path: Path) -> None:
    """The last layer of a prefill is cut short, so two whole ones must lie before it."""
    three = replace(fused.config, num_layers=3)
    trace_skeleton(three, SHAPES, fused.recipe.graph, tmp_path / "three.tflite")
    with pytest.raises(StampRefusedError, match="prefill_4"):
        stamp_layers(
            tmp_path / "three.tflite", three, fused.config, SHAPES, fused.recipe.graph,
            tmp_path / "target.tflite",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_layers": 1}, "1 layers are not more than the 4"),
        ({"num_layers": TRACED_LAYERS}, "4 layers are not more than the 4"),
        ({"num_layers": 30, "no_rope_layers": (3, 7)}, r"layers \[3, 7\] have no rotary"),
    ],
)
def test_models_that_are_never_stamped(changes: dict[str, Any], reason: str) -> None:
    refused = refusal(HermesConfig(**changes))
    assert refused is not None
    assert re.search(reason, refused)


def test_models_that_are_stamped() -> None:
    assert refusal(HermesConfig(num_layers=TRACED_LAYERS + 1)) is None
    assert refusal(HermesConfig(num_layers=30, attention_bias=True, qk_norm=True)) is None
