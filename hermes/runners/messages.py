"""Messages between a parent and its worker process: length-prefixed pickles over pipes.

Both ends are this package; the pickles never leave the two processes.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Request:
    """What the worker is asked to do.

    Attributes:
        kind: `run` a function, `build` the long-lived object, or `call` one of its methods.
        target: `module:name` for `run` and `build`, a method name for `call`.
    """

    kind: Literal["run", "build", "call"]
    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What came of a request; exactly one of `value`, `refusal` and `failure` carries it.

    Attributes:
        value: the result.
        refusal: class name and constructor arguments of a HermesError that was raised.
        failure: one line about any other exception.
        traceback: where it was raised in the worker.
        peak_memory: largest resident size of the worker so far, bytes.
    """

    value: Any = None
    refusal: tuple[str, Mapping[str, Any]] | None = None
    failure: str | None = None
    traceback: str = ""
    peak_memory: int = 0


def pack(message: Request | Reply) -> bytes:
    """The message with its length in front."""
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


def unpack(data: bytes | bytearray) -> Request | Reply | None:
    """The message in `data`, or None while it is incomplete."""
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    if len(data) < _LENGTH.size + length:
        return None
    message = pickle.loads(memoryview(data)[_LENGTH.size : _LENGTH.size + length])
    if not isinstance(message, (Request, Reply)):
        raise pickle.UnpicklingError(f"a {type(message).__name__} is no message")
    return message


def read_message(fd: int) -> Request | Reply | None:
    """Block until one whole message has come; None at the end of the pipe."""
    header = _read_exactly(fd, _LENGTH.size)
    if header is None:
        return None
    body = _read_exactly(fd, _LENGTH.unpack(header)[0])
    return None if body is None else unpack(header + body)


def write_message(fd: int, message: Request | Reply) -> None:
    """Write the whole message."""
    view = memoryview(pack(message))
    while view:
        view = view[os.write(fd, view) :]


def _read_exactly(fd: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = os.read(fd, min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)
