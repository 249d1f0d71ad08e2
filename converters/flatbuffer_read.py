"""Read a TFLite model into the objects of the generated classes, a table at a time.

The generated classes look up every field of every table anew, seconds for many thousand operators.
Tables of one kind mostly have the same fields at the same places, so each such layout is worked out
once. The fields are those of `converters.packing.TABLES`; a model with another one is refused, and
the generated classes read it.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

from converters.packing import TABLES, Field, UnknownFieldError

_ROOT = "ModelT"
_CHILDREN = {
    ("ModelT", "operatorCodes"): "OperatorCodeT",
    ("ModelT", "subgraphs"): "SubGraphT",
    ("ModelT", "buffers"): "BufferT",
    ("ModelT", "metadata"): "MetadataT",
    ("ModelT", "signatureDefs"): "SignatureDefT",
    ("SubGraphT", "tensors"): "TensorT",
    ("SubGraphT", "operators"): "OperatorT",
    ("TensorT", "quantization"): "QuantizationParametersT",
    ("SignatureDefT", "inputs"): "TensorMapT",
    ("SignatureDefT", "outputs"): "TensorMapT",
}
_UNIONS = {
    "builtinOptions": ("builtinOptionsType", schema.BuiltinOptionsCreator),
    "builtinOptions2": ("builtinOptions2Type", schema.BuiltinOptions2Creator),
}
_U32, _I32, _U16 = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<H")


class _Place(NamedTuple):
    """A field that is present: where in its table, and how it is read."""

    field: Field
    offset: int
    number: struct.Struct | None
    child: str


def read_quickly(data: bytes) -> Any:
    """The ModelT of a flatbuffer from a trusted writer.

    Raises:
        UnknownFieldError: the generated classes are needed.
    """
    return _Reader(data).table(_U32.unpack_from(data)[0], _ROOT)


class _Reader:
    """Positions count from the beginning of the buffer."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._layouts: dict[tuple[int, str], list[_Place]] = {}
        self._defaults = {name: vars(getattr(schema, name)()) for name in TABLES}

    def table(self, position: int, name: str) -> Any:
        """An object of the class of that name."""
        data = self._data
        vtable = position - _I32.unpack_from(data, position)[0]
        places = self._layouts.get((vtable, name))
        if places is None:
            places = self._layouts[vtable, name] = self._layout(vtable, name)
        kind = getattr(schema, name)
        made = kind.__new__(kind)
        held = made.__dict__
        held.update(self._defaults[name])
        for field, offset, number, child in places:
            at = position + offset
            if number is not None:
                held[field.attribute] = number.unpack_from(data, at)[0]
            else:
                at += _U32.unpack_from(data, at)[0]
                held[field.attribute] = self._child(at, field, child, held)
        return made

    def _child(self, at: int, field: Field, child: str, held: dict[str, Any]) -> Any:
        data = self._data
        if field.kind == "options":
            member, create = _UNIONS[field.attribute]
            return create(held[member], flatbuffers.table.Table(data, at))
        if field.kind == "table":
            return self.table(at, child)
        count = _U32.unpack_from(data, at)[0]
        if field.kind == "text":
            return data[at + 4 : at + 4 + count]
        if field.kind == "tables":
            offsets = struct.unpack_from(f"<{count}I", data, at + 4)
            return [self.table(at + 4 + 4 * i + o, child) for i, o in enumerate(offsets)]
        return np.frombuffer(data, field.kind, count, at + 4)

    def _layout(self, vtable: int, name: str) -> list[_Place]:
        size = _U16.unpack_from(self._data, vtable)[0]
        slots = struct.unpack_from(f"<{size // 2 - 2}H", self._data, vtable + 4)
        fields = {field.slot: field for field in TABLES[name]}
        places = []
        for slot, offset in enumerate(slots):
            if not offset:
                continue
            if slot not in fields:
                raise UnknownFieldError(f"{name}: field {slot}")
            field = fields[slot]
            number = struct.Struct("<" + field.kind) if len(field.kind) == 1 else None
            places.append(_Place(field, offset, number, _CHILDREN.get((name, field.attribute), "")))
        return places
