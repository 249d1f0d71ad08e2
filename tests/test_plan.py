"""Plans: arithmetic on shapes, refusals that name a way out, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import write_checkpoint
from tiny_llama import tiny_config, tiny_weights

import hermes.plan
from hermes.cli import app, run_command
from hermes.config import HermesConfig
from hermes.errors import ResourceError
from hermes.parameters import parameter_count
from hermes.plan import Machine, predict_cost, require_machine
from hermes.progress import Progress
from hermes.recipe_file import load_recipe

# Llama-3.2-1B: its published sizes, and its number of parameters.
LLAMA_1B = HermesConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
    num_kv_heads=8, head_dim=64, tie_embeddings=True, max_seq_len=131072,
)  # fmt: skip
PARAMETERS = 1_235_814_400


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return write_checkpoint(tmp_path_factory.mktemp("plan"), config, tiny_weights(config))


def cost(**changes: Any) -> hermes.plan.Cost:
    given = {"kept": False, "stamped": True, "verify": False, **changes}
    return predict_cost(LLAMA_1B, {}, load_recipe("int8"), **given)


def test_bytes_follow_from_the_shapes() -> None:
    assert parameter_count(LLAMA_1B) == PARAMETERS
    # The folded final gain unties the head, so its table is stored twice; one byte a value, and
    # twelve bytes a row of scales and zero points.
    matrices = PARAMETERS + 128256 * 2048 - 33 * 2048
    rows = 2 * 128256 + 16 * (2048 + 2 * 512 + 2048 + 2 * 8192 + 2048)
    assert cost().bundle_bytes == matrices + 12 * rows
    assert cost().kv_bytes == 2 * 16 * 8 * 64 * 1280 * 4
    assert cost().temporary_bytes == 0
    assert cost(verify=True).temporary_bytes == 4 * matrices


def test_a_kept_graph_saves_time_and_memory() -> None:
    kept = cost(kept=True)
    assert kept.seconds < cost().seconds
    assert kept.peak_memory < cost().peak_memory
    assert cost(stamped=False).seconds > cost().seconds
    assert cost(verify=True).peak_memory > 3 * 4 * PARAMETERS


def test_a_model_too_big_for_float_is_verified_all_the_same() -> None:
    """The float forms are read layer by layer then, so nothing is refused for their size."""
    large = cost(verify=True, memory=10**10)
    assert large.peak_memory < 10**10 < cost(verify=True, memory=10**11).peak_memory
    assert large.peak_memory > cost().peak_memory
    require_machine(large, Machine(10**10, 10**12), {})


def test_what_does_not_fit_is_refused_with_a_way_out() -> None:
    large, small = cost(verify=True), cost()
    memory = (large.peak_memory + small.peak_memory) // 2
    # A prediction may be a quarter too high: what fits is not refused for that.
    require_machine(large, Machine(int(large.peak_memory / 1.24), 10**12), {})
    with pytest.raises(ResourceError):
        require_machine(large, Machine(int(large.peak_memory / 1.26), 10**12), {})
    with pytest.raises(ResourceError) as refused:
        require_machine(large, Machine(memory, 10**12), {"--no-verify": small})
    assert refused.value.exit_code == 5
    assert refused.value.todo == "use --no-verify"
    assert "GB of memory" in refused.value.problems[0]
    with pytest.raises(ResourceError, match="larger machine") as refused:
        require_machine(large, Machine(1, 1), {"--no-verify": small})
    assert len(refused.value.problems) == 2
    with pytest.raises(ResourceError, match="GB of disk"):
        require_machine(small, Machine(10**12, small.bundle_bytes - 1), {})


def test_a_plan_says_layout_config_keys_and_cost(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(checkpoint), "--context", "32", "--prefill", "4"]
    assert run_command(app, [*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layout"]["name"] == "huggingface"
    assert facts["layout"]["evidence"]
    assert facts["config"]["rope_theta"]["source"].startswith("config.json")
    assert facts["keys"]["used"] == len(tiny_weights(tiny_config()))
    assert facts["recipe"]["export"] == {"context": 32, "prefill": [4]}
    assert facts["graph"] in ("traced", "kept")
    assert set(facts["cost"]) == {
        "peak_memory", "seconds", "temporary_bytes", "bundle_bytes", "kv_bytes", "phone_memory",
    }  # fmt: skip
    assert run_command(app, arguments) == 0
    shown = capsys.readouterr().out
    for words in ("layout huggingface", "because", "peak memory", "KV cache", "--no-verify"):
        assert words in shown


def test_a_machine_that_is_too_small_ends_with_5(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("converters.planning.this_machine", lambda folder: Machine(10**8, 10**12))
    arguments = ["--context", "32", "--prefill", "4"]
    assert run_command(app, ["plan", str(checkpoint), *arguments]) == 5
    assert "larger machine" in capsys.readouterr().err
    target = checkpoint.parent / "never.litertlm"
    assert run_command(app, ["convert", str(checkpoint), "-o", str(target), *arguments]) == 5
    assert not target.exists()


def test_int8_is_offered_where_float32_does_not_fit(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from converters.planning import make_plan
    from converters.source import SourceOptions, open_mapped

    _, mapped = open_mapped(SourceOptions(checkpoint))
    recipe = load_recipe("float32").with_shapes(32, (4,))
    plan = make_plan(mapped.config, mapped.weights, recipe, verify=True)
    assert set(plan.fitting) == {"--no-verify", "--recipe int8", "--recipe int8 --no-verify"}
    assert plan.fitting["--recipe int8"].bundle_bytes < plan.cost.bundle_bytes


def test_layers_that_differ_are_planned_as_traced() -> None:
    from converters.planning import make_plan

    recipe = load_recipe("int8")
    alike = make_plan(LLAMA_1B, {}, recipe, verify=False, keep_graph=False)
    differing = replace(LLAMA_1B, no_rope_layers=(3,))
    assert alike.graph == "stamped"
    assert make_plan(differing, {}, recipe, verify=False, keep_graph=False).graph == "traced"


def test_planning_safetensors_imports_no_torch(checkpoint: Path) -> None:
    code = (
        "import sys; from hermes.cli import app, run_command; "
        f"assert run_command(app, ['plan', {str(checkpoint)!r}, '--context', '32', '--prefill', "
        "'4', '--json']) == 0; "
        "heavy = {'torch', 'transformers', 'litert_torch', 'ai_edge_litert'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("step", "seconds", "words"),
    [
        (Progress("a", 50, 200, "tensors", "w", 80_000_000), 4.0,
         "50/200 tensors, 80.0 MB, 20.0 MB/s, 12 s left"),
        (Progress("a", 200, 200, "tensors", "w", 5_000_000), 2.0,
         "200/200 tensors, 5.0 MB, 2.5 MB/s"),
        (Progress("a"), 9.0, ""),
        (Progress("a", 0, 10, "tensors"), 0.0, "0/10 tensors"),
    ],
)  # fmt: skip
def test_progress_counts_bytes_rate_and_time_left(
    step: Progress, seconds: float, words: str
) -> None:
    assert step.counted(seconds) == words
