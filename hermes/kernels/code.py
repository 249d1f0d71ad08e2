"""Writes one function for LLVM, and makes machine code of it.

A thin layer over llvmlite: arguments by kind, loops as `with` blocks, vectors of eight.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numpy.typing import NDArray

LANES = 8
"""Values of a vector: what an AVX register holds of float32; elsewhere LLVM takes several."""

Value = Any
"""llvmlite's values have no type that a checker knows."""

_POINTER, _INTEGER = ir.PointerType(), ir.IntType(64)
_ELEMENTS = {
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
    "int8": ir.IntType(8),
}
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Array:
    """An argument: a pointer, and the dtype of what it points to."""

    code: Code
    pointer: Value
    element: Value

    def at(self, index: Value) -> Array:
        """The array from this index on."""
        moved = self.code.build.gep(self.pointer, [index], source_etype=self.element)
        return Array(self.code, moved, self.element)

    def load(self) -> Value:
        """The first values as a vector."""
        kind = ir.VectorType(self.element, LANES)
        return self.code.build.load(self.pointer, typ=kind, align=self._align)

    def store(self, vector: Value) -> None:
        """Put a vector's values first."""
        self.code.build.store(vector, self.pointer, align=self._align)

    def splat(self) -> Value:
        """The first value in all places of a vector."""
        build = self.code.build
        value = build.load(self.pointer, typ=self.element, align=self._align)
        undefined = ir.Constant(ir.VectorType(self.element, LANES), ir.Undefined)
        single = build.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
        return self.code.pick(single, [0] * LANES)

    @property
    def _align(self) -> int:
        # Of one value: numpy promises no more.
        return {"float": 4, "double": 8, "i8": 1}[str(self.element)]


class Code:
    """A function in the making.

    Args:
        name: for debuggers.
        arguments: dtype of each array argument, or "integer".
    """

    def __init__(self, name: str, arguments: tuple[str, ...]) -> None:
        self.name = name
        self._kinds = arguments
        self.module = ir.Module(name=name)
        kinds = [_INTEGER if kind == "integer" else _POINTER for kind in arguments]
        self._function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), kinds), name)
        self.build = ir.IRBuilder(self._function.append_basic_block())
        self.arguments: tuple[Any, ...] = tuple(
            given if kind == "integer" else Array(self, given, _ELEMENTS[kind])
            for kind, given in zip(arguments, self._function.args, strict=True)
        )

    def integer(self, value: int) -> Value:
        """A constant index."""
        return ir.Constant(_INTEGER, value)

    def pick(self, vector: Value, places: list[int]) -> Value:
        """The vector's values at these places."""
        kind = ir.VectorType(ir.IntType(32), len(places))
        undefined = ir.Constant(vector.type, ir.Undefined)
        return self.build.shuffle_vector(vector, undefined, ir.Constant(kind, places))

    def intrinsic(self, name: str, kind: Value) -> Value:
        """LLVM's own function of one vector."""
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(kind, [kind]), name)

    @contextmanager
    def loop(self, stop: Value, step: int = 1) -> Iterator[Value]:
        """What is written within is done for 0, step, 2 step and so on below `stop`."""
        build, function = self.build, self._function
        before, head = build.block, function.append_basic_block()
        body, after = function.append_basic_block(), function.append_basic_block()
        build.branch(head)
        build.position_at_end(head)
        index = build.phi(_INTEGER)
        index.add_incoming(self.integer(0), before)
        build.cbranch(build.icmp_unsigned("<", index, stop), body, after)
        build.position_at_end(body)
        yield index
        index.add_incoming(build.add(index, self.integer(step)), build.block)
        build.branch(head)
        build.position_at_end(after)

    def compiled(self) -> Callable[..., None]:
        """The function for numpy arrays of these dtypes, C-contiguous, and for integers."""
        self.build.ret_void()
        engine, address = _machine_code(str(self.module), self.name)
        kinds = [ctypes.c_int64 if kind == "integer" else ctypes.c_void_p for kind in self._kinds]
        # ctypes lets go of Python's lock.
        native = ctypes.CFUNCTYPE(None, *kinds)(address)
        dtypes = [None if kind == "integer" else np.dtype(kind) for kind in self._kinds]

        def call(*given: NDArray[Any] | int) -> None:
            native(*(_passed(one, dtype) for one, dtype in zip(given, dtypes, strict=True)))

        call.__dict__["engine"] = engine  # The code lives as long as the function.
        return call


def _passed(given: NDArray[Any] | int, dtype: np.dtype[Any] | None) -> int:
    if not isinstance(given, np.ndarray):
        return given
    if given.dtype != dtype or not given.flags.c_contiguous:
        raise TypeError(f"{given.dtype} array of {given.strides} for a contiguous {dtype} one")
    address: int = given.__array_interface__["data"][0]
    return address


def _machine_code(text: str, name: str) -> tuple[object, int]:
    with _LOCK:
        machine = _machine()
        module = binding.parse_assembly(text)
        engine = binding.create_mcjit_compiler(module, machine())
        engine.finalize_object()
        return engine, engine.get_function_address(name)


@functools.cache
def _machine() -> Callable[[], Any]:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    return functools.partial(
        target.create_target_machine,
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=2,
    )
