"""A damaged bundle gives one clear error and never ends the process."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import toy_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.bundle import BundleSpec, read_bundle, write_bundle
from converters.bundle_header import HEADER_BEGIN
from hermes.errors import BadInputError
from hermes.tokenizer import PromptContract
from hermes.tokenizer.huggingface import read_tokenizer_json

JSON = read_tokenizer_json(json.dumps(toy_tokenizers.byte_level_json()).encode(), "toy")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "m.tflite").write_bytes(bytes(range(256)) * 200)
    spec = BundleSpec(folder / "m.tflite", JSON, PromptContract(1, (2,)), 64, {"a": "b"}, (5, 6))
    write_bundle(spec, folder / "good")
    return (folder / "good").read_bytes()


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(BadInputError) as caught:
        _ = read_bundle(path).tokenizer
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_not_a_bundle(tmp_path: Path) -> None:
    assert "LITERTLM" in refused(tmp_path / "x", b"")
    assert "LITERTLM" in refused(tmp_path / "x", b"PK\x03\x04" * 20)
    with pytest.raises(BadInputError, match="absent"):
        read_bundle(tmp_path / "absent")


def test_cut_short_anywhere(good: bytes, tmp_path: Path) -> None:
    for size in (9, 31, 40, 500, 16384, 40000, len(good) - 1):
        refused(tmp_path / "x", good[:size])


def test_one_flipped_bit_in_every_section(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(good)
    for section in read_bundle(tmp_path / "x").sections:
        damaged = bytearray(good)
        damaged[section.offset + section.size // 2] ^= 0x10
        assert section.kind in refused(tmp_path / "x", bytes(damaged))


def test_without_hashes_a_flipped_weight_goes_unseen(good: bytes, tmp_path: Path) -> None:
    """The planted fault above is caught by the checksum and by nothing else."""
    path = tmp_path / "x"
    path.write_bytes(good)
    model = read_bundle(path).section("TFLiteModel")
    damaged = bytearray(good)
    damaged[model.offset] ^= 1
    path.write_bytes(damaged)
    assert read_bundle(path, hashes=False).section("TFLiteModel").sha256 == ""


@pytest.mark.parametrize("end", [0, 31, 32, 2**40, 2**64 - 1])
def test_header_ends_nowhere(good: bytes, tmp_path: Path, end: int) -> None:
    refused(tmp_path / "x", good[:24] + struct.pack("<Q", end) + good[32:])


def test_another_major_version(good: bytes, tmp_path: Path) -> None:
    assert "version" in refused(tmp_path / "x", good[:8] + struct.pack("<I", 2) + good[12:])


def test_a_zip_bomb_tokenizer(good: bytes, tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "x"
    path.write_bytes(good)
    section = read_bundle(path).section("HF_Tokenizer_Zlib")
    damaged = bytearray(good)
    damaged[section.offset : section.offset + 8] = struct.pack("<Q", 2**50)
    stored = bytes(damaged[section.offset : section.offset + section.size])
    # Keep the checksum right, so that the size field itself must be refused.
    old, new = section.sha256.encode(), hashlib.sha256(stored).hexdigest().encode()
    assert "tokenizer section" in refused(path, bytes(damaged).replace(old, new))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_headers(
    good: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    end = struct.unpack("<Q", good[24:32])[0]
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, end - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(damaged)
    try:
        bundle = read_bundle(path)
    except BadInputError:
        return
    assert all(HEADER_BEGIN < s.offset < s.offset + s.size <= len(good) for s in bundle.sections)
