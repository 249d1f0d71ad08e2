"""`hermes verify` on bundles of other exporters: red where they are wrong, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from foreign_exports import FORMS, write_foreign
from small_checkpoints import small_model, write_checkpoint, write_recipe
from tiny_bundle import train_sentencepiece, write_bundle

from converters.proof import FOREIGN
from converters.source import SourceOptions, open_source
from hermes.assets import assets_folder
from hermes.cli import app, run_command

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
FORM = FORMS["bool mask, other names, rows first"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model whose template prints the start token."""
    folder = write_checkpoint(tmp_path_factory.mktemp("foreign") / "chat", *small_model())
    settings = {"add_bos_token": True, "bos_token": "<s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.model").write_bytes(train_sentencepiece())
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Path:
    config, weights = small_model()
    return write_foreign(weights, config, checkpoint.parent / "right.tflite", FORM)


def verify(
    bundle: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], wanted: int
) -> dict[str, Any]:
    recipe = write_recipe(bundle.parent / "small.toml")
    arguments = [str(bundle), "--against", str(checkpoint), "--recipe", str(recipe), "--json"]
    assert run_command(app, ["verify", *arguments]) == wanted
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


def red(report: dict[str, Any]) -> set[str]:
    return {check["name"].split(" for ")[0] for check in report["checks"] if not check["passed"]}


def test_a_right_bundle_is_green(
    model: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = open_source(SourceOptions(checkpoint)).contract.chat_template
    texts = {"stop_ids": (), "stop_texts": ["</s>"], "template": template}
    bundle = write_bundle(model, tmp_path / "right.litertlm", **texts)  # type: ignore[arg-type]
    report = verify(bundle, checkpoint, capsys, 0)
    assert red(report) == set()
    assert {check["rung"] for check in report["checks"]} == {0, 5, 6, 7}
    for rung in "234":
        assert report["skipped"][rung].endswith(FOREIGN)
    assert report["facts"]["limits"]["prefill lengths"] == [8]


def test_stock_template_and_start_token_are_red_and_nothing_else(
    model: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_bundle(model, tmp_path / "stock.litertlm", start_text="<s>", template=TEMPLATE)
    report = verify(bundle, checkpoint, capsys, 6)
    assert report["first_red_rung"] == 6
    assert red(report) == {
        "start token as in training",
        "conversations rendered differently",
        "tokens fed",
        "the chat template renders",
    }


def test_stop_tokens_too_few_and_too_many(
    model: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = open_source(SourceOptions(checkpoint)).contract.chat_template
    bundle = write_bundle(model, tmp_path / "s.litertlm", stop_ids=[90], template=template)
    report = verify(bundle, checkpoint, capsys, 6)
    assert {
        "stop tokens the runtime does not know",
        "stop tokens that training does not know",
    } <= red(report)


@pytest.mark.parametrize("place", ["decode", "prefill"])
def test_a_wrong_cache_is_rung_5(
    place: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In prefill alone it leaves every figure of the stepwise comparison untouched."""
    config, weights = small_model()
    faults = {"decode": ("cache offset", None), "prefill": ("none", "cache not written")}
    own, filled = faults[place]
    path = tmp_path / "wrong.tflite"
    wrong = write_foreign(weights, config, path, FORM, fault=own, prefill_fault=filled)  # type: ignore[arg-type]
    template = open_source(SourceOptions(checkpoint)).contract.chat_template
    report = verify(
        write_bundle(wrong, tmp_path / "wrong.litertlm", template=template), checkpoint, capsys, 6
    )
    assert report["first_red_rung"] == 5
    names = {check["name"] for check in report["checks"] if not check["passed"]}
    assert any(name.startswith("prefill = steps") for name in names) == (place == "prefill")
    assert any(name.startswith("mean KL") for name in names) == (place == "decode")


OFFICIAL = os.environ.get("HERMES_OFFICIAL_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(not OFFICIAL, reason="HERMES_OFFICIAL_PYTHON names no exporter's Python")
def test_the_official_exporters_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model through `litert_torch.generative.export_hf`, from transformers' folder."""
    folder, output = tmp_path / "hf", tmp_path / "out"
    assert run_command(app, ["export-hf", str(assets_folder() / "tiny"), "-o", str(folder)]) == 0
    command = [str(OFFICIAL), "-m", "litert_torch.generative.export_hf", str(folder), str(output)]
    subprocess.run([*command, "--cache_length=512"], check=True, capture_output=True, timeout=1200)
    capsys.readouterr()
    arguments = [str(output / "model.litertlm"), "--against", str(folder), "--json"]
    code = run_command(app, ["verify", *arguments, "--recipe", "int8-plain"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    checked = {check["rung"] for check in report["checks"]}
    assert checked == {0, 5, 6, 7}
    assert not [check for check in report["checks"] if check["rung"] < 6 and not check["passed"]]
    assert code in (0, 6)
