"""A child that works ahead says the same as one that is asked step by step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hermes.errors import NativeToolError
from hermes.runners.background import Background
from hermes.runners.child import Child
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.kept import Kept
from hermes.verify.scores import KnownScores

IDS = [(37 * i + 11) % 128 for i in range(40)]


@pytest.fixture
def runner(tiny_flatbuffer: Path) -> Iterator[FlatbufferRunner]:
    with FlatbufferRunner(tiny_flatbuffer) as opened:
        yield opened


def stepped(runner: FlatbufferRunner, ids: list[int]) -> np.ndarray:
    runner.reset()
    return np.stack([runner.step(token, position) for position, token in enumerate(ids)])


def test_the_same_logits_bit_for_bit(runner: FlatbufferRunner) -> None:
    wanted = stepped(runner, IDS)
    assert (np.stack(list(runner.score(IDS))) == wanted).all()
    known = KnownScores(runner, IDS, IDS[1:5])
    known.remember()
    assert (np.stack(list(known.score(IDS))) == wanted).all()
    assert (np.stack(list(known.score(IDS[:3]))) == wanted[:3]).all()
    assert (np.stack(list(known.score(IDS[1:5]))) == stepped(runner, IDS[1:5])).all()
    assert (np.stack(list(known.score(IDS[7:9]))) == stepped(runner, IDS[7:9])).all()


def test_a_job_is_done_once_by_whoever_comes_first() -> None:
    threads: list[str] = []
    gate = threading.Event()

    def first() -> int:
        gate.wait(10)
        threads.append(threading.current_thread().name)
        return 1

    def second() -> int:
        threads.append(threading.current_thread().name)
        return 2

    with Background() as background:
        jobs = [background.begin(first), background.begin(second)]
        while not jobs[0].begun:
            time.sleep(0.001)
        assert jobs[1].result() == 2  # the thread is held up by the first
        assert background.busy
        gate.set()
        assert [job.result() for job in jobs] == [1, 2]
        assert not background.busy
    assert threads == [threading.current_thread().name, "background"]


def test_an_error_comes_back_where_the_result_is_asked_for() -> None:
    def dies() -> int:
        with Child("victims:Counter", 5) as counter:
            return int(counter.call("abort"))

    with Background() as background:
        job, after = background.begin(dies), background.begin(lambda: 3)
        with pytest.raises(NativeToolError, match="SIGABRT"):
            job.result()
        assert after.result() == 3


def test_who_leaves_early_waits_for_no_child() -> None:
    pids: list[int] = []

    def sleeps() -> object:
        with Child("victims:Counter", 5) as counter:
            pids.append(counter.pid)
            return counter.call("hang")

    dropped: list[int] = []
    started = time.monotonic()
    with Background() as background:
        job = background.begin(sleeps)
        background.begin(lambda: dropped.append(1))
        while not pids:
            time.sleep(0.01)
    assert time.monotonic() - started < 20
    assert dropped == []
    assert pids[0] not in _children()
    with pytest.raises(NativeToolError, match="nobody waits"):
        job.result()


def test_a_kept_runner_has_one_user_at_a_time() -> None:
    inside: list[int] = []

    def use() -> int:
        with kept.open() as counter:
            inside.append(1)
            users = len(inside)
            counter.call("add", 1)
            inside.pop()
            return users

    with Kept(lambda: Child("victims:Counter", 5)) as kept, Background() as background:
        jobs = [background.begin(use) for _ in range(20)]
        assert {use() for _ in range(20)} == {1}
        assert {job.result() for job in jobs} == {1}


def test_an_abandoned_text_leaves_no_reply_behind(runner: FlatbufferRunner) -> None:
    wanted = stepped(runner, IDS)
    rows = runner.score(IDS)
    assert (next(rows) == wanted[0]).all()
    rows.close()  # type: ignore[attr-defined]
    assert (stepped(runner, IDS[:3]) == wanted[:3]).all()


def test_a_child_that_dies_ahead_is_reported_when_it_is_asked() -> None:
    with Child("victims:Counter", 5) as counter:
        request = counter.post("abort")
        with pytest.raises(NativeToolError, match="SIGABRT"):
            counter.collect(request)
        with pytest.raises(NativeToolError, match="ended already"):
            counter.collect(request)
    with Child("victims:Counter", 5) as counter:
        assert list(counter.stream("add", [(1,), (2,), (3,)])) == [6, 8, 11]


def test_a_kept_runner_is_opened_once_and_again_after_an_error() -> None:
    opened: list[int] = []

    def opener() -> Child:
        opened.append(len(opened))
        return Child("victims:Counter", 5)

    with Kept(opener) as kept:
        with kept.open() as first:
            pid = first.pid
        with kept.open() as again:
            assert again.pid == pid
        with pytest.raises(NativeToolError), kept.open() as counter:
            counter.call("abort")
        with kept.open() as fresh:
            assert fresh.call("add", 1) == 6
            pid = fresh.pid
    assert opened == [0, 1]
    assert pid not in _children()


def _children() -> set[int]:
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in text.split()}
