"""A TFLite flatbuffer as editable objects.

Types come from the schema that ships with ai-edge-litert; its object classes end in `T`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flatbuffers
from ai_edge_litert import schema_py_generated as schema

from converters.flatbuffer_read import read_quickly
from converters.packing import UnknownFieldError, pack_quickly

OPERATOR_NAMES: dict[int, str] = {
    value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)
}
FILE_IDENTIFIER = b"TFL3"


def read_model(path: Path) -> Any:
    """The file's ModelT; its constants must lie inside the flatbuffer."""
    data = path.read_bytes()
    try:
        return read_quickly(data)
    except UnknownFieldError:
        return schema.ModelT.InitFromPackedBuf(data, 0)


def pack_model(model: Any) -> bytes:
    """Serialise a ModelT."""
    try:
        return pack_quickly(model, FILE_IDENTIFIER)
    except UnknownFieldError:
        return pack_officially(model)


def pack_officially(model: Any) -> bytes:
    """Serialise a ModelT with its generated classes."""
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), FILE_IDENTIFIER)
    return bytes(builder.Output())


def operator_name(model: Any, operator: Any) -> str:
    """The builtin operator's name, e.g. `FULLY_CONNECTED`."""
    code = model.operatorCodes[operator.opcodeIndex]
    # Codes below 127 are kept in the field that older readers know.
    return OPERATOR_NAMES[max(code.builtinCode, code.deprecatedBuiltinCode)]


def signature_inputs(signature: Any) -> dict[str, int]:
    """Input name -> tensor index in the signature's subgraph."""
    return {entry.name.decode(): entry.tensorIndex for entry in signature.inputs}


def signature_outputs(signature: Any) -> dict[str, int]:
    """Output name -> tensor index in the signature's subgraph."""
    return {entry.name.decode(): entry.tensorIndex for entry in signature.outputs}


class SharedQuantization(schema.QuantizationParametersT):  # type: ignore[misc]
    """Per-channel scales written once however many tensors refer to them."""

    def __init__(self) -> None:
        super().__init__()
        self._written: tuple[Any, int] | None = None

    def Pack(self, builder: Any) -> int:  # noqa: N802  (the generated method's name)
        if self._written is None or self._written[0] is not builder:
            self._written = (builder, super().Pack(builder))
        return self._written[1]
