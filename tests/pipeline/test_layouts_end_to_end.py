"""Each seed codebase's checkpoint as a bundle: LiteRT-LM says what the codebase's formulas say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_styles import STYLES, Oracle, Style
from small_checkpoints import PLAIN, write_recipe

from converters.bundle import extract_section, read_bundle
from converters.pipeline import ConvertOptions, convert
from converters.source import SourceOptions
from hermes.cli import app, run_command
from hermes.recipe_file import load_recipe
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.verify.quantized import check_quantized

PROMPTS = ["the cat", "a quick brown fox jumps over", "how vexingly quick daft zebras"]
NEW_TOKENS = 12
TIE = 1.0
"""int8 may decide otherwise where the best logit leads by less; their deviation is about 9."""


def bundle_of(style: Style, recipe: Path, folder: Path) -> Path:
    """Converted without the ladder: this file has its own comparison."""
    checkpoint = style.write(folder / "in")
    target = folder / "model.litertlm"
    options = ConvertOptions(SourceOptions(checkpoint), target, recipe=str(recipe), verify=False)
    report = convert(options)
    assert report.facts["layout"]["name"] == style.layout
    return target


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_greedy_tokens_in_the_runtime_are_the_codebases(
    name: str, kind: str, tmp_path: Path
) -> None:
    style, recipe = STYLES[name], tmp_path / "small.toml"
    if kind == "int8":
        write_recipe(recipe)
    else:
        recipe.write_text(PLAIN)
    bundle = bundle_of(style, recipe, tmp_path)
    compared = 0
    with LiteRtLmRunner(bundle) as runtime:
        for prompt in PROMPTS:
            ids = [1, *runtime.tokenize(prompt)]
            wanted, leads = style.greedy(ids, NEW_TOKENS)
            assert 2 not in wanted
            clear = NEW_TOKENS
            if kind == "int8":
                clear = next((step for step, lead in enumerate(leads) if lead < TIE), NEW_TOKENS)
            answer = runtime.generate(prompt, clear or 1)
            if clear:
                assert answer.text == runtime.detokenize(wanted[:clear])
            compared += clear
    assert compared >= len(PROMPTS) * NEW_TOKENS * (1.0 if kind == "float32" else 0.5)
    opened, model = read_bundle(bundle), tmp_path / "model.tflite"
    extract_section(opened, opened.section("TFLiteModel"), model)
    text = np.random.default_rng(0).integers(3, 128, 256).tolist()
    with FlatbufferRunner(model) as flatbuffer:
        result = check_quantized(Oracle(style), flatbuffer, text, load_recipe(str(recipe)).limits)
    assert [check for check in result.checks if not check.passed] == []


@pytest.mark.parametrize("fault", ["gate and up", "kv grouping"])
def test_planted_faults_are_caught_by_golden_logits(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training code's logits, and a file whose tensors are in each other's place."""
    style = STYLES["interleaved"]
    weights = style.weights()
    ids = list(range(1, 40))
    golden = tmp_path / "golden.npz"
    np.savez(golden, input_ids=np.array(ids), logits=style.logits(weights, ids).float().numpy())
    for layer in range(2):
        if fault == "gate and up":
            one, two = (f"layers.{layer}.feed_forward.{part}.weight" for part in ("gate", "up"))
            weights[one], weights[two] = weights[two], weights[one]
        else:
            # Query heads 0, 1 | 2, 3 share a key head each; read as 0, 2 | 1, 3.
            name = f"layers.{layer}.attention.q_proj.weight"
            weights[name] = weights[name].view(2, 2, 16, 64).transpose(0, 1).reshape(64, 64)
            name = f"layers.{layer}.attention.o_proj.weight"
            columns = weights[name].view(64, 2, 2, 16).transpose(1, 2)
            weights[name] = columns.reshape(64, 64)
    checkpoint = style.write(tmp_path / "in", weights)
    recipe = write_recipe(tmp_path / "small.toml")
    target = tmp_path / "out" / "model.litertlm"
    target.parent.mkdir()
    arguments = [str(checkpoint), "-o", str(target), "--recipe", str(recipe), "--json"]
    assert run_command(app, ["convert", *arguments, "--golden", str(golden)]) == 6
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {check["rung"] for check in report["checks"] if not check["passed"]} == {1}
    assert list(target.parent.iterdir()) == []


def test_a_context_past_nanovlms_maximum_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = STYLES["nanovlm with cache"].write(tmp_path / "in")
    recipe, target = write_recipe(tmp_path / "small.toml"), tmp_path / "model.litertlm"
    arguments = [str(checkpoint), "-o", str(target), "--recipe", str(recipe), "--context", "65"]
    assert run_command(app, ["convert", *arguments]) == 2
    message = capsys.readouterr().err
    assert "65 is longer than the 64 positions" in message
    assert "divides all rotary frequencies anew" in message


def test_b14_the_terminal_warns_and_lists_what_was_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration says tied, the file holds another head and a loss buffer."""
    style = STYLES["smollm2 from scratch"]
    weights = style.weights()
    weights["lm_head.weight"] = weights["embed_tokens.weight"].flip(0)
    weights["criterion.weight"] = weights["norm.weight"]
    checkpoint = style.write(tmp_path / "in", weights)
    recipe, target = write_recipe(tmp_path / "small.toml"), tmp_path / "model.litertlm"
    arguments = [str(checkpoint), "-o", str(target), "--recipe", str(recipe), "--no-verify"]
    assert run_command(app, ["convert", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("warning:") and "stored head is used" in line for line in lines)
    assert any(line.startswith("ignored criterion.weight: part of the loss") for line in lines)
