"""SentencePiece models: what they answer and what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import sentencepiece
import toy_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.errors import BadInputError
from hermes.tokenizer.proto import CONTROL, USER_DEFINED, Piece, encode_pieces
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer

MODEL = toy_tokenizers.sentencepiece_model(user_defined_symbols=["<turn>"])


def test_equal_to_the_library() -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=MODEL)
    ours = SentencePieceTokenizer(MODEL, "toy")
    assert ours.vocab_size == library.get_piece_size()
    for text in toy_tokenizers.random_texts(200):
        ids = ours.encode(text)
        assert ids == library.encode(text)
        assert ours.decode(ids) == library.decode(ids)
    assert ours.data == MODEL


def test_ids_pieces_and_kinds() -> None:
    ours = SentencePieceTokenizer(MODEL, "toy")
    assert (ours.begin_id, ours.end_id) == (1, 2)
    assert ours.token_id("<turn>") == 3
    assert ours.token_id("no such piece") is None
    assert ours.token_id("<unk>") == 0
    assert ours.special_pieces == {"<s>": 1, "</s>": 2, "<turn>": 3}
    assert ours.encode("<turn>")[-1] == 3
    assert 1 not in ours.encode("<s>")
    with pytest.raises(IndexError, match="outside"):
        ours.decode([ours.vocab_size])


def test_pieces_read_from_the_proto_agree_with_the_library() -> None:
    ours = SentencePieceTokenizer(MODEL, "toy")
    library = sentencepiece.SentencePieceProcessor(model_proto=MODEL)
    assert [piece.text for piece in ours.pieces] == [
        library.id_to_piece(i) for i in range(library.get_piece_size())
    ]
    assert [piece.score for piece in ours.pieces] == [
        library.get_score(i) for i in range(library.get_piece_size())
    ]
    control = [piece.kind == CONTROL for piece in ours.pieces]
    assert control == [library.is_control(i) for i in range(library.get_piece_size())]


def test_extension_appends_matching_symbols() -> None:
    ours = SentencePieceTokenizer(MODEL, "toy")
    longer = ours.extended(["<|im_start|>", "<|im_end|>"])
    assert longer.vocab_size == ours.vocab_size + 2
    ids = longer.encode("hello<|im_end|>")
    assert ids[-1] == ours.vocab_size + 1
    assert longer.decode(ids) == "hello<|im_end|>"
    assert longer.encode("hello world") == ours.encode("hello world")


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "SentencePiece"),
        (b"garbage that is no proto", "SentencePiece"),
        (MODEL[: len(MODEL) // 2], "SentencePiece"),
        (b'{"model": {}}', "tokenizer.json"),
        (b"IQ== 0\nIg== 1\n", "tiktoken"),
        (MODEL + encode_pieces([Piece("<turn>", 0.0, USER_DEFINED)]), "SentencePiece"),
        (MODEL + encode_pieces([Piece("nul\0", 0.0, USER_DEFINED)]), "SentencePiece"),
        (encode_pieces([Piece("a", 0.0, 1)]), "SentencePiece"),
    ],
)
def test_damaged_models_are_refused(data: bytes, word: str) -> None:
    with pytest.raises(BadInputError) as caught:
        SentencePieceTokenizer(data, "some/tokenizer.model")
    assert word in str(caught.value)
    assert "some/tokenizer.model" in str(caught.value)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_mutated_models_never_end_the_process(data: st.DataObject) -> None:
    raw = bytearray(MODEL)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadInputError):
        SentencePieceTokenizer(bytes(raw), "mutated").encode("the cat")


def test_opening_reports_the_path(tmp_path: Path) -> None:
    from hermes.tokenizer import open_tokenizer

    (tmp_path / "tokenizer.model").write_bytes(MODEL)
    assert str(tmp_path) in open_tokenizer(tmp_path).origin
