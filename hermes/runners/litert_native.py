"""The part of LiteRT's C interface that times operators, as the LiteRT-LM library exports it.

The Python packages have no profiler. `liblitert-lm.so` holds LiteRT and its kernels, so a profile
taken through it is one of the very code that generates. Options are TOML under an identifier.
Everything here belongs in a child process: a wrong call ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU = 1
_WRITE = 1


class LiteRtError(Exception):
    """A call returned a status other than 0."""


class _Memory(ctypes.Structure):
    _fields_ = (("allocated", ctypes.c_size_t), ("used", ctypes.c_size_t), ("own", ctypes.c_size_t))


class _Event(ctypes.Structure):
    _fields_ = (
        ("tag", ctypes.c_char_p),
        ("type", ctypes.c_int),
        ("start", ctypes.c_uint64),
        ("elapsed", ctypes.c_uint64),
        ("memory_before", _Memory),
        ("memory_after", _Memory),
        ("metadata1", ctypes.c_uint64),
        ("metadata2", ctypes.c_uint64),
        ("source", ctypes.c_int),
    )


@dataclass(frozen=True)
class Event:
    """One timed piece of work: its name, kind (a bit of TFLite's event types) and microseconds."""

    tag: str
    kind: int
    microseconds: int


class CompiledGraph:
    """One signature of a model that lies inside a file, with zeroed buffers and a profiler.

    An output with an input's name shares its buffer, as LiteRT-LM has it for the cache.

    Raises:
        LiteRtError: the library refused a call.
    """

    def __init__(self, path: Path, offset: int, size: int, signature: str, threads: int) -> None:
        self._library = _library()
        self._kept: list[Any] = []
        self._environment = self._make("LiteRtCreateEnvironment", 0, None)
        self._model = self._make(
            "LiteRtCreateModelFromBuffer",
            self._environment,
            ctypes.c_void_p(self._map(path) + offset),
            ctypes.c_size_t(size),
        )
        self._compiled = self._make(
            "LiteRtCreateCompiledModel", self._environment, self._model, self._options(threads)
        )
        self._index, handle = self._find(signature)
        self._buffers: dict[str, ctypes.c_void_p] = {}
        self._inputs = self._side(handle, "Input")
        self._outputs = self._side(handle, "Output")
        self._profiler = self._make("LiteRtCompiledModelGetProfiler", self._compiled)

    def run(self) -> None:
        """One call of the signature."""
        self._call(
            "LiteRtRunCompiledModel",
            self._compiled,
            self._index,
            ctypes.c_size_t(len(self._inputs)),
            self._inputs,
            ctypes.c_size_t(len(self._outputs)),
            self._outputs,
        )

    def set_positions(self, first: int, names: Sequence[str]) -> None:
        """Number the rows from `first` on, in the input that has one of these names.

        Raises:
            LiteRtError: no input has.
        """
        found = [self._buffers[name] for name in names if name in self._buffers]
        if not found:
            raise LiteRtError(f"no input {' or '.join(names)} among {', '.join(self._buffers)}")
        with self._locked(found[0]) as (address, size):
            rows = (ctypes.c_int32 * (size // 4)).from_address(address)
            rows[:] = list(range(first, first + len(rows)))

    def profile(self, runs: int) -> list[Event]:
        """Events of that many calls."""
        self._call("LiteRtResetProfiler", self._profiler)
        self._call("LiteRtStartProfiler", self._profiler)
        for _ in range(runs):
            self.run()
        self._call("LiteRtStopProfiler", self._profiler)
        count = ctypes.c_int()
        self._call("LiteRtGetNumProfilerEvents", self._profiler, ctypes.byref(count))
        events = (_Event * max(1, count.value))()
        if count.value:
            self._call("LiteRtGetProfilerEvents", self._profiler, count, events)
        return [
            Event((event.tag or b"").decode(errors="replace"), event.type, event.elapsed)
            for event in events[: count.value]
        ]

    def _options(self, threads: int) -> ctypes.c_void_p:
        options = self._make("LiteRtCreateOptions")
        self._call("LiteRtSetOptionsHardwareAccelerators", options, CPU)
        settings = {
            "runtime_options_string": "enable_profiling = true\n",
            # One packed copy of the weights for all signatures, and no file.
            "xnnpack": f'num_threads = {threads}\nweight_cache_file_path = ":memory"\n',
        }
        for identifier, text in settings.items():
            payload = ctypes.create_string_buffer(text.encode())
            release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_keep)
            self._kept += [payload, release]
            opaque = self._make("LiteRtCreateOpaqueOptions", identifier.encode(), payload, release)
            self._call("LiteRtAddOpaqueOptions", options, opaque)
        return options

    def _map(self, path: Path) -> int:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._kept.append(mapped)
        return ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def _find(self, name: str) -> tuple[ctypes.c_size_t, ctypes.c_void_p]:
        names = []
        for index in range(self._count("LiteRtGetNumModelSignatures", self._model)):
            number = ctypes.c_size_t(index)
            signature = self._make("LiteRtGetModelSignature", self._model, number)
            names.append(self._text("LiteRtGetSignatureKey", signature))
            if names[-1] == name:
                return number, signature
        raise LiteRtError(f"no signature {name} among {', '.join(names)}")

    def _side(self, signature: ctypes.c_void_p, side: str) -> ctypes.Array[ctypes.c_void_p]:
        handles = []
        for index in range(self._count(f"LiteRtGetNumSignature{side}s", signature)):
            number = ctypes.c_size_t(index)
            name = self._text(f"LiteRtGetSignature{side}Name", signature, number)
            if name not in self._buffers:
                self._buffers[name] = self._buffer(signature, side, number)
            handles.append(self._buffers[name].value)
        return (ctypes.c_void_p * len(handles))(*handles)

    def _buffer(
        self, signature: ctypes.c_void_p, side: str, number: ctypes.c_size_t
    ) -> ctypes.c_void_p:
        tensor = self._make(f"LiteRtGetSignature{side}TensorByIndex", signature, number)
        kind = ctypes.create_string_buffer(256)
        self._call("LiteRtGetRankedTensorType", tensor, kind)
        needs = self._make(
            f"LiteRtGetCompiledModel{side}BufferRequirements", self._compiled, self._index, number
        )
        buffer = self._make(
            "LiteRtCreateManagedTensorBufferFromRequirements", self._environment, kind, needs
        )
        with self._locked(buffer) as (address, size):
            ctypes.memset(address, 0, size)
        return buffer

    @contextmanager
    def _locked(self, buffer: ctypes.c_void_p) -> Iterator[tuple[int, int]]:
        """Address and bytes of a buffer, to be written."""
        size = self._count("LiteRtGetTensorBufferPackedSize", buffer)
        address = ctypes.c_void_p()
        self._call("LiteRtLockTensorBuffer", buffer, ctypes.byref(address), _WRITE)
        if address.value is None:
            raise LiteRtError("a tensor buffer has no memory")
        try:
            yield address.value, size
        finally:
            self._call("LiteRtUnlockTensorBuffer", buffer)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise LiteRtError(f"{name} returned status {status}")

    def _make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(name, *arguments, ctypes.byref(handle))
        return handle

    def _count(self, name: str, *arguments: Any) -> int:
        count = ctypes.c_size_t()
        self._call(name, *arguments, ctypes.byref(count))
        return count.value

    def _text(self, name: str, *arguments: Any) -> str:
        text = ctypes.c_char_p()
        self._call(name, *arguments, ctypes.byref(text))
        return (text.value or b"").decode()


def _library() -> ctypes.CDLL:
    import litert_lm

    folder = Path(litert_lm.__file__).parent
    found: Sequence[Path] = sorted(
        path for path in folder.iterdir() if path.suffix in (".so", ".dylib", ".dll")
    )
    if not found:
        raise LiteRtError(f"no native library in {folder}")
    return ctypes.CDLL(str(found[0]))


def _keep(_: int | None) -> None:
    """The payload belongs to Python."""
