"""One planted fault for each rung: it turns red, the command exits 6, nothing is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_checkpoints import small_model, write_checkpoint, write_recipe
from tiny_bundle import train_sentencepiece
from tiny_llama import PROMPT_IDS, reference_logits

import converters.pipeline
import hermes.exportable
from converters.bundle import BundleSpec
from converters.flatbuffer import pack_model, read_model
from converters.graph import Graph
from hermes.cli import app, run_command
from hermes.rewrite import RewritableModel

Patch = pytest.MonkeyPatch
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Convert; the report of the run, whose exit code must be 6."""

    def convert(source: Path, *arguments: str, granularity: str = "channel") -> dict[str, Any]:
        recipe = write_recipe(tmp_path / "small.toml", granularity)
        target = tmp_path / "out" / "model.litertlm"
        target.parent.mkdir()
        report = tmp_path / "report"
        given = [str(source), "-o", str(target), "--recipe", str(recipe), "--report", str(report)]
        assert run_command(app, ["convert", *given, *arguments]) == 6
        assert list(target.parent.iterdir()) == []
        values: dict[str, Any] = json.loads((report / "report.json").read_text())
        return values

    return convert


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", *small_model())


def red_rungs(report: dict[str, Any]) -> set[int]:
    return {check["rung"] for check in report["checks"] if not check["passed"]}


def write_golden(path: Path, logits: torch.Tensor) -> str:
    np.savez(path, input_ids=np.array(PROMPT_IDS), logits=logits.float().numpy())
    return str(path)


def test_rung_0_a_tensor_that_nobody_uses(run: Run, checkpoint: Path, monkeypatch: Patch) -> None:
    opened = converters.pipeline.open_source

    def forgetful(options: Any) -> Any:
        source = opened(options)
        source.mapped.used.pop("model.layers.1.mlp.up_proj.weight")
        return source

    monkeypatch.setattr(converters.pipeline, "open_source", forgetful)
    assert run(checkpoint)["first_red_rung"] == 0


@pytest.mark.parametrize("fault", ["rotary style", "missing permutation", "rotary base", "norms"])
def test_rung_1_training_code_differs(
    fault: str, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    config, weights = small_model()
    options: dict[str, Any] = {}
    if fault == "rotary style":
        options["style"] = "inter"
    elif fault == "missing permutation":
        # Training knows layer 1's keys in pairs; the checkpoint's rows were never reordered.
        name = "model.layers.1.self_attn.k_proj.weight"
        rows = weights[name].view(2, 2, 8, 64)
        weights[name] = rows.transpose(1, 2).reshape(32, 64)
    elif fault == "rotary base":
        config = {**config, "rope_theta": 20000.0}
    else:
        one, two = (
            f"model.layers.0.{name}.weight"
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        weights[one], weights[two] = weights[two], weights[one]
    golden = reference_logits(weights, config, PROMPT_IDS, **options)
    report = run(checkpoint, "--golden", write_golden(tmp_path / "golden.npz", golden))
    assert report["first_red_rung"] == 1
    assert red_rungs(report) == {1}


def test_rung_1_is_green_with_the_right_training_code(checkpoint: Path, tmp_path: Path) -> None:
    config, weights = small_model()
    golden = write_golden(tmp_path / "g.npz", reference_logits(weights, config, PROMPT_IDS))
    recipe = write_recipe(tmp_path / "small.toml")
    target = str(tmp_path / "model.litertlm")
    arguments = [str(checkpoint), "-o", target, "--recipe", str(recipe), "--golden", golden]
    assert run_command(app, ["convert", *arguments]) == 0


def test_rung_2_a_gain_folded_into_the_wrong_layer(
    run: Run, checkpoint: Path, monkeypatch: Patch
) -> None:
    rewrite = converters.pipeline.rewrite_source

    def wrong(source: Any, recipe: Any) -> RewritableModel:
        model = rewrite(source, recipe)
        weights = dict(model.weights)
        one, two = "layers.0.mlp.gate_proj.weight", "layers.1.mlp.gate_proj.weight"
        weights[one], weights[two] = weights[two].renamed(one), weights[one].renamed(two)
        return replace(model, weights=weights)

    monkeypatch.setattr(converters.pipeline, "rewrite_source", wrong)
    report = run(checkpoint)
    assert report["first_red_rung"] == 2
    assert 3 not in red_rungs(report)


def test_rung_3_cache_position_off_by_one(run: Run, checkpoint: Path, monkeypatch: Patch) -> None:
    write = hermes.exportable.cache_write
    monkeypatch.setattr(
        hermes.exportable,
        "cache_write",
        lambda cache, update, position, axis: write(cache, update, position + 1, axis),
    )
    assert run(checkpoint)["first_red_rung"] == 3


def test_rung_4_a_constant_of_the_graph_changed(
    run: Run, checkpoint: Path, monkeypatch: Patch
) -> None:
    obtain = converters.pipeline.obtain_graph

    def damaged(*arguments: Any, **options: Any) -> Graph:
        graph = obtain(*arguments, **options)
        model = read_model(graph.path)
        table = max((b for b in model.buffers if b.data is not None), key=lambda b: len(b.data))
        values = np.frombuffer(bytes(table.data), np.float32) * np.float32(1.01)
        table.data = np.frombuffer(values.tobytes(), np.uint8)
        graph.path.write_bytes(pack_model(model))
        return graph

    monkeypatch.setattr(converters.pipeline, "obtain_graph", damaged)
    assert run(checkpoint)["first_red_rung"] == 4


def test_rung_5_one_scale_per_tensor(run: Run, tmp_path: Path) -> None:
    """B40: outlier rows ruin the others' precision; a few short questions would not show it."""
    config, weights = small_model()
    for layer in range(2):
        weights[f"model.layers.{layer}.mlp.down_proj.weight"][0] *= 40
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"][3] *= 40
    weights["model.embed_tokens.weight"][50] *= 60
    source = write_checkpoint(tmp_path / "outliers", config, weights)
    assert run(source, granularity="tensor")["first_red_rung"] == 5


@pytest.mark.parametrize("fault", ["start token missing", "stop token missing", "suppressed"])
def test_rung_6_the_bundle_says_something_else(
    fault: str, run: Run, checkpoint: Path, monkeypatch: Patch
) -> None:
    def wrong(**fields: Any) -> BundleSpec:
        spec = BundleSpec(**fields)
        if fault == "suppressed":
            # The most frequent letters can no longer be emitted.
            return replace(spec, suppress_tokens=tuple(range(3, 120)))
        start = None if fault == "start token missing" else spec.contract.start_token_id
        stops = (3,) if fault == "stop token missing" else spec.contract.stop_token_ids
        contract = replace(spec.contract, start_token_id=start, stop_token_ids=stops)
        return replace(spec, contract=contract)

    monkeypatch.setattr(converters.pipeline, "BundleSpec", wrong)
    report = run(checkpoint)
    assert report["first_red_rung"] == 6
    if fault != "stop token missing":
        assert 7 in red_rungs(report)


def test_rung_6_a_doubled_start_token(run: Run, tmp_path: Path, monkeypatch: Patch) -> None:
    """The template prints the start token, and the bundle names it as well."""
    config, weights = small_model()
    source = write_checkpoint(tmp_path / "chat", config, weights)
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    settings = {"add_bos_token": True, "bos_token": "<s>", "chat_template": template}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    # This one recognises <s> in text, as a chat model's tokenizer must.
    (source / "tokenizer.model").write_bytes(train_sentencepiece())

    def doubled(**fields: Any) -> BundleSpec:
        spec = BundleSpec(**fields)
        assert spec.contract.start_token_id is None
        return replace(spec, contract=replace(spec.contract, start_token_id=1))

    monkeypatch.setattr(converters.pipeline, "BundleSpec", doubled)
    report = run(source)
    assert report["first_red_rung"] == 6
    assert 7 in red_rungs(report)
