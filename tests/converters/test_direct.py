"""The graph that is written down directly is the one that torch.export leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from graph_models import tiny_model
from same_graphs import graph_differences, operator_counts
from torch import Tensor

from converters.direct import record_skeleton
from converters.graph import make_graph
from converters.skeleton import trace_skeleton
from converters.stablehlo import NoRuleError, Recorder
from converters.stablehlo_rules import RULES
from hermes.config import HermesConfig
from hermes.recipe import ExportShapes, GraphOptions

SHAPES = ExportShapes(16, (2, 4, 16))
CASES = {
    # The form that the default recipe exports.
    "fused": (False, False, {}, GraphOptions(norm_gains=False)),
    # Biases everywhere, query and key norms, a layer without positions, a matmul per projection.
    "extras": (True, True, {"no_rope_layers": (1,)}, GraphOptions(False, False)),
}


@pytest.fixture(scope="module", params=CASES)
def official(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[HermesConfig, GraphOptions, Path]:
    """A small model and its graph by torch.export."""
    extras, tied, changes, options = CASES[request.param]
    config = replace(tiny_model(2, extras=extras, tied=tied)[0], **changes)
    path = tmp_path_factory.mktemp(request.param) / "official.tflite"
    trace_skeleton(config, SHAPES, options, path)
    return config, options, path


def test_operator_for_operator(
    official: tuple[HermesConfig, GraphOptions, Path], tmp_path: Path
) -> None:
    config, options, path = official
    direct = tmp_path / "direct.tflite"
    record_skeleton(config, SHAPES, options, direct)
    assert graph_differences(direct, path) == []
    assert min(operator_counts(direct).values()) > 60
    again = tmp_path / "again.tflite"
    record_skeleton(config, SHAPES, options, again)
    assert again.read_bytes() == direct.read_bytes()


def test_a_wrong_rule_is_seen(
    official: tuple[HermesConfig, GraphOptions, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, options, path = official
    for rule, wrong in (("add", "mul"), ("mul", "add")):
        with monkeypatch.context() as patch:
            patch.setitem(RULES, rule, RULES[wrong])
            record_skeleton(config, SHAPES, options, tmp_path / "wrong.tflite")
        assert graph_differences(tmp_path / "wrong.tflite", path)


def test_a_function_without_a_rule_takes_the_official_way(
    official: tuple[HermesConfig, GraphOptions, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, options, path = official
    monkeypatch.delitem(RULES, "softmax")
    reasons = make_graph(config, SHAPES, options, tmp_path / "graph.tflite")
    assert reasons.tracer == "torch function softmax"
    assert graph_differences(tmp_path / "graph.tflite", path) == []


OUTSIDE = torch.empty(3, 4, device="meta")


@pytest.mark.parametrize(
    ("why", "compute"),
    [
        ("torch function sin", lambda x: x.sin()),
        ("slices with a step", lambda x: x[:, ::2]),
        ("an index of type", lambda x: x[x]),
        ("another axis than the last", lambda x: x.mean(0, keepdim=True)),
        ("another axis than the last", lambda x: torch.softmax(x, dim=0)),
        ("made outside the module", lambda x: x + OUTSIDE),
        ("a linear layer on 3 axes", lambda x: F.linear(x.view(3, 2, 2), x.view(6, 2))),
    ],
)
def test_what_has_no_rule_is_refused_by_name(why: str, compute: Callable[[Tensor], Tensor]) -> None:
    x = torch.empty(3, 4, device="meta")
    with pytest.raises(NoRuleError, match=why), Recorder("test", [x], {}, RULES):
        compute(x)
