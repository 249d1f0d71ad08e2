"""The worker process's side of `hermes.runners.child`: serve requests until the pipe ends."""

from __future__ import annotations

import fcntl
import importlib
import os
import resource
import select
import signal
import sys
import traceback
from typing import Any

from hermes.errors import HermesError
from hermes.runners.messages import Reply, Request, read_message, write_message


def main(request_fd: int, reply_fd: int, lifeline_fd: int) -> None:
    """Answer requests one by one; leaves without running native destructors."""
    _die_with_parent(lifeline_fd)
    for fd in (request_fd, reply_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    built: Any = None
    while isinstance(request := read_message(request_fd), Request):
        try:
            if request.kind == "build":
                built = _resolve(request.target)(*request.args, **request.kwargs)
                value = None
            elif request.kind == "run":
                value = _resolve(request.target)(*request.args, **request.kwargs)
            else:
                value = getattr(built, request.target)(*request.args, **request.kwargs)
            reply = Reply(value=value, peak_memory=peak_memory())
        except BaseException as error:
            reply = _failed(error)
        sys.stdout.flush()
        sys.stderr.flush()
        write_message(reply_fd, reply)
    # Tearing down native engines can crash or hang, and nobody needs their last words.
    os._exit(0)


def peak_memory() -> int:
    """Largest resident size of this process, bytes.

    Linux's `ru_maxrss` survives exec and so shows the parent's peak; VmHWM does not.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _failed(error: BaseException) -> Reply:
    where = "".join(traceback.format_exception(error))
    if isinstance(error, HermesError):
        arguments = {
            "found": error.found,
            "expected": error.expected,
            "todo": error.todo,
            "problems": error.problems,
        }
        refusal = (type(error).__name__, arguments)
        return Reply(refusal=refusal, traceback=where, peak_memory=peak_memory())
    line = f"{type(error).__name__}: {error}".strip()
    return Reply(failure=line, traceback=where, peak_memory=peak_memory())


def _die_with_parent(lifeline_fd: int) -> None:
    """Let the kernel end this process when the parent's end of the lifeline closes.

    SIGIO's default action is to terminate, so this works while native code holds the interpreter
    lock. (PR_SET_PDEATHSIG would fire when the spawning thread ends, not the process.)
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:
        os._exit(1)
