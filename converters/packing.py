"""Serialise a TFLite model as fast as Python can.

The generated classes pack a flatbuffer value by value, seconds for a header of many thousand
operators. This writer builds each table with one `struct` call, and writes equal strings, vectors
and option tables once, which the format allows: a flatbuffer is a graph of offsets. Like the
official builder it works from the end to the beginning, so that what a table refers to is there.

A model with a field that `TABLES` does not list is refused, and the generated classes pack it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flatbuffers
import numpy as np

_OFFSET = "I"


class Field(NamedTuple):
    """A field of a table: the object's attribute, its number in the schema, and what it holds.

    `kind` is a struct format with a default, or `text`, `tables`, `table`, `options`, or the numpy
    type of a vector.
    """

    attribute: str
    slot: int
    kind: str
    default: int = 0


TABLES: dict[str, tuple[Field, ...]] = {
    "ModelT": (
        Field("version", 0, "I"),
        Field("operatorCodes", 1, "tables"),
        Field("subgraphs", 2, "tables"),
        Field("description", 3, "text"),
        Field("buffers", 4, "tables"),
        Field("metadataBuffer", 5, "int32"),
        Field("metadata", 6, "tables"),
        Field("signatureDefs", 7, "tables"),
    ),
    "OperatorCodeT": (
        Field("deprecatedBuiltinCode", 0, "b"),
        Field("customCode", 1, "text"),
        Field("version", 2, "i", 1),
        Field("builtinCode", 3, "i"),
    ),
    "SubGraphT": (
        Field("tensors", 0, "tables"),
        Field("inputs", 1, "int32"),
        Field("outputs", 2, "int32"),
        Field("operators", 3, "tables"),
        Field("name", 4, "text"),
        Field("debugMetadataIndex", 5, "i", -1),
    ),
    "TensorT": (
        Field("shape", 0, "int32"),
        Field("type", 1, "b"),
        Field("buffer", 2, "I"),
        Field("name", 3, "text"),
        Field("quantization", 4, "table"),
        Field("isVariable", 5, "?"),
        Field("shapeSignature", 7, "int32"),
        Field("hasRank", 8, "?"),
        Field("externalBuffer", 10, "I"),
    ),
    "QuantizationParametersT": (
        Field("min", 0, "float32"),
        Field("max", 1, "float32"),
        Field("scale", 2, "float32"),
        Field("zeroPoint", 3, "int64"),
        Field("quantizedDimension", 6, "i"),
    ),
    "OperatorT": (
        Field("opcodeIndex", 0, "I"),
        Field("inputs", 1, "int32"),
        Field("outputs", 2, "int32"),
        Field("builtinOptionsType", 3, "B"),
        Field("builtinOptions", 4, "options"),
        Field("customOptions", 5, "uint8"),
        Field("customOptionsFormat", 6, "b"),
        Field("builtinOptions2Type", 11, "B"),
        Field("builtinOptions2", 12, "options"),
        Field("debugMetadataIndex", 13, "i", -1),
    ),
    "BufferT": (Field("data", 0, "uint8"), Field("offset", 1, "Q"), Field("size", 2, "Q")),
    "MetadataT": (Field("name", 0, "text"), Field("buffer", 1, "I")),
    "SignatureDefT": (
        Field("inputs", 0, "tables"),
        Field("outputs", 1, "tables"),
        Field("signatureKey", 2, "text"),
        Field("subgraphIndex", 4, "I"),
    ),
    "TensorMapT": (Field("name", 0, "text"), Field("tensorIndex", 1, "I")),
}
_ALIGNMENT = {("BufferT", "data"): 16}


class UnknownFieldError(Exception):
    """The model uses a field that is not written here; says which."""


def pack_quickly(model: Any, identifier: bytes) -> bytes:
    """The ModelT as a flatbuffer.

    Raises:
        UnknownFieldError: the generated classes are needed.
    """
    writer = _Writer()
    root = writer.table(model)
    return writer.finish(root, identifier)


class _Layout(NamedTuple):
    """How a table with a certain set of fields is written."""

    packer: struct.Struct
    vtable: int
    # (position of the value in the packed arguments, offset of the field in the table)
    offsets: tuple[tuple[int, int], ...]


class _Writer:
    """Positions count from the end of the buffer: what is written later has a larger one."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._known: dict[object, int] = {}
        self._layouts: dict[tuple[tuple[int, str], ...], _Layout] = {}
        self._others: dict[str, list[str]] = {}

    def finish(self, root: int, identifier: bytes) -> bytes:
        """The whole buffer, its beginning aligned for everything in it."""
        self._align(8, 16)
        position = self._size + 8
        self._pieces.append(struct.pack("<I", position - root) + identifier)
        return b"".join(reversed(self._pieces))

    def _align(self, length: int, alignment: int) -> None:
        """Fill up so that the next `length` bytes begin at a multiple of the alignment."""
        missing = -(self._size + length) % alignment
        if missing:
            self._pieces.append(bytes(missing))
            self._size += missing

    def _add(self, data: bytes, alignment: int, head: int = 0) -> int:
        """Write bytes that begin, after their first `head`, at a multiple of the alignment."""
        self._align(len(data) - head, alignment)
        if head and (self._size + len(data)) % 4:
            raise AssertionError("a vector's length must be aligned")
        self._pieces.append(data)
        self._size += len(data)
        return self._size

    def _shared(self, key: object, write: Callable[[], int]) -> int:
        position = self._known.get(key)
        if position is None:
            position = self._known[key] = write()
        return position

    def text(self, value: str | bytes) -> int:
        """A string."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        packed = struct.pack("<I", len(data)) + data + b"\0" * (4 - len(data) % 4)
        return self._shared(("text", data), lambda: self._add(packed, 4))

    def vector(self, values: Any, kind: str, alignment: int) -> int:
        """A vector of numbers."""
        array = np.ascontiguousarray(values, dtype=kind)
        data = array.tobytes()
        alignment = max(alignment, array.itemsize, 4)
        packed = struct.pack("<I", len(array)) + data + bytes(-len(data) % 4)
        key = (alignment, kind, packed)

        def write() -> int:
            # The elements are aligned, the length stands right before them.
            return self._add(packed, alignment, 4) if alignment > 4 else self._add(packed, 4)

        return self._shared(key, write)

    def tables(self, values: Sequence[Any]) -> int:
        """A vector of tables."""
        positions = np.array([self.table(value) for value in reversed(values)][::-1], np.int64)
        count = len(positions)
        self._align(4 + 4 * count, 4)
        begin = self._size + 4 * count
        offsets = begin - 4 * np.arange(count) - positions
        return self._add(struct.pack("<I", count) + offsets.astype("<u4").tobytes(), 4)

    def table(self, value: Any) -> int:
        """An object of the generated classes."""
        name = _name(value)
        if name == "QuantizationParametersT":
            # One object for all tensors that refer to it.
            return self._shared(("object", id(value)), lambda: self._table(value, name))
        return self._table(value, name)

    def _table(self, value: Any, name: str) -> int:
        present: list[tuple[int, str]] = []
        numbers: list[int] = []
        for attribute, slot, kind, default in self._fields_of(value, name):
            held = getattr(value, attribute)
            if len(kind) == 1:
                if held != default:
                    present.append((slot, kind))
                    numbers.append(held)
            elif held is not None:
                present.append((slot, _OFFSET + "*"))
                numbers.append(self._child(held, kind, _ALIGNMENT.get((name, attribute), 4)))
        return self._packed(tuple(present), numbers)

    def _child(self, held: Any, kind: str, alignment: int) -> int:
        if kind == "text":
            return self.text(held)
        if kind == "tables":
            return self.tables(held)
        if kind == "table":
            return self.table(held)
        if kind == "options":
            return self._options(held)
        return self.vector(held, kind, alignment)

    def _packed(self, present: tuple[tuple[int, str], ...], numbers: list[int]) -> int:
        layout = self._layouts.get(present)
        if layout is None:
            layout = self._layouts[present] = self._lay_out(present)
        size = layout.packer.size
        self._align(size, 8)
        position = self._size + size
        for index, offset in layout.offsets:
            numbers[index] = position - offset - numbers[index]
        return self._add(layout.packer.pack(layout.vtable - position, *numbers), 8)

    def _lay_out(self, present: tuple[tuple[int, str], ...]) -> _Layout:
        """Fields in the given order after the vtable's offset, each aligned by padding."""
        text, offset, places, pointers = "<i", 4, {}, []
        for index, (slot, kind) in enumerate(present):
            size = struct.calcsize(kind[0])
            missing = -offset % size
            text, offset = text + "x" * missing, offset + missing
            places[slot] = offset
            if kind.endswith("*"):
                pointers.append((index, offset))
            text, offset = text + kind[0], offset + size
        text += "x" * (-offset % 8)
        packer = struct.Struct(text)
        slots = [places.get(slot, 0) for slot in range(max(places, default=-1) + 1)]
        vtable = struct.pack(f"<HH{len(slots)}H", 4 + 2 * len(slots), packer.size, *slots)
        return _Layout(packer, self._add(vtable + bytes(-len(vtable) % 4), 4), tuple(pointers))

    def _fields_of(self, value: Any, name: str) -> tuple[Field, ...]:
        fields = TABLES[name]
        if name not in self._others:
            known = {field.attribute for field in fields}
            own = [attribute for attribute in vars(value) if attribute[0] != "_"]
            self._others[name] = [attribute for attribute in own if attribute not in known]
        for attribute in self._others[name]:
            if _is_set(getattr(value, attribute)):
                raise UnknownFieldError(f"{name}.{attribute}")
        return fields

    def _options(self, value: Any) -> int:
        """A table of any class, packed by its own code; equal ones are written once."""
        return self._shared(("options", _frozen(value)), lambda: self._foreign(value))

    def _foreign(self, value: Any) -> int:
        builder = flatbuffers.Builder(64)
        root = value.Pack(builder)
        builder.Finish(root)
        data = bytes(builder.Output())
        # What was built alone stays together: all its offsets are relative.
        begin = struct.unpack_from("<I", data)[0]
        end = self._add(data + bytes(-len(data) % 16), 16)
        return end - int(begin)


def _name(value: Any) -> str:
    for kind in type(value).__mro__:
        if kind.__name__ in TABLES:
            return kind.__name__
    raise UnknownFieldError(type(value).__name__)


def _is_set(held: Any) -> bool:
    return held is not None and not (isinstance(held, (int, float)) and held == 0)


def _frozen(value: Any) -> object:
    """A schema object as a value that can be compared and hashed."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if hasattr(value, "__dict__"):
        return type(value).__name__, *((k, _frozen(v)) for k, v in vars(value).items())
    return value
