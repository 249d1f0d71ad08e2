"""SentencePiece models: loaded by the library that also sits in the runtime."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hermes.errors import BadInputError
from hermes.tokenizer.proto import CONTROL, USER_DEFINED, Piece, decode_pieces, encode_pieces

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

# Real models are below 10 MB; the limit keeps a wrong file (weights) from being parsed.
_LARGEST = 128 * 2**20


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """A SentencePiece model proto; BPE or unigram, with or without byte fallback.

    Raises:
        BadInputError: the bytes are no loadable model.
    """

    data: bytes
    origin: str
    kind: Literal["sentencepiece"] = "sentencepiece"

    def __post_init__(self) -> None:
        try:
            pieces = self.pieces
        except (UnicodeDecodeError, LookupError, AssertionError, struct.error) as error:
            raise BadInputError(f"{self.origin}: damaged SentencePiece model: {error}") from error
        if not 0 < self.vocab_size == len(pieces):
            raise BadInputError(
                f"{self.origin}: the SentencePiece model has {self.vocab_size} loaded and "
                f"{len(pieces)} stored pieces"
            )

    @cached_property
    def _processor(self) -> SentencePieceProcessor:
        return _load(self.data, self.origin)

    @cached_property
    def vocab_size(self) -> int:
        return int(self._processor.get_piece_size())

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._processor.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        self._check(ids)
        return str(self._processor.decode([int(token) for token in ids]))

    def token_id(self, piece: str) -> int | None:
        # An unknown piece gets the id of <unk>, so the way back decides.
        token_id = int(self._processor.piece_to_id(piece))
        in_range = 0 <= token_id < self.vocab_size
        return token_id if in_range and self.piece(token_id) == piece else None

    def piece(self, token_id: int) -> str:
        self._check([token_id])
        return str(self._processor.id_to_piece(int(token_id)))

    @cached_property
    def pieces(self) -> list[Piece]:
        """The vocabulary with scores and kinds, in id order."""
        _ = self._processor  # the library refuses what is no model before the bytes are walked
        return decode_pieces(self.data)

    @cached_property
    def special_pieces(self) -> dict[str, int]:
        kinds = (CONTROL, USER_DEFINED)
        return {piece.text: i for i, piece in enumerate(self.pieces) if piece.kind in kinds}

    def leading_ids(self) -> list[int]:
        return []

    @property
    def begin_id(self) -> int | None:
        """The model's own begin-of-sentence id."""
        token_id = int(self._processor.bos_id())
        return token_id if token_id >= 0 else None

    @property
    def end_id(self) -> int | None:
        """The model's own end-of-sentence id."""
        token_id = int(self._processor.eos_id())
        return token_id if token_id >= 0 else None

    def extended(self, pieces: Sequence[str]) -> SentencePieceTokenizer:
        """The same model with more user-defined symbols at the end of its vocabulary."""
        added = encode_pieces(Piece(text, 0.0, USER_DEFINED) for text in pieces)
        return SentencePieceTokenizer(self.data + added, self.origin)

    def _check(self, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise IndexError(f"id {token} is outside the tokenizer's {self.vocab_size} ids")


def _load(data: bytes, origin: str) -> SentencePieceProcessor:
    from sentencepiece import SentencePieceProcessor

    if len(data) > _LARGEST:
        raise BadInputError(
            f"{origin}: {len(data)} bytes, too large for a tokenizer",
            expected=f"a SentencePiece model below {_LARGEST} bytes",
        )
    try:
        # An empty proto makes the constructor skip loading, so loading is asked for by name.
        processor = SentencePieceProcessor()
        processor.LoadFromSerializedProto(data)
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise BadInputError(
            f"{origin}: not a SentencePiece model: {_first_line(error)}",
            expected="a model proto as written by the SentencePiece trainer",
            todo=_advice(data),
        ) from error
    return processor


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _advice(data: bytes) -> str:
    first = data[:200].split(b"\n", 1)[0].split(b" ")
    if len(first) == 2 and first[1].strip().isdigit():
        return (
            "this looks like a tiktoken rank file (original Llama 3 release); "
            "give the tokenizer.json of the same model instead"
        )
    if data[:1] == b"{":
        return "this looks like JSON; a tokenizer.json must keep its name"
    return "give the tokenizer.model that the model was trained with"
