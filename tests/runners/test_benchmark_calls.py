"""`hermes bench --calls` in the real kernels: the slower graph is said to be slower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from converters.measuring import call_facts
from hermes.cli import app, run_command
from hermes.errors import NativeToolError, UsageError
from hermes.report.bench_table import call_lines
from hermes.runners.benchmark_calls import CallPlan

PLAN = CallPlan("decode", (0, 40), threads=1, rounds=15, copies=2)


def test_the_slower_graph_takes_longer_in_either_place(
    tiny_bundle: Path, slow_bundle: Path
) -> None:
    for paths in ([tiny_bundle, slow_bundle], [slow_bundle, tiny_bundle]):
        facts = call_facts(paths, PLAN)
        assert [row[0]["position"] for row in facts["calls"]] == [0, 40]
        for row in facts["calls"]:
            assert row[0]["ratio"] == 1
            assert (row[1]["ratio"] > 1.5) == (paths[1] == slow_bundle)
            assert all(len(times["wall_ms"]) == PLAN.copies for times in row)
            assert all(0 < ms < 1000 for times in row for ms in times["cpu_ms"])


def test_equal_graphs_take_equal_time(slow_bundle: Path) -> None:
    (row,) = call_facts([slow_bundle, slow_bundle], CallPlan("decode", (8,), 1, 25))["calls"]
    assert row[1]["ratio"] == pytest.approx(1, abs=0.15)


def test_the_table(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", str(tiny_bundle), "--calls", "prefill_8", "--at", "3", "--threads", "1"]
    assert run_command(app, words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("calls of prefill_8, 1 threads, 3 copies")
    assert printed[2].split()[:2] == ["3", "A"]
    assert run_command(app, [*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert call_lines(facts)[-1] == f"A: {tiny_bundle}"


def test_a_signature_that_is_not_there(tiny_bundle: Path) -> None:
    with pytest.raises(NativeToolError, match=r"no signature prefill_7 among .*decode"):
        call_facts([tiny_bundle], CallPlan("prefill_7"))


def test_positions_without_a_signature(tiny_bundle: Path) -> None:
    assert run_command(app, ["bench", str(tiny_bundle), "--at", "3"]) == 2
    with pytest.raises(UsageError, match="cannot be timed"):
        CallPlan("decode", rounds=0)
