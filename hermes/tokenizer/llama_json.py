"""A Llama-style SentencePiece model as tokenizer.json, for prompts with special tokens in them.

The SentencePiece library never recognises control symbols in text, so a chat template's `</s>`
would become letters. transformers and llama.cpp cut the text at special tokens first and encode
what is between them; tokenizer.json says exactly that. Only BPE models with identity normalisation
have an equal form there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from hermes.tokenizer.huggingface import (
    MATCHED,
    HuggingFaceTokenizer,
    added_token,
    read_tokenizer_json,
)
from hermes.tokenizer.proto import BYTE, NORMAL, UNKNOWN, Piece, decode_settings
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer

_SPACE = "\u2581"


def has_json_form(tokenizer: SentencePieceTokenizer) -> bool:
    """Whether the model is a BPE with byte fallback that does nothing to the text but spaces."""
    settings = decode_settings(tokenizer.data)
    return settings.is_bpe and settings.is_identity and not settings.remove_extra_whitespaces


def as_tokenizer_json(
    tokenizer: SentencePieceTokenizer, *, prefix_everywhere: bool
) -> HuggingFaceTokenizer:
    """The same tokenizer with its control and user-defined symbols matched in text.

    Args:
        tokenizer: one that `has_json_form`.
        prefix_everywhere: the space before the text also goes before the text after every special
            token (llama.cpp, and transformers' `legacy`), not only before the first.
    """
    pieces = tokenizer.pieces
    prefix = decode_settings(tokenizer.data).add_dummy_prefix
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), None)
    replace: dict[str, object]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizer: dict[str, object] | None = replace
    pre_tokenizer: dict[str, object] | None = None
    if prefix and prefix_everywhere:
        prepend = {"type": "Prepend", "prepend": _SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prepend, replace]}
    elif prefix:
        normalizer = None
        pre_tokenizer = {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": "first",
            "split": False,
        }
    settings = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, p) for i, p in enumerate(pieces) if p.kind in MATCHED],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": _decoder(strip=prefix),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": any(piece.kind == BYTE for piece in pieces),
            "ignore_merges": False,
            "vocab": {piece.text: index for index, piece in enumerate(pieces)},
            "merges": _merges(pieces),
        },
    }
    data = json.dumps(settings, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    built = read_tokenizer_json(data, f"{tokenizer.origin} (as tokenizer.json)")
    return HuggingFaceTokenizer(
        built.data, built.origin, begin_id=tokenizer.begin_id, end_id=tokenizer.end_id
    )


def _decoder(*, strip: bool) -> dict[str, object]:
    steps: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _merges(pieces: Sequence[Piece]) -> list[list[str]]:
    """Every way to join two pieces into a third, best score first.

    SentencePiece's BPE always joins the neighbours whose joint piece has the highest score, which
    is a merge list in the order of the scores.
    """
    ids = {piece.text: index for index, piece in enumerate(pieces) if piece.kind == NORMAL}
    found = []
    for text, index in ids.items():
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                found.append((-pieces[index].score, left, right, [text[:cut], text[cut:]]))
    found.sort(key=lambda entry: entry[:3])
    return [pair for *_, pair in found]
