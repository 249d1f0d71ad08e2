"""The float form of a bundle: its own graph, with float weights where the stored ones are.

Nothing is traced: rung 4 compares the very graph that is in the bundle. The traced name of a weight
input stays with the constant that took its place, so a weight is found by name.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ai_edge_litert import schema_py_generated as schema

from converters.flatbuffer import pack_model
from converters.unpacking import multiply_as_stored
from hermes.config import HermesConfig
from hermes.errors import BadInputError, NativeToolError
from hermes.recipe import GraphOptions
from hermes.signatures import GraphWeight, graph_weights

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 64
_SCALES = b":scales"
_WEIGHT = re.compile(rb"_weights_(?P<name>[a-z_]+(_\d+)?)$")


def rebind_floats(
    bound: Path,
    config: HermesConfig,
    options: GraphOptions,
    weights: Mapping[str, Tensor],
    target: Path,
) -> None:
    """Write `bound` with every weight as float32.

    Args:
        bound: a model that `bind_weights` wrote.
        config: the model.
        options: graph choices it was made with.
        weights: Hermes parameter name -> float32 tensor, as rewritten for the bundle.
        target: .tflite to write.

    Raises:
        BadInputError: the file has other weights than the model.
    """
    wanted = {weight.name: weight for weight in graph_weights(config, options)}
    wanted = {name: weight for name, weight in wanted.items() if weight.kind != "bias"}
    model = _read_header(bound)
    buffers = _find_weights(model, wanted, bound)
    # Without scales the header is shorter than it was, so the first constant may stay in place.
    first = offset = min(buffer.offset for buffer in buffers.values())
    with target.open("wb") as file:
        for name, buffer in buffers.items():
            file.seek(offset)
            buffer.offset, buffer.size = offset, _write_rows(wanted[name], weights, file)
            offset = _aligned(offset + buffer.size)
        file.truncate(offset)
        header = pack_model(model)
        if len(header) > first:
            raise NativeToolError(f"the header of the float form grew over its {first} bytes")
        file.seek(0)
        file.write(header)


def _read_header(path: Path) -> Any:
    """The file's ModelT; constants behind the flatbuffer are not read."""
    with path.open("rb") as file:
        # The object's arrays are views of the mapping, which lives as long as they do.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return schema.ModelT.InitFromPackedBuf(mapped, 0)


def _find_weights(model: Any, wanted: Mapping[str, GraphWeight], path: Path) -> dict[str, Any]:
    """Weight name -> its buffer; the tensors that read it become float32."""
    found: dict[str, Any] = {}
    problems = []
    for subgraph in model.subgraphs:
        weights: set[int] = set()
        for index, tensor in enumerate(subgraph.tensors):
            if (tensor.name or b"").endswith(_SCALES):
                _empty(model, tensor)
            match = _WEIGHT.search(tensor.name or b"")
            if match is None:
                continue
            name, buffer = match["name"].decode(), model.buffers[tensor.buffer]
            if name not in wanted or tuple(tensor.shape) != wanted[name].shape:
                problems.append(f"{name} {list(tensor.shape)} is none of the model's weights")
            elif found.setdefault(name, buffer) is not buffer:
                problems.append(f"{name} is stored twice")
            weights.add(index)
            tensor.type, tensor.quantization = schema.TensorType.FLOAT32, None
        multiply_as_stored(model, subgraph, weights)
    problems += [f"{name} is missing" for name in wanted if name not in found]
    if problems:
        raise BadInputError(
            f"{path}: not the graph of this model",
            problems=problems[:10],
            todo="compare with the checkpoint and recipe that the bundle was made from",
        )
    return {name: found[name] for name in wanted}


def _empty(model: Any, tensor: Any) -> None:
    """Scales of blocks, which nothing reads any more."""
    buffer = model.buffers[tensor.buffer]
    buffer.data, buffer.offset, buffer.size = None, 0, 0
    tensor.buffer = 0


def _write_rows(weight: GraphWeight, weights: Mapping[str, Tensor], file: IO[bytes]) -> int:
    """The weight's parts one after the other; their bytes."""
    return sum(file.write(weights[part].numpy().data) for part in weight.parts)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
