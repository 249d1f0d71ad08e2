"""A worker process seen from outside: pipes, limits, captured output and how it ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import hermes.errors
from hermes.errors import HermesError, NativeToolError
from hermes.runners.background import nobody_waits
from hermes.runners.messages import Reply, Request, pack, unpack

_POLL_SECONDS = 0.05
_KEPT_LINES = 200
_LINE_LENGTH = 2000
_SHOWN_LINES = 12
_CHATTER = ("INFO:", "I0000")


class WorkerTraceback(Exception):  # noqa: N818
    """The traceback of an exception raised in a child, as the cause of the parent's error."""


@dataclass(frozen=True)
class Launcher:
    """A Python that can run workers.

    Attributes:
        command: the interpreter, with whatever must stand in front of it.
        path: its import path; Hermes is on it.
    """

    command: tuple[str, ...]
    path: tuple[str, ...]


def this_python() -> Launcher:
    """The interpreter that runs now, importing from where it does."""
    return Launcher((sys.executable,), tuple(os.path.abspath(entry) for entry in sys.path))


class WorkerProcess:
    """A spawned `hermes.runners.worker` and the conversation with it.

    After a death, a timeout or too much memory it has ended, and every further request says so.
    """

    def __init__(
        self,
        tool: str,
        timeout: float | None,
        memory_limit: int | None,
        on_line: Callable[[str], None] | None,
        launcher: Launcher | None = None,
    ) -> None:
        self.tool = tool
        self.timeout = timeout
        self.memory_limit = memory_limit
        self.on_line = on_line
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.peak_memory = 0
        self._partial = b""
        self._popen, self._requests, self._replies, self._output, self._lifeline = _spawn(
            launcher or this_python()
        )
        self.pid = self._popen.pid

    def ask(self, request: Request, timeout: float | None = None) -> Any:
        """Send a request, wait for its reply, and turn failures into errors."""
        self.post(request)
        return self.collect(request, timeout)

    def post(self, request: Request) -> None:
        """Send a request; its reply must be collected before the next one is sent."""
        if self._requests < 0:
            raise NativeToolError(f"the {self.tool}'s process has ended already")
        try:
            view = memoryview(pack(request))
            while view:
                view = view[os.write(self._requests, view) :]
        except BrokenPipeError:
            raise self._death(request) from None

    def collect(self, request: Request, timeout: float | None = None) -> Any:
        """Wait for the reply to the request that was posted last."""
        if self._requests < 0:
            raise NativeToolError(f"the {self.tool}'s process has ended already")
        limit = self.timeout if timeout is None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        reply = self._wait(request, deadline, limit)
        self.peak_memory = max(self.peak_memory, reply.peak_memory)
        if reply.refusal is not None:
            raise _restored(*reply.refusal) from WorkerTraceback(reply.traceback)
        if reply.failure is not None:
            error = self._error(request, f"failed: {reply.failure}")
            raise error from WorkerTraceback(reply.traceback)
        return reply.value

    def _wait(self, request: Request, deadline: float | None, limit: float | None) -> Reply:
        data = bytearray()
        next_look = time.monotonic()
        while True:
            ready = select.select([self._replies, self._output], [], [], _POLL_SECONDS)[0]
            if self._output in ready:
                self._drain()
            if self._replies in ready:
                part = os.read(self._replies, 1 << 20)
                if not part:
                    raise self._death(request)
                data += part
                reply = self._decode(request, data)
                if reply is not None:
                    self._drain()
                    return reply
            if nobody_waits():
                self.end(kill=True)
                raise self._error(request, "was stopped: nobody waits for it any more")
            if deadline is not None and time.monotonic() > deadline:
                self.end(kill=True)
                raise self._error(request, f"gave no answer within {limit:g} s and was stopped")
            if time.monotonic() >= next_look:
                self._watch_memory(request)
                next_look = time.monotonic() + _POLL_SECONDS

    def _decode(self, request: Request, data: bytearray) -> Reply | None:
        try:
            reply = unpack(data)
        except (pickle.UnpicklingError, AttributeError, ImportError, EOFError) as error:
            self.end(kill=True)
            raise self._error(request, f"sent an unreadable answer: {error}") from error
        return reply if isinstance(reply, Reply) else None

    def _watch_memory(self, request: Request) -> None:
        resident = _resident_size(self.pid)
        self.peak_memory = max(self.peak_memory, resident)
        if self.memory_limit is not None and resident > self.memory_limit:
            self.end(kill=True)
            used, most = resident / 2**20, self.memory_limit / 2**20
            raise self._error(
                request, f"used {used:.0f} MiB, more than the limit of {most:.0f} MiB"
            )

    def _drain(self) -> None:
        """Read what the child has printed so far, without waiting for more."""
        while True:
            try:
                part = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            if not part:
                return
            *whole, self._partial = (self._partial + part).split(b"\n")
            self._partial = self._partial[:_LINE_LENGTH]
            for line in whole:
                self._keep(line)

    def _keep(self, line: bytes) -> None:
        text = line[:_LINE_LENGTH].decode("utf-8", "replace").rstrip("\r")
        self.lines.append(text)
        if self.on_line is not None:
            self.on_line(text)

    def _death(self, request: Request) -> NativeToolError:
        try:
            status = self._popen.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.end(kill=True)
            return self._error(request, "closed its pipes and was stopped")
        self.end()
        if status >= 0:
            return self._error(request, f"ended its process with status {status}")
        name = signal.Signals(-status).name
        hint = ", often the system's answer to memory running out" if name == "SIGKILL" else ""
        return self._error(request, f"died with {name}{hint}")

    def _error(self, request: Request, what: str) -> NativeToolError:
        telling = [line for line in self.lines if line.strip() and not line.startswith(_CHATTER)]
        last = telling[-_SHOWN_LINES:]
        return NativeToolError(
            f"the {self.tool} {what} (in {request.target})",
            problems=[f"it printed: {line}" for line in last],
            expected="an answer",
            todo="see its output above; --debug shows where it happened",
        )

    def end(self, kill: bool = False) -> None:
        """Close the pipes and reap the child, gently unless `kill`."""
        if self._requests < 0:
            return
        os.close(self._requests)
        self._requests = -1
        if kill:
            self._kill()
        deadline = time.monotonic() + 5
        while self._popen.poll() is None and time.monotonic() < deadline:
            self._drain()
            time.sleep(0.005)
        self._kill()
        self._popen.wait()
        self._drain()
        if self._partial:
            self._keep(self._partial)
        for fd in (self._replies, self._output, self._lifeline):
            os.close(fd)

    def _kill(self) -> None:
        # The child leads a session of its own, so this reaches the processes it has started too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _spawn(launcher: Launcher) -> tuple[subprocess.Popen[bytes], int, int, int, int]:
    """Start the worker; its process, and our ends of requests, replies, output and lifeline."""
    request_read, request_write = os.pipe()
    reply_read, reply_write = os.pipe()
    output_read, output_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    given = (request_read, reply_write, lifeline_read)
    code = (
        f"import sys; sys.path[:] = {list(launcher.path)!r}; "
        f"import hermes.runners.worker as worker; worker.main{given}"
    )
    try:
        process = subprocess.Popen(
            [*launcher.command, "-u", "-X", "faulthandler", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=output_write,
            stderr=output_write,
            pass_fds=given,
            start_new_session=True,
        )
    except OSError as error:
        for fd in (request_write, reply_read, output_read, lifeline_write):
            os.close(fd)
        raise NativeToolError(f"no worker process could be started: {error}") from error
    finally:
        for fd in (*given, output_write):
            os.close(fd)
    os.set_blocking(output_read, False)
    return process, request_write, reply_read, output_read, lifeline_write


def _resident_size(pid: int) -> int:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _restored(name: str, arguments: Mapping[str, Any]) -> HermesError:
    kind = getattr(hermes.errors, name, HermesError)
    error: HermesError = kind(
        arguments["found"],
        expected=arguments["expected"],
        todo=arguments["todo"],
        problems=arguments["problems"],
    )
    return error
