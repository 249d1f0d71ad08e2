"""A child that works ahead says the same as one that is asked step by step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hermes.errors import NativeToolError
from hermes.runners.child import Child
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.kept import Kept

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
    runner.score_ahead(IDS)
    assert (np.stack(list(runner.score(IDS))) == wanted).all()


def test_other_calls_wait_for_the_text(runner: FlatbufferRunner) -> None:
    wanted = stepped(runner, IDS)
    runner.score_ahead(IDS)
    assert (stepped(runner, IDS[:3]) == wanted[:3]).all()
    assert (np.stack(list(runner.score(IDS))) == wanted).all()
    assert (np.stack(list(runner.score(IDS[1:5]))) != wanted[1:5]).any()


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
