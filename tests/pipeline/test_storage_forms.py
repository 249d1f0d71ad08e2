"""Every stored form in the real interpreter: what it does is what a simulation of it predicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import converters.quantize
from converters.evaluation import Evaluator, evaluation_texts
from converters.proof import text_ids
from converters.quantize import quantize_rows, restored_rows
from converters.simulation import QuantizedTwin
from converters.source import Source, SourceOptions, open_source, recipe_for, rewrite_source
from hermes.assets import assets_folder
from hermes.cli import app, run_command
from hermes.recipe import QuantizationRule
from hermes.recipe_file import load_recipe

POSITIONS = 128
CHECKPOINT = assets_folder() / "tiny"
FORMS = ("int8", "int8-plain", "int8-weight-only", "int4", "fp16")


@pytest.fixture(scope="module")
def source() -> Source:
    return open_source(SourceOptions(CHECKPOINT))


@pytest.fixture(scope="module")
def evaluator(source: Source) -> Evaluator:
    return Evaluator(source, evaluation_texts(None)[:1], POSITIONS)


def convert(recipe: str, target: Path) -> Path:
    arguments = [str(CHECKPOINT), "-o", str(target), "--recipe", recipe, "--no-verify", "--force"]
    assert run_command(app, ["convert", *arguments]) == 0
    return target


def predicted_kl(source: Source, recipe: str) -> float:
    chosen = recipe_for(recipe, source.mapped, None, ())
    twin = QuantizedTwin(rewrite_source(source, chosen), chosen.calibration.directions)
    ids = [text_ids(source, evaluation_texts(None)[0], POSITIONS)]
    wanted = list(twin.log_probabilities(ids))
    names = [name for name, shape in _shapes(twin).items() if len(shape) == 2]
    with twin.quantized({name: chosen.rule_for(name) for name in names}):
        return twin.divergence(wanted, ids).kl


def _shapes(twin: QuantizedTwin) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in twin.weights.items()}


@pytest.mark.parametrize("recipe", FORMS)
def test_the_file_does_what_the_simulation_does(
    recipe: str, source: Source, evaluator: Evaluator, tmp_path: Path
) -> None:
    measured = evaluator.evaluate(convert(recipe, tmp_path / "m.litertlm"), threads=1)[0]
    predicted = predicted_kl(source, recipe)
    assert measured.positions == POSITIONS
    assert measured.kl == pytest.approx(predicted, rel=0.15, abs=1e-6)
    assert measured.kl < load_recipe(recipe).limits.kl_mean


def test_swapped_halves_of_a_byte_are_seen(
    source: Source, evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = converters.quantize._packed

    def swapped(integers: np.ndarray, rule: QuantizationRule) -> bytes:
        data = np.frombuffer(packed(integers, rule), np.uint8)
        return data.tobytes() if rule.weights == "int8" else (data >> 4 | data << 4).tobytes()

    good = evaluator.evaluate(convert("int4", tmp_path / "good.litertlm"), threads=1)[0].kl
    monkeypatch.setattr(converters.quantize, "_packed", swapped)
    bad = evaluator.evaluate(convert("int4", tmp_path / "bad.litertlm"), threads=1)[0].kl
    assert bad > 10 * good


def test_the_default_recipe_keeps_much_more_than_the_plain_one(
    evaluator: Evaluator, tmp_path: Path
) -> None:
    kls = {}
    for recipe in ("int8", "int8-plain"):
        bundle = convert(recipe, tmp_path / f"{recipe}.litertlm")
        kls[recipe] = evaluator.evaluate(bundle, threads=1)[0].kl
    assert kls["int8"] < 0.6 * kls["int8-plain"]


@pytest.mark.parametrize(
    "rule",
    [
        QuantizationRule("*", "float16"),
        QuantizationRule("*", "int8", "channel"),
        QuantizationRule("*", "int8", "tensor"),
        QuantizationRule("*", "int4", "channel"),
        QuantizationRule("*", "int4", "block32"),
    ],
)
def test_restored_rows_are_the_stored_ones(rule: QuantizationRule) -> None:
    rows = np.random.default_rng(1).standard_normal((24, 96)).astype(np.float32)
    rows[3] = 0
    stored = quantize_rows(rows, rule, float(np.abs(rows).max()))
    restored = restored_rows(stored, rule, rows.shape)
    step = {"float16": 2**-11, "int8": 1 / 127, "int4": 1 / 7}[rule.weights] * np.abs(rows).max()
    assert np.abs(restored - rows).max() <= step
    assert len(stored.data) == rule.value_bytes(rows.size)
    if rule.integer and rule.granularity != "tensor":
        assert stored.scales is not None
        assert stored.scales.nbytes == rule.scale_bytes(*rows.shape)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[quantization]]\ntensors = "*"\nweights = "float16"\n', "is looked up by token"),
        (
            '[[quantization]]\ntensors = "embed*"\n[[quantization]]\ntensors = "*.k_proj*"\n'
            'weights = "int4"\n[[quantization]]\ntensors = "*"\n',
            "gets different rules",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, target = tmp_path / "own.toml", tmp_path / "m.litertlm"
    recipe.write_text(text)
    arguments = [str(CHECKPOINT), "-o", str(target), "--recipe", str(recipe), "--no-verify"]
    assert run_command(app, ["convert", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["own.toml"]


@contextmanager
def tuned(tmp_path: Path, *budget: str) -> Iterator[Path]:
    target = tmp_path / "tuned.toml"
    arguments = [str(CHECKPOINT), "-o", str(target), *budget, "--positions", "128", "--json"]
    assert run_command(app, ["tune", *arguments]) == 0
    yield target


def test_tune_to_a_size(
    tmp_path: Path, evaluator: Evaluator, capsys: pytest.CaptureFixture[str]
) -> None:
    with tuned(tmp_path, "--bytes", "1.6MB") as recipe:
        facts = json.loads(capsys.readouterr().out)
    assert facts["bytes"] <= 1_600_000 < facts["base_bytes"]
    assert facts["changed"]
    assert "calibration.txt" in load_recipe(recipe).description
    small = convert(str(recipe), tmp_path / "small.litertlm")
    smallest = convert("int4", tmp_path / "smallest.litertlm")
    large = convert("int8", tmp_path / "large.litertlm")
    sizes = [path.stat().st_size for path in (smallest, small, large)]
    assert sizes == sorted(sizes)
    kls = [evaluator.evaluate(path, threads=1)[0].kl for path in (smallest, small, large)]
    assert kls == sorted(kls, reverse=True)


def test_tune_to_a_divergence(
    tmp_path: Path, evaluator: Evaluator, capsys: pytest.CaptureFixture[str]
) -> None:
    with tuned(tmp_path, "--budget", "KL=0.03") as recipe:
        facts = json.loads(capsys.readouterr().out)
    assert facts["base_kl"] < facts["kl"] <= 0.03
    bundle = convert(str(recipe), tmp_path / "m.litertlm")
    # Another text than the one that was tuned on.
    assert evaluator.evaluate(bundle, threads=1)[0].kl < 0.06


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (("--budget", "KL=1e-9"), "no assignment has a mean KL"),
        (("--bytes", "1kB"), "no assignment has 1,000 bytes"),
        (("--budget", "0.1"), "expected: --budget KL=0.01"),
        ((), "no budget"),
        (("--budget", "KL=1", "--bytes", "1MB"), "expected: one of"),
    ],
)
def test_a_budget_that_cannot_be_met_or_read(
    budget: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "tuned.toml"
    arguments = [str(CHECKPOINT), "-o", str(target), *budget, "--positions", "64"]
    assert run_command(app, ["tune", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
