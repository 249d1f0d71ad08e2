"""`hermes convert` from a checkpoint folder to a published bundle, with the real tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_checkpoints import small_model, write_checkpoint, write_recipe
from tiny_llama import reference_greedy

from converters.bundle import read_bundle
from converters.seal import REPORT_KEY, hash_file, seal
from hermes.cli import app, run_command
from hermes.deploy.card import CARD_KEY, read_card, read_inside
from hermes.report.check import Report
from hermes.report.comparison import UNVERIFIED, fingerprint
from hermes.runners.litert_lm import LiteRtLmRunner

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), *small_model())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe") / "small.toml")


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundle") / "small.litertlm"
    arguments = [str(checkpoint), "-o", str(target), "--recipe", str(recipe)]
    assert run_command(app, ["convert", *arguments, "--report", str(target.parent / "report")]) == 0
    return target


def test_every_rung_is_in_the_report(bundle: Path) -> None:
    report = json.loads((bundle.parent / "report" / "report.json").read_text())
    assert report["passed"]
    assert {check["rung"] for check in report["checks"]} == {0, 2, 3, 4, 5, 6, 7}
    assert report["facts"]["graph"]["made"] in ("kept", "traced")
    names = {path.name for path in bundle.parent.iterdir()}
    assert names == {"small.litertlm", "small.litertlm.card.json", "report"}


def test_the_export_card_inside_and_beside(
    bundle: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(app, ["check", str(bundle), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["proven"]
    inner, outer = facts["inside"], facts["beside"]
    assert inner["verdict"].startswith("PASSED")
    assert inner["inputs"]["model.safetensors"] == hash_file(checkpoint / "model.safetensors")
    assert inner["context"] == 64
    assert inner["prefill"] == [1, 8]
    assert inner["model"]["num_layers"] == 2
    assert inner.items() <= outer.items()
    assert outer["sha256"] == hash_file(bundle)
    assert outer["digest"] == facts["digest"]
    assert outer["report"] == facts["report"] == read_bundle(bundle).metadata[REPORT_KEY]
    assert [entry["sha256"] for entry in outer["sections"]] == [
        section.sha256 for section in read_bundle(bundle).sections
    ]
    assert any("KL" in name for name in outer["measured"])


def test_runtime_says_what_an_independent_model_says(bundle: Path) -> None:
    config, weights = small_model()
    with LiteRtLmRunner(bundle) as runtime:
        prompt = "the cat"
        answer = runtime.generate(prompt, 8)
        ids = [1, *runtime.tokenize(prompt)]
        wanted = reference_greedy(weights, config, ids, 8)
        assert answer.prompt_tokens == len(ids)
        # int8 may flip a near tie later on; the float64 model decides the beginning.
        assert answer.text.startswith(runtime.detokenize(wanted[:3]))


def test_same_inputs_give_the_same_bytes(bundle: Path, checkpoint: Path, recipe: Path) -> None:
    again = bundle.with_name("again.litertlm")
    arguments = [str(checkpoint), "-o", str(again), "--recipe", str(recipe), "--no-verify"]
    assert run_command(app, ["convert", *arguments]) == 0
    assert read_bundle(again).metadata[REPORT_KEY] == UNVERIFIED
    assert (
        read_card(again)["verdict"] == read_inside(read_bundle(again).metadata[CARD_KEY])["verdict"]
    )
    assert "NOT VERIFIED" in read_card(again)["verdict"]
    report = Report.read(bundle.parent / "report" / "report.json")
    seal(again, report)
    assert again.read_bytes() == bundle.read_bytes()
    again.unlink()


def test_existing_target_is_kept_without_force(
    bundle: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bundle.read_bytes()
    assert run_command(app, ["convert", str(checkpoint), "-o", str(bundle)]) == 8
    assert bundle.read_bytes() == before
    assert "--force" in capsys.readouterr().err


def test_bundle_metadata(bundle: Path) -> None:
    prompt = read_bundle(bundle).prompt
    assert prompt.start_token_id == 1
    assert prompt.stop_token_ids == (2,)
    assert prompt.max_num_tokens == 64


def test_inspect_shows_signatures_and_storage(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(app, ["inspect", str(bundle), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    (model,) = facts["models"]
    assert [signature["name"] for signature in model["signatures"]] == [
        "prefill_1",
        "prefill_8",
        "decode",
    ]
    # Embedding and head, and four fused matrices in each of two layers.
    assert model["constants"]["int8 per channel"]["tensors"] == 2 + 2 * 4


def test_verify_accepts_its_own_bundle_and_refuses_another_models(
    bundle: Path,
    checkpoint: Path,
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--recipe", str(recipe), "--json"]
    report = bundle.parent / "report" / "report.json"
    mark = read_bundle(bundle).metadata[REPORT_KEY]
    assert mark == fingerprint(Report.read(report))
    repeated = [*arguments, "--report", str(report), "--localise"]
    assert run_command(app, ["verify", str(bundle), "--against", str(checkpoint), *repeated]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])["facts"]
    assert facts["command"].startswith("hermes verify ")
    assert facts["inputs"]["model.safetensors"] == hash_file(checkpoint / "model.safetensors")
    assert facts["transcript"]["1"]["float_answer"]
    values = json.loads(report.read_text())
    values["checks"][-1]["name"] += " of something else"
    forged = tmp_path / "forged.json"
    forged.write_text(json.dumps(values))
    repeated = [*arguments, "--report", str(forged)]
    assert run_command(app, ["verify", str(bundle), "--against", str(checkpoint), *repeated]) == 6
    message = capsys.readouterr().err
    assert "was made and is not any more" in message
    config, weights = small_model()
    weights["model.layers.1.mlp.up_proj.weight"] = -weights["model.layers.1.mlp.up_proj.weight"]
    other = write_checkpoint(tmp_path / "other", config, weights)
    assert run_command(app, ["verify", str(bundle), "--against", str(other), *arguments]) == 6


def test_json_is_the_last_line(
    bundle: Path, checkpoint: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = bundle.with_name("json.litertlm")
    arguments = [str(checkpoint), "-o", str(target), "--recipe", str(recipe), "--no-verify"]
    assert run_command(app, ["convert", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["facts"]["unverified"]
    target.unlink()


def test_script_is_the_same_command(checkpoint: Path, recipe: Path, tmp_path: Path) -> None:
    target = tmp_path / "script.litertlm"
    script = ROOT / "scripts" / "convert_to_litertlm.py"
    arguments = [str(checkpoint), "-o", str(target), "--recipe", str(recipe), "--no-verify"]
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "NOT VERIFIED" in done.stdout + done.stderr
    assert target.is_file()


BAD_INPUTS = {
    "no such checkpoint": (lambda folder: folder / "absent.pt", 3),
    "not a checkpoint": (lambda folder: _file(folder / "text.pt", b"hello"), 3),
    "empty file": (lambda folder: _file(folder / "empty.safetensors", b""), 3),
    "no config": (lambda folder: _bare(folder / "bare.pt"), 3),
    "mixture of experts": (lambda folder: _changed(folder, num_local_experts=8), 4),
    "unknown activation": (lambda folder: _changed(folder, hidden_act="gelu"), 4),
    "short window": (lambda folder: _changed(folder, model_type="mistral", sliding_window=8), 4),
    "NaN": (lambda folder: _broken(folder, float("nan")), 3),
}


def _file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _bare(path: Path) -> Path:
    torch.save(small_model()[1], path)
    return path


def _changed(folder: Path, **fields: object) -> Path:
    config, weights = small_model()
    return write_checkpoint(folder / "changed", {**config, **fields}, weights)


def _broken(folder: Path, value: float) -> Path:
    config, weights = small_model()
    weights["model.layers.1.self_attn.o_proj.weight"][3, 5] = value
    return write_checkpoint(folder / "broken", config, weights)


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_leaves_nothing_behind(
    name: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, code = BAD_INPUTS[name]
    source = tmp_path / "in"
    source.mkdir()
    output = tmp_path / "out"
    output.mkdir()
    target = output / "model.litertlm"
    target.write_bytes(b"the old bundle")
    arguments = [str(make(source)), "-o", str(target), "--recipe", str(recipe), "--force"]
    assert run_command(app, ["convert", *arguments]) == code
    assert os.listdir(output) == ["model.litertlm"]
    assert target.read_bytes() == b"the old bundle"
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1


def test_nan_is_named_with_tensor_and_index(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _broken(tmp_path, float("inf"))
    target = tmp_path / "model.litertlm"
    arguments = [str(source), "-o", str(target), "--recipe", str(recipe)]
    assert run_command(app, ["convert", *arguments]) == 3
    message = capsys.readouterr().err
    assert "layers.1.self_attn.o_proj" in message
    assert "[3, 5]" in message


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--context", "65"], 2),
        (["--prefill", "4096"], 2),
        (["--recipe", "no-such-recipe"], 2),
        (["--layout", "no-such-layout"], 2),
        (["--config", "absent.json"], 3),
        (["--tokenizer", "absent.json"], 3),
        (["--no-such-option"], 2),
    ],
)
def test_usage_errors(arguments: list[str], code: int, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.litertlm"
    assert run_command(app, ["convert", str(checkpoint), "-o", str(target), *arguments]) == code
    assert os.listdir(tmp_path) == []


def test_output_must_have_the_runtimes_suffix(checkpoint: Path, tmp_path: Path) -> None:
    assert run_command(app, ["convert", str(checkpoint), "-o", str(tmp_path / "model.bin")]) == 2
