"""Tasks side by side in processes that share what is in memory already.

Numerical work in Python threads waits for the interpreter's lock between one numpy call and the
next: two threads cost a third more processor time than one and end hardly earlier. Forked processes
do not wait, and find every weight and closure where it is. Only Linux forks safely beside native
libraries; elsewhere the tasks run in threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import TypeVar

from hermes.errors import ResourceError
from hermes.runners.worker import peak_memory

Result = TypeVar("Result")
OnGrowth = Callable[[int], None]
_INDEX = struct.Struct("<I")


def run_tasks(
    tasks: Sequence[Callable[[], Result]],
    workers: int,
    files: tuple[int, ...] = (),
    on_growth: OnGrowth = lambda size: None,
) -> Generator[tuple[int, Result], None, None]:
    """(index, result) of every task as it is done, begun in the order given; the first error ends.

    Args:
        tasks: each is run once; results must be picklable.
        workers: processes.
        files: descriptors that the tasks use; they find no other one open.
        on_growth: told at the end by how many bytes all processes grew beyond what they share.

    Raises:
        ResourceError: a process died.
    """
    if sys.platform == "linux":
        yield from _in_processes(tasks, workers, files, on_growth)
    else:
        yield from _in_threads(tasks, workers)


def _in_threads(
    tasks: Sequence[Callable[[], Result]], workers: int
) -> Generator[tuple[int, Result], None, None]:
    pool = ThreadPoolExecutor(workers)
    try:
        running = {pool.submit(task): index for index, task in enumerate(tasks)}
        for done in as_completed(running):
            yield running[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _in_processes(
    tasks: Sequence[Callable[[], Result]],
    workers: int,
    files: tuple[int, ...],
    on_growth: OnGrowth,
) -> Generator[tuple[int, Result], None, None]:
    with ExitStack() as held:
        queue = _queue(len(tasks), held)
        lifeline, alive = os.pipe()
        held.callback(os.close, alive)
        held.callback(os.close, lifeline)
        kept = (queue, lifeline, *files)
        running = dict(_start(tasks, kept, held) for _ in range(min(workers, len(tasks))))
        growth: dict[Connection, int] = {}
        left = len(tasks)
        while left:
            for end in _ready(running):
                try:
                    index, result, error, growth[end] = end.recv()
                except EOFError:
                    # It ends when nothing is queued, or before its time.
                    _demand_well(running.pop(end))
                    continue
                if error is not None:
                    raise error
                left -= 1
                yield index, result
        on_growth(sum(growth.values()))


def _ready(running: Mapping[Connection, ForkProcess]) -> list[Connection]:
    return [end for end in wait(list(running)) if isinstance(end, Connection)]


def _queue(count: int, held: ExitStack) -> int:
    """A pipe with the number of every task: who is free reads the next one."""
    end, other = os.pipe()
    held.callback(os.close, end)
    with open(other, "wb") as file:
        file.write(b"".join(_INDEX.pack(index) for index in range(count)))
    return end


def _start(
    tasks: Sequence[Callable[[], Result]], kept: tuple[int, ...], held: ExitStack
) -> tuple[Connection, ForkProcess]:
    context = multiprocessing.get_context("fork")
    end, other = context.Pipe(duplex=False)
    held.callback(end.close)
    process = context.Process(target=_work, args=(tasks, kept, other))
    process.start()
    held.callback(process.join)
    held.callback(process.kill)
    other.close()
    return end, process


def _demand_well(process: ForkProcess) -> None:
    """Refuse an end that was none of its own will."""
    process.join()
    code = process.exitcode or 0
    if code:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise ResourceError(
            f"a process that worked on the weights died: {how}",
            expected="as much memory as `hermes plan` says",
            todo="free some memory and convert again",
        )


def _work(
    tasks: Sequence[Callable[[], Result]], kept: tuple[int, ...], results: Connection
) -> None:
    """The process's side: tasks until the queue is empty."""
    before = peak_memory()
    # The parent's locks would outlive it here.
    _close_all_but({0, 1, 2, results.fileno(), *kept})
    # Interrupts go to the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    queue, lifeline, *_ = kept
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()
    while len(number := os.read(queue, _INDEX.size)) == _INDEX.size:
        (index,) = _INDEX.unpack(number)
        result, failure = None, None
        try:
            result = tasks[index]()
        except Exception as error:
            failure = error
        results.send((index, result, failure, peak_memory() - before))


def _follow(lifeline: int) -> None:
    """End with the parent, which never writes."""
    os.read(lifeline, 1)
    os._exit(1)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
