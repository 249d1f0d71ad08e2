"""Native code may die in any way: the parent lives on and says what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hermes.errors import NativeToolError, UnsupportedModelError
from hermes.runners.child import Child, measure_in_child, run_in_child


def alive(pid: int) -> bool:
    """A zombie, reaped by nobody, counts as dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def dies_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_values_and_arrays_cross_the_pipe() -> None:
    assert run_in_child("victims:add", 2, second=3) == 5
    values = np.random.default_rng(0).normal(size=(300, 4001)).astype(np.float32)
    assert np.array_equal(run_in_child("victims:double", values), values * 2)


@pytest.mark.parametrize(
    ("target", "args", "words"),
    [
        ("victims:abort", (), ["SIGABRT", "check failed: weights.size() == 3"]),
        ("victims:segfault", (), ["SIGSEGV", "string_at"]),
        ("victims:leave", (1,), ["status 1", "LLVM ERROR: no space left"]),
        ("victims:raise_runtime_error", (), ["RuntimeError: engine creation failed", "a warning"]),
    ],
)
def test_a_dead_child_is_reported(target: str, args: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(NativeToolError) as caught:
        run_in_child(target, *args, tool="converter")
    assert caught.value.exit_code == 7
    for word in ["converter", target, *words]:
        assert word in str(caught.value)


def test_a_hung_child_is_stopped() -> None:
    started = time.monotonic()
    with pytest.raises(NativeToolError, match=r"no answer within 1 s") as caught:
        run_in_child("victims:hang", timeout=1)
    assert time.monotonic() - started < 4
    assert "waiting for a lock" in str(caught.value)
    assert caught.value.exit_code == 7


def test_a_child_that_eats_memory_is_stopped() -> None:
    with pytest.raises(NativeToolError, match=r"more than the limit of 200 MiB") as caught:
        run_in_child("victims:allocate", 2000, memory_limit=200 * 2**20)
    assert caught.value.exit_code == 7


def test_peak_memory_is_the_childs_own() -> None:
    ballast = np.ones(40 * 2**20)  # 320 MiB in the parent
    small = measure_in_child("victims:add", 1, 1)
    large = measure_in_child("victims:allocate", 160)
    assert ballast.nbytes > 300 * 2**20
    assert small.peak_memory < 100 * 2**20
    assert 160 * 2**20 < large.peak_memory < 260 * 2**20
    assert large.seconds > 0.1


def test_output_is_bounded_and_delivered_line_by_line() -> None:
    seen: list[str] = []
    run = measure_in_child("victims:chatter", 5000, on_line=seen.append)
    assert run.value == 5000
    assert len(seen) == 5000
    assert seen[4321].startswith("line 4321 ")
    assert len(run.output) == 200
    assert run.output[-1].startswith("line 4999 ")


def test_our_own_errors_arrive_unchanged() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        run_in_child("victims:refuse")
    assert (caught.value.found, caught.value.expected) == ("sliding window", "none")
    assert (caught.value.todo, caught.value.problems) == ("give up", ("a",))


def test_an_object_lives_between_calls() -> None:
    with Child("victims:Counter", 5) as counter:
        assert counter.call("add", 2) == 7
        assert counter.call("add", 3) == 10
        pid = counter.call("pid")
        assert pid == counter.pid != os.getpid()
        with pytest.raises(NativeToolError, match="AttributeError"):
            counter.call("missing")
        assert counter.call("add", 0) == 10
        assert counter.peak_memory > 2**20
    assert not alive(pid)


def test_a_dead_object_says_so_again() -> None:
    with Child("victims:Counter", 5) as counter:
        with pytest.raises(NativeToolError, match="SIGABRT"):
            counter.call("abort")
        with pytest.raises(NativeToolError, match="ended already"):
            counter.call("add", 1)


def test_a_failing_constructor_leaves_no_process() -> None:
    def children() -> set[str]:
        # Other tests' fixtures may keep children of this process.
        return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())

    before = children()
    with pytest.raises(NativeToolError, match="start below 0"):
        Child("victims:Counter", -1)
    assert not any(alive(int(pid)) for pid in children() - before)


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    support = Path(__file__).parents[1] / "support"
    code = (
        f"import sys; sys.path.insert(0, {str(support)!r}); "
        "from hermes.runners.child import run_in_child; "
        f"run_in_child('victims:hang_in_native_code', {str(marker)!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 10
    while not (marker.exists() and marker.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(marker.read_text())
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert dies_within(pid, 5)
