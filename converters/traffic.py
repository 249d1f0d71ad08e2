"""What one decoded token has to read from memory, from the decode graph of a finished bundle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converters.bundle import Bundle, Section, read_bundle
from converters.inspection import mapped_model, operator_name_of, stored_bytes
from hermes.signatures import DECODE

_BRANCH = re.compile(rf"{DECODE}:attention_(\d+)$")
"""Names of the subgraphs that `converters.branches` makes."""
_LOOKUPS = ("EMBEDDING_LOOKUP", "GATHER")
_ITEM_BYTES = {0: 4, 1: 2, 2: 4, 3: 1, 4: 8, 9: 1, 17: 1}
"""TensorType -> bytes: float32, float16, int32, uint8, int64, int8, int4 (unpacked)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes per decoded token.

    Attributes:
        weights: every constant that decode reads whole; of a looked-up table only one row.
        cache: the KV cache, whole.
        operators: of the decode graph.
        context: slots of the cache.
        widths: slots that attention looks at while no later one is written, if not all.
    """

    weights: int
    cache: int
    operators: int
    context: int = 0
    widths: tuple[int, ...] = ()

    def at(self, position: int) -> int:
        """Bytes read when the token at `position` is fed: weights and the slots looked at."""
        fitting = [width for width in self.widths if position < width]
        seen = min(fitting, default=self.context)
        return self.weights + (self.cache * seen // self.context if self.context else self.cache)

    def mean(self, first: int, count: int) -> float:
        """Of `count` tokens from position `first` on."""
        return sum(self.at(position) for position in range(first, first + count)) / count


def decode_traffic(path: Path) -> Traffic:
    """Summed over the bundle's model sections that have a `decode`.

    Raises:
        BadInputError: not a bundle, or damaged.
    """
    bundle = read_bundle(path)
    parts = [
        _section_traffic(bundle, section)
        for section in bundle.sections
        if section.kind == "TFLiteModel"
    ]
    return Traffic(
        sum(part.weights for part in parts),
        sum(part.cache for part in parts),
        sum(part.operators for part in parts),
        max((part.context for part in parts), default=0),
        tuple(sorted({width for part in parts for width in part.widths})),
    )


def _section_traffic(bundle: Bundle, section: Section) -> Traffic:
    with mapped_model(bundle, section) as model:
        for index in range(model.SignatureDefsLength()):
            signature = model.SignatureDefs(index)
            if signature.SignatureKey().decode() == DECODE:
                return _decode_of(model, signature)
    return Traffic(0, 0, 0)


def _decode_of(model: Any, signature: Any) -> Traffic:
    graph = model.Subgraphs(signature.SubgraphIndex())
    inputs = {
        entry.Name().decode(): graph.Tensors(entry.TensorIndex())
        for entry in (signature.Inputs(index) for index in range(signature.InputsLength()))
    }
    cache = sum(_tensor_bytes(tensor) for name, tensor in inputs.items() if "cache" in name)
    mask = inputs.get("mask")
    context = mask.Shape(mask.ShapeLength() - 1) if mask is not None else 0
    names = (model.Subgraphs(index).Name() or b"" for index in range(model.SubgraphsLength()))
    widths = [int(found[1]) for name in names if (found := _BRANCH.match(name.decode()))]
    narrow = tuple(sorted(width for width in widths if width < context))
    return Traffic(_weight_bytes(model, graph), cache, graph.OperatorsLength(), context, narrow)


def _weight_bytes(model: Any, graph: Any) -> int:
    """Constants that decode reads, each buffer once however many operators read it."""
    read: dict[int, int] = {}
    for index in range(graph.OperatorsLength()):
        operator = graph.Operators(index)
        name = operator_name_of(model.OperatorCodes(operator.OpcodeIndex()))
        for position in range(operator.InputsLength()):
            tensor = (
                graph.Tensors(operator.Inputs(position)) if operator.Inputs(position) >= 0 else None
            )
            size = stored_bytes(model.Buffers(tensor.Buffer())) if tensor is not None else 0
            if tensor is None or not size:
                continue
            if name in _LOOKUPS:
                size //= max(1, tensor.Shape(0))
            read[tensor.Buffer()] = max(size, read.get(tensor.Buffer(), 0))
    return sum(read.values())


def _tensor_bytes(tensor: Any) -> int:
    shape = [tensor.Shape(axis) for axis in range(tensor.ShapeLength())]
    return int(np.prod(shape)) * _ITEM_BYTES.get(tensor.Type(), 4)
