"""Tasks in forked processes: results, the first error, and a process that dies."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time

import pytest

from converters.forked import run_tasks
from hermes.errors import BadInputError, ResourceError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")


def test_every_task_is_run_once_in_another_process() -> None:
    with tempfile.TemporaryFile() as file:
        number = file.fileno()

        def task(index: int) -> tuple[int, int]:
            os.pwrite(number, bytes([index]), index)
            return index * index, os.getpid()

        tasks = [lambda index=index: task(index) for index in range(7)]
        found = dict(run_tasks(tasks, 2, (number,)))
        assert {index: value for index, (value, _) in found.items()} == {
            index: index**2 for index in range(7)
        }
        assert os.getpid() not in {process for _, process in found.values()}
        assert os.pread(number, 10, 0) == bytes(range(7))


def test_a_tasks_error_is_the_callers() -> None:
    def bad() -> int:
        raise BadInputError("a weight is no number", todo="train again")

    with pytest.raises(BadInputError, match="no number") as raised:
        list(run_tasks([lambda: 1, bad, lambda: 2], 2))
    assert raised.value.todo == "train again"


def test_a_process_that_dies_is_a_message() -> None:
    def die() -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with pytest.raises(ResourceError):
        list(run_tasks([lambda: 1, die], 2))


def test_nothing_runs_on_after_an_error() -> None:
    with tempfile.TemporaryFile() as file:
        number = file.fileno()

        def late() -> int:
            time.sleep(1)
            return os.pwrite(number, b"x", 0)

        def bad() -> int:
            raise BadInputError("wrong")

        with pytest.raises(BadInputError):
            list(run_tasks([bad, late], 2, (number,)))
        time.sleep(1.5)
        assert os.pread(number, 1, 0) == b""
