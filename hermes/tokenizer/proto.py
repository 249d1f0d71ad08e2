"""The few fields of a SentencePiece model proto that Hermes writes, in protobuf's wire format.

The numbers are those of sentencepiece_model.proto (google/sentencepiece). Written by hand because
the Python package of protobuf is not among the dependencies of `hermes`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_VARINT, _BYTES, _FLOAT = 0, 2, 5
_BPE = 2


@dataclass(frozen=True)
class Piece:
    """One vocabulary entry: spelling, merge score, and one of the kinds above."""

    text: str
    score: float
    kind: int


def varint(value: int) -> bytes:
    """Base-128 little-endian form of a non-negative integer below 2**64."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return varint(field << 3 | _VARINT) + varint(value & (2**64 - 1))


def _block(field: int, payload: bytes) -> bytes:
    return varint(field << 3 | _BYTES) + varint(len(payload)) + payload


def encode_pieces(pieces: Iterable[Piece]) -> bytes:
    """Entries of `ModelProto.pieces`; appended to a finished proto they extend its vocabulary."""
    out = bytearray()
    for piece in pieces:
        body = _block(1, piece.text.encode("utf-8"))
        body += varint(2 << 3 | _FLOAT) + struct.pack("<f", piece.score)
        out += _block(1, body + _number(3, piece.kind))
    return bytes(out)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of every field; fixed-width values as their bytes."""
    position = 0

    def next_varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        tag = next_varint()
        wire = tag & 7
        if wire == _VARINT:
            yield tag >> 3, next_varint()
            continue
        size = next_varint() if wire == _BYTES else {_FLOAT: 4, 1: 8}[wire]
        yield tag >> 3, data[position : position + size]
        position += size


def decode_pieces(data: bytes) -> list[Piece]:
    """The vocabulary of a model proto that the library has loaded."""
    pieces = []
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            fields = dict(_fields(value))
            text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
            assert isinstance(text, bytes)
            assert isinstance(score, bytes)
            kind = fields.get(3, NORMAL)
            pieces.append(
                Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], int(cast(int, kind)))
            )
    return pieces


@dataclass(frozen=True)
class ModelSettings:
    """What a model does with text besides looking up pieces."""

    is_bpe: bool
    is_identity: bool
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def decode_settings(data: bytes) -> ModelSettings:
    """Kind and normalisation of a model proto that the library has loaded."""
    blocks: dict[int, dict[int, int | bytes]] = {2: {}, 3: {}}
    for number, value in _fields(data):
        if number in blocks and isinstance(value, bytes):
            blocks[number].update(_fields(value))
    trainer, normalizer = blocks[2], blocks[3]
    # Defaults of the proto: unigram, with the prefix, extra white space removed.
    return ModelSettings(
        is_bpe=trainer.get(3, 1) == _BPE,
        is_identity=not normalizer.get(2, b""),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def encode_bpe_model(
    pieces: list[Piece],
    *,
    special_ids: dict[str, int],
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
) -> bytes:
    """A SentencePiece BPE model with identity normalisation, as Llama's is.

    Args:
        pieces: the vocabulary in id order.
        special_ids: ids of `unk`, `bos`, `eos` and `pad`; absent ones are written as -1.
        add_dummy_prefix: a space goes before the text.
        remove_extra_whitespaces: runs of spaces shrink to one.
    """
    fields = {"unk": (40, 45), "bos": (41, 46), "eos": (42, 47), "pad": (43, 48)}
    trainer = _number(3, _BPE) + _number(4, len(pieces))
    trainer += _number(35, int(any(piece.kind == BYTE for piece in pieces)))
    for name, (id_field, piece_field) in fields.items():
        token_id = special_ids.get(name, -1)
        trainer += _number(id_field, token_id)
        if token_id >= 0:
            trainer += _block(piece_field, pieces[token_id].text.encode("utf-8"))
    normalizer = _block(1, b"identity") + _number(3, int(add_dummy_prefix))
    normalizer += _number(4, int(remove_extra_whitespaces)) + _number(5, 1)
    return encode_pieces(pieces) + _block(2, trainer) + _block(3, normalizer)
