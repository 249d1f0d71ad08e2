"""What a bundle contains: sections, prompt metadata, signatures, and how constants are stored."""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from converters.bundle import Bundle, Section, read_bundle
from converters.flatbuffer import OPERATOR_NAMES
from hermes.errors import BadInputError
from hermes.signatures import Signature, TensorSpec

_TYPES = {v: k.lower() for k, v in vars(schema.TensorType).items() if isinstance(v, int)}


def inspect_bundle(path: Path) -> dict[str, Any]:
    """Facts as JSON values, from the file alone.

    Raises:
        BadInputError: not a bundle, or damaged.
    """
    bundle = read_bundle(path)
    prompt = bundle.prompt
    return {
        "path": str(path),
        "bytes": bundle.size,
        "version": ".".join(str(number) for number in bundle.version),
        "metadata": {key: str(value) for key, value in bundle.metadata.items()},
        "sections": [
            {"kind": s.kind, "offset": s.offset, "bytes": s.size, "sha256": s.sha256}
            for s in bundle.sections
        ],
        "prompt": {
            "start_token": prompt.start_token,
            "stop_tokens": list(prompt.stop_tokens),
            "max_num_tokens": prompt.max_num_tokens,
            "suppressed_tokens": len(prompt.suppress_tokens),
            "model_type": prompt.model_type,
            "chat_template": prompt.chat_template,
        },
        "models": [
            _inspect_model(bundle, section)
            for section in bundle.sections
            if section.kind == "TFLiteModel"
        ],
    }


def _inspect_model(bundle: Bundle, section: Section) -> dict[str, Any]:
    with mapped_model(bundle, section) as model:
        signatures = [
            _signature(model, model.SignatureDefs(index))
            for index in range(model.SignatureDefsLength())
        ]
        return {"signatures": signatures, "constants": _constants(model)}


@contextmanager
def mapped_model(bundle: Bundle, section: Section) -> Iterator[Any]:
    """The flatbuffer's `schema.Model`, mapped from the bundle; nothing of it may be kept.

    Raises:
        BadInputError: what is read inside the block turns out to be damaged.
    """
    with bundle.path.open("rb") as file:
        # Mapped whole: an mmap offset would have to be page aligned.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        data = memoryview(mapped)[section.offset : section.offset + section.size]
        yield schema.Model.GetRootAs(data, 0)
    except (struct.error, LookupError, TypeError, AttributeError, ValueError) as error:
        raise BadInputError(f"{bundle.path}: damaged model section: {error}") from error


def _signature(model: Any, signature: Any) -> dict[str, Any]:
    graph = model.Subgraphs(signature.SubgraphIndex())
    names = Counter(
        operator_name_of(model.OperatorCodes(graph.Operators(index).OpcodeIndex()))
        for index in range(graph.OperatorsLength())
    )
    return {
        "name": signature.SignatureKey().decode(),
        "inputs": [
            _tensor(graph, signature.Inputs(index)) for index in range(signature.InputsLength())
        ],
        "outputs": [
            _tensor(graph, signature.Outputs(index)) for index in range(signature.OutputsLength())
        ],
        "operators": dict(names.most_common()),
    }


def operator_name_of(code: Any) -> str:
    """The builtin operator's name of a mapped operator code."""
    number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    return OPERATOR_NAMES.get(number, str(number))


def _tensor(graph: Any, entry: Any) -> dict[str, Any]:
    tensor = graph.Tensors(entry.TensorIndex())
    return {
        "name": entry.Name().decode(),
        "type": _TYPES[tensor.Type()],
        "shape": [tensor.Shape(axis) for axis in range(tensor.ShapeLength())],
    }


def _constants(model: Any) -> dict[str, dict[str, int]]:
    """Stored form -> number of constants and their bytes, each buffer counted once."""
    groups: dict[str, dict[str, int]] = {}
    seen: set[int] = set()
    for position in range(model.SubgraphsLength()):
        graph = model.Subgraphs(position)
        for index in range(graph.TensorsLength()):
            tensor = graph.Tensors(index)
            size = stored_bytes(model.Buffers(tensor.Buffer()))
            if not size or tensor.Buffer() in seen:
                continue
            seen.add(tensor.Buffer())
            group = groups.setdefault(_stored_form(tensor), {"tensors": 0, "bytes": 0})
            group["tensors"] += 1
            group["bytes"] += size
    return groups


def stored_bytes(buffer: Any) -> int:
    """Size of a mapped buffer's constant, 0 for computed tensors."""
    # Big constants lie behind the flatbuffer: offset and size instead of data.
    return int(buffer.Size()) if buffer.Offset() > 1 else int(buffer.DataLength())


def _stored_form(tensor: Any) -> str:
    name = str(_TYPES[tensor.Type()])
    quantization = tensor.Quantization()
    scales = quantization.ScaleLength() if quantization is not None else 0
    if not scales:
        return name
    return f"{name} per tensor" if scales == 1 else f"{name} per channel"


def read_signatures(bundle: Bundle) -> tuple[Signature, ...]:
    """The model's signatures as its flatbuffer says, without loading it into an interpreter."""
    described = _inspect_model(bundle, bundle.section("TFLiteModel"))["signatures"]
    return tuple(_as_signature(entry) for entry in described)


def _as_signature(entry: dict[str, Any]) -> Signature:
    def specs(kind: str) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(t["name"], tuple(t["shape"]), t["type"]) for t in entry[kind])

    inputs = specs("inputs")
    length = next((spec.shape[-1] for spec in inputs if spec.name == "tokens"), 0)
    return Signature(entry["name"], length, inputs, specs("outputs"))
