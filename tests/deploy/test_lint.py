"""`hermes lint`: every rule has a bundle that breaks it, and our own bundles break none."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import broken_bundles as broken
import pytest
from broken_bundles import JSON, Pieces
from lint_cases import (
    BREAK,
    BREAKS,
    Edit,
    sampling,
    set_field,
    start,
    stop,
    template,
    tokenizer_json,
)

from converters.anatomy import describe
from hermes.cli import app, run_command
from hermes.deploy.lint import all_rules, lint
from hermes.deploy.lint_device import estimate
from hermes.deploy.lint_facts import BundleFacts, SignatureFact, TensorFact
from hermes.recipe_file import recipe_names

ELSEWHERE = {"damaged", "ios-mapping", "play-asset-pack", "play-total", "phone-memory"}
"""Broken by tests of their own below."""


def names(path: Path) -> set[str]:
    return {finding.rule for finding in lint(describe(path))}


@pytest.mark.parametrize("rule", BREAKS)
def test_each_rule_is_broken_by_a_bundle_of_its_own(rule: str, tmp_path: Path) -> None:
    edit, others, options = BREAKS[rule]
    pieces = broken.clean(tmp_path, **options)  # type: ignore[arg-type]
    edit(pieces)
    # The official builder writes no hashes, so this rule does not hold in any of them.
    assert names(broken.write(pieces, tmp_path)) == {rule, "no-hashes"} | others


def test_no_rule_is_without_a_bundle_that_breaks_it() -> None:
    rules = [rule.name for rule in all_rules()]
    assert len(set(rules)) == len(rules) >= 20
    assert set(BREAKS) | ELSEWHERE == set(rules)


@pytest.mark.parametrize(
    ("rule", "edit", "kind"),
    [
        ("stop-token", stop("\u4e2d\u4e2d"), broken.SENTENCEPIECE),
        ("sampler", sampling("TOP_K", 5), broken.SENTENCEPIECE),
        ("sampler", sampling("TOP_P", 0), broken.SENTENCEPIECE),
        ("tokenizer-count", set_field("tokenizers", []), broken.SENTENCEPIECE),
        ("template-engine", template(BREAK), broken.SENTENCEPIECE),
        ("no-model", set_field("raw", b"TFL3 is not here" * 100), broken.SENTENCEPIECE),
        ("tokenizer-cuts", tokenizer_json(padding={
            "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}), JSON),
    ],
)  # fmt: skip
def test_other_ways_to_break_a_rule(rule: str, edit: Edit, kind: str, tmp_path: Path) -> None:
    pieces = broken.clean(tmp_path, kind=kind)
    edit(pieces)
    assert rule in names(broken.write(pieces, tmp_path))


@pytest.mark.parametrize("kind", [broken.SENTENCEPIECE, JSON])
def test_the_clean_bundle_is_clean(kind: str, tmp_path: Path) -> None:
    assert names(broken.write(broken.clean(tmp_path, kind=kind), tmp_path)) == {"no-hashes"}


def test_a_start_token_in_place_of_an_empty_name_is_right(tmp_path: Path) -> None:
    pieces = broken.clean(tmp_path)
    template("{{ bos_token }}{% for m in messages %}{{ m.role }}:" + broken.PARTS)(pieces)
    assert "empty-token-names" in names(broken.write(pieces, tmp_path))
    start(1)(pieces)
    assert names(broken.write(pieces, tmp_path)) == {"no-hashes"}


@pytest.mark.parametrize("recipe", recipe_names())
def test_no_false_alarm_on_our_own(
    recipe: str, converted: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(app, ["lint", str(converted(recipe))]) == 0
    shown = capsys.readouterr().out
    assert f"no findings: {len(all_rules())} rules hold" in shown
    assert "on the device, estimated" in shown


@pytest.mark.parametrize(
    ("recipe", "unpacked"), [("int8", False), ("int8-weight-only", True), ("fp16", True)]
)
def test_what_the_runtime_unpacks_counts_as_float32(
    recipe: str, unpacked: bool, converted: Callable[[str], Path]
) -> None:
    facts = describe(converted(recipe))
    products = [one for one in facts.constants if one.operator == "FULLY_CONNECTED"]
    assert any(one.unpacked for one in products) == unpacked
    values = sum(math.prod(one.shape) for one in products)
    assert (estimate(facts).weight_cache >= 4 * values) == unpacked


def test_a_damaged_bundle_of_ours(embedded: Path, tmp_path: Path) -> None:
    target = tmp_path / "bent.litertlm"
    data = bytearray(embedded.read_bytes())
    data[-5] ^= 1
    target.write_bytes(data)
    assert names(target) == {"damaged"}


def test_a_file_too_large_for_phones_and_shops(tmp_path: Path) -> None:
    pieces = broken.clean(tmp_path)
    pieces.after.append(lambda path: broken.move_last_section(path, grow=4_100_000_000))
    found = names(broken.write(pieces, tmp_path))
    assert found == {
        "ios-mapping",
        "play-asset-pack",
        "play-total",
        "phone-memory",
        "no-hashes",
    }
    pieces.after = [lambda path: broken.move_last_section(path, grow=900_000_000)]
    assert names(broken.write(pieces, tmp_path)) == {"no-hashes"}


def test_what_repeats_in_every_layer_is_counted() -> None:
    tensors = tuple(TensorFact(f"kv_cache_k_{n}", "float32", (1, 1, 64, 4)) for n in range(30))
    halves = tuple(replace(tensor, dtype="float16") for tensor in tensors)
    facts = BundleFacts(
        "x.litertlm", 0, (1, 0, 0), (), signatures=(SignatureFact("decode", tensors, halves),)
    )
    found = [finding.found for finding in lint(facts) if finding.rule == "cache-type"]
    assert len(found) == 3
    assert found[-1].endswith("(and 27 more alike)")


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = broken.clean(tmp_path)
    target = broken.write(pieces, tmp_path)
    assert run_command(app, ["lint", str(target)]) == 0
    assert "0 error(s), 1 warning(s)" in capsys.readouterr().out
    start(1)(pieces)
    broken.write(pieces, tmp_path)
    assert run_command(app, ["lint", str(target), "--json"]) == 6
    listed = json.loads(capsys.readouterr().out)["findings"]
    assert [entry["rule"] for entry in listed] == ["start-doubled", "no-hashes"]
    assert all(entry["why"] and entry["todo"] and entry["found"] for entry in listed)
    assert run_command(app, ["lint", "--rules"]) == 0
    assert "start-doubled (error)" in capsys.readouterr().out
    assert run_command(app, ["lint"]) == 2
    (tmp_path / "none.litertlm").write_bytes(b"LITERTLM")
    assert run_command(app, ["lint", str(tmp_path / "none.litertlm")]) == 3


def test_garbage_in_a_bundle_is_a_finding_or_bad_input(tmp_path: Path) -> None:
    target = broken.write(broken.clean(tmp_path, kind=JSON), tmp_path)
    data, draw, codes = target.read_bytes(), random.Random(3), set()
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(draw.choice([1, 10, 100])):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        target.write_bytes(changed)
        codes.add(run_command(app, ["lint", str(target)]))
    assert codes <= {0, 3, 6}


def official_shape(pieces: Pieces) -> None:
    """What litert-torch 0.10 writes for SmolLM2-135M-Instruct, on a small model."""
    pieces.metadata.ClearField("sampler_params")
    pieces.metadata.start_token.token_str = "<|im_start|>"
    for mark in ("", ".", ":"):
        pieces.metadata.stop_tokens.add().token_str = f"{mark}<|im_end|>\n"
    pieces.metadata.jinja_prompt_template = (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


OFFICIAL = {"content-parts", "start-doubled", "no-hashes", "context-end"}


def test_a_stand_in_for_the_official_exporters_bundle(tmp_path: Path) -> None:
    pieces = broken.clean(tmp_path, kind=JSON, prefill=8)
    official_shape(pieces)
    assert names(broken.write(pieces, tmp_path)) == OFFICIAL


@pytest.mark.slow
@pytest.mark.skipif(
    not {"HERMES_OFFICIAL_PYTHON", "HERMES_OFFICIAL_MODEL"} <= os.environ.keys(),
    reason="HERMES_OFFICIAL_PYTHON names no Python with litert-torch, transformers and tensorflow, "
    "or HERMES_OFFICIAL_MODEL no folder of SmolLM2-135M-Instruct",
)
def test_the_official_exporters_own_bundle(tmp_path: Path) -> None:
    module = ["-m", "litert_torch.generative.export_hf"]
    model = os.environ["HERMES_OFFICIAL_MODEL"]
    command = [os.environ["HERMES_OFFICIAL_PYTHON"], *module, model, str(tmp_path)]
    subprocess.run([*command, "--cache_length=1280"], check=True, capture_output=True)
    (target,) = tmp_path.glob("*.litertlm")
    assert names(target) == OFFICIAL
