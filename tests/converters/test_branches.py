"""Attention over the used part of the cache gives what attention over all of it gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_models import lazy, tiny_model
from interpreted import Outputs, outputs_of

import converters.branches
from converters.bind import bind_weights
from converters.branches import branch_attention
from converters.flatbuffer import operator_name, pack_model, read_model
from converters.skeleton import trace_skeleton
from hermes.errors import NativeToolError
from hermes.recipe import ExportShapes, GraphOptions, QuantizationRule, Recipe

WIDTHS = (6, 9)
SHAPES = ExportShapes(16, (4,))
IDS = [1, 17, 42, 99, 3, 64, 7, 23, 88, 5, 120, 31]
OPTIONS = GraphOptions(attention_widths=WIDTHS)
CLOSE = 1e-5


class Traced:
    """A model's graph without branches, and its float32 flatbuffers with and without them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config, self.state = tiny_model(2, extras=False, tied=True)
        self.recipe = Recipe("x", quantization=(QuantizationRule("*", "float32"),))
        self.recipe = replace(self.recipe, export=SHAPES, graph=OPTIONS)
        trace_skeleton(self.config, SHAPES, OPTIONS, folder / "plain.tflite")
        self.expected = self.run("plain")

    def branched(self, name: str = "branched", options: GraphOptions = OPTIONS) -> Path:
        path = self.folder / f"{name}.tflite"
        path.write_bytes((self.folder / "plain.tflite").read_bytes())
        branch_attention(path, SHAPES, options)
        return path

    def run(self, name: str) -> Outputs:
        """Prefill three tokens, decode nine: positions on both sides of every width."""
        bound = self.folder / f"{name}.bound.tflite"
        skeleton = self.folder / f"{name}.tflite"
        bind_weights(skeleton, self.config, self.recipe, lazy(self.state), bound)
        return outputs_of(bound, IDS, 4)

    def worst(self, outputs: Outputs) -> float:
        """Largest difference of the logits and of the written cache rows."""
        gaps = [
            np.abs(one["logits"] - two["logits"]).max()
            for one, two in zip(outputs, self.expected, strict=True)
            if "logits" in one
        ]
        keys = [out["kv_cache_k_1"][..., : len(IDS)] for out in (outputs[-1], self.expected[-1])]
        return float(max(*gaps, np.abs(keys[0] - keys[1]).max()))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return Traced(tmp_path_factory.mktemp("branches"))


def test_the_same_numbers_at_every_position(traced: Traced) -> None:
    traced.branched()
    assert traced.worst(traced.run("branched")) < CLOSE


def test_a_branch_taken_too_long_is_seen(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one slot too few, the newest key is not looked at."""
    genuine = converters.branches.add_constant

    def late(model: Any, graph: Any, name: str, values: list[int]) -> int:
        moved = [value + 1 for value in values] if ":last_" in name else values
        return genuine(model, graph, name, moved)

    monkeypatch.setattr("converters.branches.add_constant", late)
    traced.branched("late")
    assert traced.worst(traced.run("late")) > 100 * CLOSE


def test_every_attention_is_one_choice_per_width(traced: Traced) -> None:
    """Decode has all widths, a prefill every second one; both have the whole cache."""
    model = read_model(traced.branched("counted"))
    for signature in model.signatureDefs:
        names = [
            operator_name(model, operator)
            for operator in model.subgraphs[signature.subgraphIndex].operators
        ]
        decode, layers = signature.signatureKey == b"decode", traced.config.num_layers
        assert names.count("IF") == (3 * layers if decode else 2 * (layers - 1))
        assert "SOFTMAX" not in names
    assert sorted(g.name.decode() for g in model.subgraphs if b":" in g.name) == [
        "decode:attention_16", "decode:attention_6", "decode:attention_9", "decode:hand_on",
        "prefill_4:attention_16", "prefill_4:attention_9", "prefill_4:hand_on",
    ]  # fmt: skip


@pytest.mark.parametrize("code", ["NOT_EQUAL", "LOGICAL_NOT"])
def test_a_width_that_is_never_taken_is_seen(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Where no condition holds, the queries stand where the attention's result should."""
    genuine = converters.branches._Signature._new

    def broken(self: Any, name: str, options: str, inputs: list[int], output: int) -> Any:
        # What is compared with itself is never different.
        if name == code == "NOT_EQUAL":
            inputs = [inputs[0], inputs[0]]
        if name == code == "LOGICAL_NOT":
            return genuine(self, "NOT_EQUAL", "NotEqual", inputs * 2, output)
        return genuine(self, name, options, inputs, output)

    monkeypatch.setattr("converters.branches._Signature._new", broken)
    traced.branched("never")
    assert traced.worst(traced.run("never")) > 100 * CLOSE


def test_nothing_changes_without_widths(traced: Traced) -> None:
    plain = (traced.folder / "plain.tflite").read_bytes()
    for widths in ((), (16,), (64,)):
        path = traced.branched("same", replace(OPTIONS, attention_widths=widths))
        assert path.read_bytes() == plain


def test_a_signature_longer_than_a_width_skips_it(traced: Traced) -> None:
    widths = (1, 2, 5, 9)
    model = read_model(traced.branched("short", replace(OPTIONS, attention_widths=widths)))
    bodies = [graph.name.decode() for graph in model.subgraphs if b":attention_" in graph.name]
    assert sorted(name.split(":")[1] for name in bodies if name.startswith("prefill")) == [
        "attention_16", "attention_9",
    ]  # fmt: skip
    assert "decode:attention_2" in bodies


def test_another_attention_is_refused(traced: Traced, tmp_path: Path) -> None:
    """A score that something else reads as well cannot move into a branch."""
    path = tmp_path / "read.tflite"
    model = read_model(traced.folder / "plain.tflite")
    (decode,) = [s for s in model.signatureDefs if s.signatureKey == b"decode"]
    graph = model.subgraphs[decode.subgraphIndex]
    (softmax, *_) = [o for o in graph.operators if operator_name(model, o) == "SOFTMAX"]
    graph.outputs = np.array([*graph.outputs, softmax.outputs[0]], dtype=np.int32)
    path.write_bytes(pack_model(model))
    with pytest.raises(NativeToolError, match=r"decode: operators .* are no attention"):
        branch_attention(path, SHAPES, OPTIONS)
