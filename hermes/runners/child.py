"""A worker process for native code that may abort, hang or eat all memory.

The LiteRT interpreter, the LiteRT-LM runtime and the converter are C++ libraries whose failures end
the process they run in. `Child` keeps an object in a process of its own and calls its methods;
`run_in_child` runs one function. Whatever happens there, the caller gets a `HermesError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hermes.errors import NativeToolError
from hermes.runners.closing import Closing
from hermes.runners.messages import Request
from hermes.runners.process import Launcher, WorkerProcess


@dataclass(frozen=True)
class ChildRun:
    """What `measure_in_child` saw: the function's value, and what it cost."""

    value: Any
    seconds: float
    peak_memory: int
    output: tuple[str, ...]


class Child(Closing):
    """A spawned Python process that holds one object and answers calls of its methods.

    Args:
        target: `module:Class`, imported and called in the child; arguments and results must be
            picklable.
        tool: name of the native tool in messages.
        timeout: seconds that building and each call may take; None waits forever.
        memory_limit: resident bytes above which the child is killed.
        on_line: called in the caller's thread, during calls, with every line the child prints.
        launcher: another Python to run the child, e.g. one for another processor.

    Raises:
        NativeToolError: the child died, hung, grew too large or the library raised; with the
            signal's name and the last lines it printed.
    """

    def __init__(
        self,
        target: str,
        *args: Any,
        tool: str = "native library",
        timeout: float | None = 600.0,
        memory_limit: int | None = None,
        on_line: Callable[[str], None] | None = None,
        launcher: Launcher | None = None,
        **kwargs: Any,
    ) -> None:
        self._process = WorkerProcess(tool, timeout, memory_limit, on_line, launcher)
        try:
            self._process.ask(Request("build", target, args, kwargs))
        except BaseException:
            self.close(kill=True)
            raise

    def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the child's object and wait for its result."""
        return self._process.ask(Request("call", method, args, kwargs), timeout)

    def post(self, method: str, *args: Any) -> Request:
        """Start a call; nothing else may be called before its result is collected."""
        request = Request("call", method, args)
        self._process.post(request)
        return request

    def collect(self, request: Request, timeout: float | None = None) -> Any:
        """Wait for the result of the call that was posted."""
        return self._process.collect(request, timeout)

    def stream(self, method: str, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Results of one call after the other; the next runs while the caller looks at the last."""
        pending: Request | None = None
        try:
            for args in calls:
                finished, pending = pending, None
                value = None if finished is None else self.collect(finished)
                pending = self.post(method, *args)
                if finished is not None:
                    yield value
            if pending is not None:
                finished, pending = pending, None
                yield self.collect(finished)
        finally:
            if pending is not None:
                # The caller stopped early: nobody else may read this reply as its own.
                with suppress(NativeToolError):
                    self.collect(pending)

    @property
    def peak_memory(self) -> int:
        """Largest resident size of the child so far, bytes."""
        return self._process.peak_memory

    @property
    def output(self) -> tuple[str, ...]:
        """The last lines that the child printed."""
        return tuple(self._process.lines)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def close(self, kill: bool = False) -> None:
        """End the child; without `kill` it may finish what it is doing for five seconds."""
        self._process.end(kill)


def run_in_child(
    target: str,
    *args: Any,
    tool: str = "native library",
    timeout: float | None = 600.0,
    memory_limit: int | None = None,
    on_line: Callable[[str], None] | None = None,
    launcher: Launcher | None = None,
    **kwargs: Any,
) -> Any:
    """Run the function `module:name` in a process of its own and return its result.

    Raises:
        NativeToolError: as `Child` does. A HermesError raised by the function arrives as it is.
    """
    return measure_in_child(
        target,
        *args,
        tool=tool,
        timeout=timeout,
        memory_limit=memory_limit,
        on_line=on_line,
        launcher=launcher,
        **kwargs,
    ).value


def measure_in_child(
    target: str,
    *args: Any,
    tool: str = "native library",
    timeout: float | None = 600.0,
    memory_limit: int | None = None,
    on_line: Callable[[str], None] | None = None,
    launcher: Launcher | None = None,
    **kwargs: Any,
) -> ChildRun:
    """`run_in_child`, with the time and memory the function took and what it printed."""
    started = time.monotonic()
    process = WorkerProcess(tool, timeout, memory_limit, on_line, launcher)
    try:
        value = process.ask(Request("run", target, args, kwargs))
    except BaseException:
        process.end(kill=True)
        raise
    process.end()
    seconds = time.monotonic() - started
    return ChildRun(value, seconds, process.peak_memory, tuple(process.lines))
