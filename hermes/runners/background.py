"""Work that begins before it is asked for, in one thread beside the caller's.

The thread waits for native code in processes of its own, so it leaves this process to its caller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

from hermes.runners.closing import Closing

_T = TypeVar("_T")
_Known = TypeVar("_Known", covariant=True)
_here = threading.local()


class Job(Generic[_Known]):
    """A value that is computed once, by whoever comes first.

    Attributes:
        seconds: that it took; 0 until it is known.
    """

    def __init__(self, work: Callable[[], _Known]) -> None:
        self.seconds = 0.0
        self._work = work
        self._future: Future[_Known] = Future()
        self._free = threading.Lock()

    @property
    def begun(self) -> bool:
        """Somebody computes it, or has."""
        return self._free.locked()

    @property
    def done(self) -> bool:
        """The value, or the error in its place, is known."""
        return self._future.done()

    def result(self) -> _Known:
        """The value: computed here if nobody has begun, waited for if somebody has.

        Raises:
            Exception: whatever the work raised, wherever it was done.
        """
        self.run()
        return self._future.result()

    def run(self) -> None:
        """Compute the value, unless somebody has begun."""
        if not self._free.acquire(blocking=False):
            return
        started = time.monotonic()
        try:
            value = self._work()
        except BaseException as error:
            self.seconds = time.monotonic() - started
            self._future.set_exception(error)
        else:
            self.seconds = time.monotonic() - started
            self._future.set_result(value)


class Background(Closing):
    """A thread that does jobs in the order in which they were begun.

    When it is closed, what it waits for is stopped and the jobs left are dropped.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Job[object] | None] = SimpleQueue()
        self._jobs: list[Job[object]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="background", daemon=True)

    @property
    def busy(self) -> bool:
        """There is something left to do."""
        return not all(job.done for job in self._jobs)

    def begin(self, work: Callable[[], _T]) -> Job[_T]:
        """Put the work behind what was begun before, and return at once."""
        job = Job(work)
        self._jobs.append(job)
        self._waiting.put(job)
        if not self._thread.is_alive():
            self._thread.start()
        return job

    def close(self, kill: bool = False) -> None:
        """Stop; returns when the thread has ended."""
        self._stop.set()
        self._waiting.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        _here.stop = self._stop
        while not self._stop.is_set():
            job = self._waiting.get()
            if job is None:
                return
            job.run()


def nobody_waits() -> bool:
    """This thread belongs to a `Background` that is being closed."""
    stop: threading.Event | None = getattr(_here, "stop", None)
    return stop is not None and stop.is_set()
