"""Our safetensors reader and writer against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hermes.checkpoint import open_checkpoint
from hermes.checkpoint.safetensors_write import write_safetensors
from hermes.errors import BadInputError

TENSORS = {
    "b.float": torch.randn(6, 4),
    "a.half": torch.randn(3, 2).half(),
    "c.bfloat": torch.randn(5).bfloat16(),
    "d.scalar": torch.tensor(3.0),
    "e.empty": torch.empty(0, 3),
}


def test_reads_and_writes_what_the_library_does(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    found = open_checkpoint(path).tensors
    for name, value in load_file(path).items():
        assert torch.equal(found[name].read(), value)
        assert found[name].read().dtype == value.dtype
    assert torch.equal(found["b.float"].read(2, 5), TENSORS["b.float"][2:5])
    write_safetensors(tmp_path / "again.safetensors", found, {"format": "pt"})
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    assert not list(tmp_path.glob(".*"))


def craft(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)


def entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry([2], 0, 8)}, b"\0" * 4, "ends at byte 8"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12, "overlaps a"),
        ({"a": entry([2], 4, 12)}, b"\0" * 12, "4 unnamed bytes before"),
        ({"a": entry([2], 0, 8)}, b"\0" * 12, "4 unnamed bytes at the end"),
        ({"a": entry([3], 0, 8)}, b"\0" * 8, "needs 12 bytes"),
        ({"a": entry([2], 8, 0)}, b"\0" * 8, "give -8"),
        ({"a": entry([-2], 0, 8)}, b"\0" * 8, "not a list of sizes"),
        ({"a": entry([2.0], 0, 8)}, b"\0" * 8, "not a list of sizes"),
        ({"a": entry([2**62, 2**62], 0, 8)}, b"\0" * 8, "needs"),
        ({"a": entry([2], 0, 8, "Q9")}, b"\0" * 8, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "expected dtype, shape"),
        ({"a": 1}, b"", "expected dtype, shape"),
        (b'{"a": {"dtype"', b"", "not readable as JSON"),
        (b"[1]", b"", "holds a list"),
        (b"\xff\xfe{}", b"", "not readable as JSON"),
        (b"[" * 100_000, b"", "nested too deeply"),
        ({"__metadata__": {"a": 1}}, b"", "map from text to text"),
        ({}, b"", "no tensors"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    craft(tmp_path / "model.safetensors", header, data)
    with pytest.raises(BadInputError, match=message) as caught:
        open_checkpoint(tmp_path / "model.safetensors")
    assert "model.safetensors" in str(caught.value)


def test_duplicate_key_whose_offsets_fit(tmp_path: Path) -> None:
    one, two = json.dumps(entry([2], 0, 8)), json.dumps(entry([2], 8, 16))
    craft(tmp_path / "model.safetensors", f'{{"a": {one}, "a": {two}}}'.encode(), b"\0" * 16)
    with pytest.raises(BadInputError, match="'a' occurs twice"):
        open_checkpoint(tmp_path / "model.safetensors")


@pytest.mark.parametrize("length", [2**63, 10**9, 70])
def test_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    craft(tmp_path / "model.safetensors", {"a": entry([0], 0, 0)}, length=length)
    with pytest.raises(BadInputError, match="says its header has"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64)}, path)
    tensor = open_checkpoint(path).tensors["a"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadInputError, match="8 bytes too early"):
        tensor.read()


def test_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(BadInputError, match="git lfs pull"):
        open_checkpoint(tmp_path / "model.safetensors")
