"""What is packed quickly reads back as what the generated classes pack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from flatbuffers.number_types import Int32Flags
from graph_models import tiny_model

from converters import packing
from converters.direct import record_skeleton
from converters.flatbuffer import (
    FILE_IDENTIFIER,
    SharedQuantization,
    pack_model,
    pack_officially,
    read_model,
)
from converters.flatbuffer_read import read_quickly
from converters.layer_block import plain
from converters.packing import UnknownFieldError, pack_quickly
from hermes.recipe import ExportShapes, GraphOptions


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real graph: six kinds of options, biases, three signatures."""
    config, _ = tiny_model(2, extras=True, tied=False)
    path = tmp_path_factory.mktemp("packing") / "graph.tflite"
    record_skeleton(config, ExportShapes(16, (2, 4)), GraphOptions(False, False), path)
    return path


@pytest.fixture
def model(traced: Path) -> Any:
    return read_model(traced)


def unpacked(data: bytes) -> Any:
    return plain(schema.ModelT.InitFromPackedBuf(data, 0))


def quantize(model: Any) -> None:
    """One table of scales for two tensors, and a buffer outside the flatbuffer."""
    shared = SharedQuantization()
    shared.scale = np.arange(3, dtype=np.float32)
    shared.zeroPoint = np.zeros(3, dtype=np.int64)
    shared.quantizedDimension = 0
    for tensor in model.subgraphs[0].tensors[:2]:
        tensor.quantization = shared
    buffer = schema.BufferT()
    buffer.offset, buffer.size = 2**33, 2**32 + 5
    model.buffers.append(buffer)


def odd_values(model: Any) -> None:
    model.description = "a model"
    model.subgraphs[0].tensors[0].isVariable = True
    model.subgraphs[0].tensors[0].shapeSignature = np.array([-1, 2], np.int32)
    model.operatorCodes[0].version = 7
    model.operatorCodes[0].customCode = "custom"
    model.subgraphs[1].operators[0].customOptions = np.arange(5, dtype=np.uint8)
    model.subgraphs[1].name = ""
    model.subgraphs[1].operators[1].inputs = np.array([], np.int32)


def as_traced(_: Any) -> None:
    return None


@pytest.mark.parametrize("change", [as_traced, quantize, odd_values])
def test_reads_back_as_the_official_bytes(model: Any, change: Callable[[Any], None]) -> None:
    change(model)
    quick = pack_quickly(model, FILE_IDENTIFIER)
    assert unpacked(quick) == unpacked(pack_officially(model))
    assert quick[4:8] == FILE_IDENTIFIER
    assert pack_model(model) == quick
    assert pack_quickly(model, FILE_IDENTIFIER) == quick


@pytest.mark.parametrize("change", [as_traced, quantize, odd_values])
@pytest.mark.parametrize("pack", [pack_model, pack_officially])
def test_is_read_as_by_the_official_classes(
    model: Any, change: Callable[[Any], None], pack: Callable[[Any], bytes]
) -> None:
    change(model)
    data = pack(model)
    assert plain(read_quickly(data)) == unpacked(data)


def test_a_field_that_is_not_known_is_read_officially(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the reader's table of fields lacks one that the file has."""
    path = tmp_path / "m.tflite"
    path.write_bytes(pack_model(model))
    fewer = tuple(field for field in packing.TABLES["SubGraphT"] if field.attribute != "name")
    monkeypatch.setitem(packing.TABLES, "SubGraphT", fewer)
    with pytest.raises(UnknownFieldError, match="SubGraphT: field 4"):
        read_quickly(path.read_bytes())
    assert plain(read_model(path)) == unpacked(path.read_bytes())


def test_everything_lies_where_its_type_wants_it(model: Any) -> None:
    quantize(model)
    data = pack_quickly(model, FILE_IDENTIFIER)
    packed = schema.Model.GetRootAs(data, 0)
    positions: dict[int, list[int]] = {2: [], 4: [], 8: [], 16: []}
    for index in range(packed.BuffersLength()):
        table = packed.Buffers(index)._tab
        for entry, alignment in ((4, 16), (6, 8), (8, 8)):
            offset = table.Offset(entry)
            if offset:
                place = table.Vector(offset) if entry == 4 else table.Pos + offset
                positions[alignment].append(place)
    for number in range(packed.SubgraphsLength()):
        graph = packed.Subgraphs(number)
        for index in range(graph.TensorsLength()):
            table = graph.Tensors(index)._tab
            positions[4].append(table.Pos)
            positions[2].append(table.Pos - table.Get(Int32Flags, table.Pos))
    quantization = packed.Subgraphs(0).Tensors(0).Quantization()._tab
    assert quantization.Pos == packed.Subgraphs(0).Tensors(1).Quantization()._tab.Pos
    positions[8].append(quantization.Vector(quantization.Offset(10)))
    assert len(positions[16]) > 5
    for alignment, places in positions.items():
        assert places
        assert not [place for place in places if place % alignment]


def test_an_unknown_field_is_left_to_the_official_way(model: Any) -> None:
    model.subgraphs[0].operators[0].mutatingVariableInputs = np.array([True])
    with pytest.raises(UnknownFieldError, match=r"OperatorT\.mutatingVariableInputs"):
        pack_quickly(model, FILE_IDENTIFIER)
    assert pack_model(model) == pack_officially(model)


def test_a_wrong_field_would_be_seen(model: Any) -> None:
    before = unpacked(pack_quickly(model, FILE_IDENTIFIER))
    model.subgraphs[0].operators[3].outputs = model.subgraphs[0].operators[3].outputs + 1
    assert unpacked(pack_quickly(model, FILE_IDENTIFIER)) != before
