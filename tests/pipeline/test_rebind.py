"""The float form that rung 4 runs is the bundle's own graph with float weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted_faults import World, build_world

from converters.bind import bind_weights
from converters.flatbuffer import operator_name, read_model
from converters.float_models import reference_model
from converters.rebind import rebind_floats
from hermes.errors import BadInputError
from hermes.recipe import QuantizationRule
from hermes.runners.flatbuffer import FlatbufferRunner


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


def logits(path: Path, ids: list[int]) -> np.ndarray:
    with FlatbufferRunner(path) as runner:
        runner.reset()
        runner.prefill(ids[:5], 0, 8)
        return np.stack([runner.step(token, 5 + index) for index, token in enumerate(ids[5:])])


def test_the_same_as_a_graph_bound_with_floats(world: World, tmp_path: Path) -> None:
    config, graph = world.rewritten.config, world.recipe.graph
    state = reference_model(config, world.rewritten.weights).state_dict()
    rebound, bound = tmp_path / "rebound.tflite", tmp_path / "bound.tflite"
    rebind_floats(world.model, config, graph, state, rebound)
    plain = replace(world.recipe, quantization=(QuantizationRule("*", "float32"),))
    bind_weights(world.graph.path, config, plain, world.rewritten.weights, bound)
    ids = world.text()[:20]
    assert (logits(rebound, ids) == logits(bound, ids)).all()
    assert np.abs(logits(rebound, ids) - logits(world.model, ids)).max() > 1e-3


def test_operators_are_the_bundles_own(world: World, tmp_path: Path) -> None:
    config, graph = world.rewritten.config, world.recipe.graph
    state = reference_model(config, world.rewritten.weights).state_dict()
    rebind_floats(world.model, config, graph, state, tmp_path / "f.tflite")
    found = [
        [
            [operator_name(model, operator) for operator in part.operators]
            for part in model.subgraphs
        ]
        for model in (read_model(world.model), read_model(tmp_path / "f.tflite"))
    ]
    assert found[0] == found[1]


def test_another_models_graph_is_refused(world: World, tmp_path: Path) -> None:
    config = replace(world.rewritten.config, num_layers=world.rewritten.config.num_layers + 1)
    with pytest.raises(BadInputError, match="not the graph of this model") as caught:
        rebind_floats(world.model, config, world.recipe.graph, {}, tmp_path / "f.tflite")
    assert any("is missing" in problem for problem in caught.value.problems)
