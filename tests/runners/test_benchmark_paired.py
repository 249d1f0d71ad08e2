"""`hermes bench` in the real runtime: the slower bundle is said to be slower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from converters.bundle import read_bundle
from converters.measuring import bundle_profile
from converters.traffic import decode_traffic
from hermes.cli import app, run_command
from hermes.errors import BadInputError, NativeToolError
from hermes.report.bench_table import bench_lines, profile_lines
from hermes.runners.benchmark_bandwidth import read_bandwidth
from hermes.runners.benchmark_paired import BenchmarkPlan, measure_paired, paired_ratio

PLAN = BenchmarkPlan(prompt=12, generate=30, threads=1, repeat=3)
LAYERS, KV_HEADS, HEAD_DIM, CONTEXT = 2, 2, 16, 64


def test_a_slower_bundle_is_reported_slower(tiny_bundle: Path, slow_bundle: Path) -> None:
    seen: list[str] = []
    fast, slow = measure_paired(
        [tiny_bundle, slow_bundle], PLAN, lambda path, speed: seen.append(path.name)
    )
    turn = ["tiny.litertlm", "slow.litertlm"]
    assert seen == [*turn, *turn[::-1], *turn]
    for metric in ("decode", "prefill"):
        assert paired_ratio(fast, slow, metric).median > 1.3
        assert paired_ratio(slow, fast, metric).median < 1 / 1.3
    assert paired_ratio(slow, fast, "first_token_seconds").median > 1.1
    assert len(fast.first) == len(fast.later) == PLAN.repeat
    spread = slow.spread("decode")
    assert 0 < spread.low <= spread.median <= spread.high
    assert 0 < slow.spread("first_load_seconds").median < 60
    for path in (tiny_bundle, slow_bundle):
        assert not list(path.parent.glob("*.xnnpack_cache")), "a cache beside the user's file"


def test_a_missing_bundle(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no such file"):
        measure_paired([tmp_path / "x.litertlm"], PLAN)


def test_bytes_per_token_from_the_graph(tiny_bundle: Path) -> None:
    """Float32 matrices and the head whole, of the embedding one row, every slot of the cache."""
    traffic = decode_traffic(tiny_bundle)
    attention, feed_forward = 64 * (64 + 32 + 32 + 64), 3 * 64 * 96
    matrices = 4 * (LAYERS * (attention + feed_forward) + 128 * 64)
    assert traffic.cache == LAYERS * 2 * KV_HEADS * CONTEXT * HEAD_DIM * 4
    assert matrices + 4 * 64 <= traffic.weights <= 1.05 * matrices
    assert traffic.at(0) == traffic.mean(5, 7) == traffic.weights + traffic.cache


def test_profile_names_every_matmul(tiny_bundle: Path) -> None:
    profile = bundle_profile(tiny_bundle, "decode", 1)
    calls = {row["operator"]: row["calls"] for row in profile["operators"]}
    matmuls = sum(n for name, n in calls.items() if name.startswith("Fully Connected"))
    assert matmuls == LAYERS * 7 + 1
    spent = sum(row["milliseconds"] for row in profile["operators"])
    assert 0 < spent <= 1.1 * profile["profiled_milliseconds"]
    assert 0 < profile["milliseconds"] < 1000
    lines = profile_lines(profile)
    assert lines[0].startswith("one call of decode:")
    assert len(lines) == len(calls) + 2


def test_profile_of_no_such_signature(tiny_bundle: Path) -> None:
    with pytest.raises(NativeToolError, match="no signature encode among prefill_8, decode"):
        bundle_profile(tiny_bundle, "encode", 1)


def test_bandwidth_is_a_machines(tmp_path: Path) -> None:
    assert 5e8 < read_bandwidth(2, 64 * 2**20) < 5e12


def test_command_prints_one_json_object_last(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", str(tiny_bundle), "--against", str(tiny_bundle), "--prompt", "10"]
    words += ["--generate", "8", "--repeat", "2", "--threads", "1", "--profile", "--json"]
    assert run_command(app, words) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["plan"]["repeat"] == 2
    assert len(facts["bundles"]) == 2
    for bundle in facts["bundles"]:
        assert bundle["decode"]["low"] > 0
        assert bundle["share_of_bound"] > 0
        assert bundle["profile"]["operators"]
    assert facts["ratios"]["decode"]["low"] > 0
    table = "\n".join(bench_lines(facts))
    for words_of_it in ("time to first token", "weight cache", "bandwidth bound", "A / B"):
        assert words_of_it in table


def test_a_dying_runtime_is_a_message_and_exit_7(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.litertlm"
    content = bytearray(tiny_bundle.read_bytes())
    (tokenizer,) = [s for s in read_bundle(tiny_bundle).sections if s.kind == "SP_Tokenizer"]
    content[tokenizer.offset : tokenizer.offset + tokenizer.size] = b"\xff" * tokenizer.size
    broken.write_bytes(content)
    assert run_command(app, ["bench", str(broken), "--repeat", "1"]) == NativeToolError.exit_code
    message = capsys.readouterr().err
    assert "error: the LiteRT-LM runtime" in message
    assert "Traceback" not in message
