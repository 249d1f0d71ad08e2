"""Recipes: the shipped ones load, mistakes are named together, the first rule wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes.config import HermesConfig
from hermes.errors import UsageError
from hermes.parameters import parameter_shapes
from hermes.recipe import ExportShapes, QuantizationRule, Recipe
from hermes.recipe_file import load_recipe, parse_recipe, recipe_names, write_recipe

NAMES = list(parameter_shapes(HermesConfig(num_layers=2)))


def parsed(**values: Any) -> Recipe:
    return parse_recipe(values, "own.toml", default_name="own")


def test_the_shipped_recipes_load() -> None:
    assert {"int8", "float32"} <= set(recipe_names())
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.description
        tied = "fold_norm_gains" not in recipe.rewrites
        recipe.check_rules(parameter_shapes(HermesConfig(num_layers=2, tie_embeddings=tied)))
        json.dumps(recipe.to_dict())


def test_what_the_shipped_recipes_store() -> None:
    int8, float32 = load_recipe("int8"), load_recipe("float32")
    for name in NAMES:
        rule = int8.rule_for(name)
        assert (rule.weights, rule.granularity) == ("int8", "channel")
        assert rule.rounding == "calibrated"
        assert float32.rule_for(name).weights == "float32"
    assert int8.export.context == 1280
    assert 1 in int8.export.prefill  # or the end of the context could not be filled


def test_a_recipe_file_is_read_with_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'description = "d"\n[export]\ncontext = 64\nprefill = [4]\n[graph]\nfuse_qkv = false\n'
        '[[quantization]]\ntensors = "*.mlp.*"\n[limits]\nkl_mean = 1\n'
    )
    recipe = load_recipe(path)
    assert recipe == parsed(
        name="mine",
        description="d",
        export={"context": 64, "prefill": [4]},
        graph={"fuse_qkv": False},
        quantization=[{"tensors": "*.mlp.*"}],
        limits={"kl_mean": 1},
    )
    assert recipe.graph.fuse_gate_up
    assert recipe.quantization[0] == QuantizationRule("*.mlp.*", "int8", "channel")
    assert recipe.limits.kl_mean == 1.0
    assert recipe.limits.top1 == 0.85


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quantisation": []}, ["unknown field quantisation"]),
        ({"name": 5}, ["name is 5", "str"]),
        ({"description": ["a"]}, ["description is ['a']", "str"]),
        ({"export": 5}, ["export is 5", "a table"]),
        ({"export": {"ctx": 5}}, ["unknown field export.ctx"]),
        ({"export": {"context": "64"}}, ["export.context is '64'", "int"]),
        ({"export": {"context": True}}, ["export.context is True", "int"]),
        ({"export": {"context": 64.0}}, ["export.context is 64.0", "int"]),
        ({"export": {"context": 1, "prefill": [1]}}, ["export.context is 1", "2 to"]),
        ({"export": {"context": 64, "prefill": []}}, ["export.prefill is empty"]),
        ({"export": {"context": 64, "prefill": [65]}}, ["export.prefill has 65", "1 to"]),
        ({"export": {"context": 64, "prefill": [0]}}, ["export.prefill has 0", "1 to"]),
        ({"export": {"context": 64, "prefill": [8, 8]}}, ["repeats a length: [8, 8]"]),
        ({"export": {"prefill": 8}}, ["export.prefill is 8", "tuple[int"]),
        ({"export": {"prefill": [8, "x"]}}, ["export.prefill is [8, 'x']"]),
        ({"export": {"prefill": [True]}}, ["export.prefill is [True]"]),
        ({"graph": {"fuse_qkv": 1}}, ["graph.fuse_qkv is 1", "bool"]),
        ({"graph": {"fuse": True}}, ["unknown field graph.fuse"]),
        ({"rewrites": "fold_norm_gains"}, ["rewrites is 'fold_norm_gains'", "a list"]),
        ({"rewrites": [3]}, ["rewrites is [3]", "a list"]),
        ({"quantization": 5}, ["quantization is 5", "[[quantization]]"]),
        ({"quantization": {"tensors": "*"}}, ["quantization is {'tensors'", "[[quantization]]"]),
        ({"quantization": ["*"]}, ["quantization[0] is '*'", "a table"]),
        ({"quantization": [{}]}, ["quantization[0] has no tensors pattern"]),
        ({"quantization": [{"tensors": 3}]}, ["quantization[0].tensors is 3", "str"]),
        (
            {"quantization": [{"tensors": "*"}, {"tensors": "*", "weights": "int3"}]},
            ["quantization[1].weights is 'int3'", "int8 or int4"],
        ),
        (
            {"quantization": [{"tensors": "*", "granularity": "block"}]},
            ["quantization[0].granularity is 'block'", "channel or tensor or block32"],
        ),
        ({"calibration": {"directions": 0}}, ["calibration.directions is 0", "1 to 1024"]),
        ({"limits": {"kl": 0.1}}, ["unknown field limits.kl"]),
        ({"limits": {"kl_mean": "low"}}, ["limits.kl_mean is 'low'", "float"]),
        ({"limits": {"positions": 1.5}}, ["limits.positions is 1.5", "int"]),
        ({"limits": {"positions": 0}}, ["limits.positions is 0"]),
        ({"limits": {"kl_mean": float("nan")}}, ["limits.kl_mean is nan"]),
        ({"limits": {"float_logits": float("inf")}}, ["limits.float_logits is inf"]),
        ({"limits": {"near_tie": -1.0}}, ["limits.near_tie is -1.0"]),
        ({"limits": {"top1": 1.5}}, ["limits.top1 is 1.5"]),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(**values)
    assert caught.value.exit_code == 2
    for word in ["own.toml", *words]:
        assert word in str(caught.value)


def test_all_mistakes_come_together() -> None:
    with pytest.raises(UsageError) as caught:
        parsed(a=1, export={"context": "x"}, graph={"b": 2}, limits=[])
    assert len(caught.value.problems) == 4


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no recipe int5[\s\S]*float32, fp16, int4, int8"):
        load_recipe("int5")
    with pytest.raises(UsageError, match=r"no recipe .*absent\.toml"):
        load_recipe(tmp_path / "absent.toml")
    for content in (b"[export", b"\xff", b"a = 1\na = 2"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(UsageError, match=r"bad\.toml: not valid TOML"):
            load_recipe(tmp_path / "bad.toml")


def test_the_first_matching_rule_wins() -> None:
    rules = (
        QuantizationRule("layers.0.*", "float32"),
        QuantizationRule("*_proj.weight", "int8", "tensor"),
        QuantizationRule("*", "int8", "channel"),
    )
    recipe = Recipe("own", quantization=rules)
    assert recipe.rule_for("layers.0.mlp.up_proj.weight") == rules[0]
    assert recipe.rule_for("layers.1.mlp.up_proj.weight") == rules[1]
    assert recipe.rule_for("embed_tokens.weight") == rules[2]
    assert Recipe("own", quantization=rules[::-1]).rule_for("layers.0.x") == rules[2]
    without = Recipe("own", quantization=rules[:2])
    assert without.rule_for("embed_tokens.weight").weights == "float32"
    assert without.rule_for("LAYERS.0.mlp.x").weights == "float32"  # names have a case


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    rules = [{"tensors": t} for t in ("layers.*.mlp.down.weight", "embed_tokens.weight", "lm_*")]
    with pytest.raises(UsageError) as caught:
        parsed(quantization=rules).check_rules(NAMES)
    message = str(caught.value)
    assert "recipe own" in message
    assert "layers.*.mlp.down.weight, lm_*" in message
    assert "embed_tokens" not in message


def test_shapes_of_the_command_line() -> None:
    recipe = parsed(export={"context": 256, "prefill": [1, 16, 128]})
    assert recipe.with_shapes(None, None) == recipe
    assert recipe.with_shapes(None, ()).export == recipe.export
    # The recipe's own ladder is shortened to fit, one that is asked for is not.
    assert recipe.with_shapes(64, None).export == ExportShapes(64, (1, 16))
    assert recipe.with_shapes(512, [4, 2]).export == ExportShapes(512, (4, 2))
    assert recipe.with_shapes(64, [64]).export == ExportShapes(64, (64,))
    for context, prefill, word in (
        (64, [65], "export.prefill has 65"),
        (64, [0], "export.prefill has 0"),
        (None, [8, 8], "repeats"),
        (1, [1], "export.context is 1"),
        (0, None, "export.context is 0"),
        (2**21, None, "export.context is 2097152"),
    ):
        with pytest.raises(UsageError, match=word):
            recipe.with_shapes(context, prefill)
    with pytest.raises(UsageError, match="empty"):
        parsed(export={"context": 256, "prefill": [128]}).with_shapes(64, None)


def test_a_written_recipe_is_read_back(tmp_path: Path) -> None:
    for name in recipe_names():
        recipe = load_recipe(name)
        write_recipe(recipe, tmp_path / f"{name}.toml")
        assert load_recipe(tmp_path / f"{name}.toml") == recipe
    assert sorted(path.stem for path in tmp_path.iterdir()) == recipe_names()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"weights": "int8", "granularity": "block32"}, "block32 is for int4"),
        ({"weights": "int4", "granularity": "tensor"}, "int4 weights need"),
        ({"weights": "int4", "granularity": "block32", "activations": "float32"}, "block32 is"),
    ],
)
def test_a_combination_without_a_kernel_is_refused(rule: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parsed(quantization=[{"tensors": "*", **rule}])
