"""tokenizer.json: loaded by the Rust library that also sits in the runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hermes.errors import BadInputError, UnsupportedModelError
from hermes.tokenizer.proto import CONTROL, UNKNOWN, USER_DEFINED, Piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_LARGEST = 128 * 2**20
_EXERCISE = "a Word, 12 \u00e9\U0001f60a\n\u0378"

# What the runtime 0.18.1 loads, each type tried in it; it aborts the process for any other.
RUNTIME_TYPES: dict[str, frozenset[str]] = {
    "model": frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"}),
    "normalizer": frozenset(
        {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"}
        | {"Prepend", "Replace", "Sequence", "Strip", "StripAccents", "ByteLevel"}
    ),
    "pre_tokenizer": frozenset(
        {
            "BertPreTokenizer",
            "ByteLevel",
            "CharDelimiterSplit",
            "Digits",
            "FixedLength",
            "Metaspace",
        }
        | {"Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
    ),
    "post_processor": frozenset(
        {"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"}
    ),
    "decoder": frozenset(
        {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace"}
        | {"Sequence", "Strip", "WordPiece"}
    ),
}
_NESTED = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}

# Kinds of vocabulary entries that become added tokens, which count in text.
MATCHED = (UNKNOWN, CONTROL, USER_DEFINED)


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A tokenizer.json, used and shipped as it is: its bytes are never rebuilt as SentencePiece.

    A byte-level BPE turned into a SentencePiece proto gives other ids for every accented letter
    and emoji (google-ai-edge/litert-torch#1205).
    """

    data: bytes
    origin: str
    kind: Literal["huggingface"] = "huggingface"
    begin_id: int | None = None
    end_id: int | None = None

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise BadInputError(f"{self.origin}: the tokenizer has no tokens")

    @cached_property
    def _tokenizer(self) -> RustTokenizer:
        return _load(self.data, self.origin)

    @cached_property
    def _pieces(self) -> dict[int, str]:
        return {token: piece for piece, token in self._tokenizer.get_vocab().items()}

    @cached_property
    def vocab_size(self) -> int:
        return max(self._pieces, default=-1) + 1

    def encode(self, text: str) -> list[int]:
        with _rust_errors(self.origin):
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        self._check(ids)
        with _rust_errors(self.origin):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, piece: str) -> int | None:
        token_id = self._tokenizer.token_to_id(piece)
        return None if token_id is None else int(token_id)

    def piece(self, token_id: int) -> str:
        self._check([token_id])
        return self._pieces.get(token_id, "")

    @cached_property
    def settings(self) -> Mapping[str, object]:
        """The parsed tokenizer.json."""
        return parse(self.data, self.origin)

    @cached_property
    def special_pieces(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {str(token.content): int(token_id) for token_id, token in added.items()}

    def leading_ids(self) -> list[int]:
        plain = self.encode("a")
        processed = list(self._tokenizer.encode("a").ids)
        for start in range(len(processed) - len(plain) + 1):
            if processed[start : start + len(plain)] == plain:
                return processed[:start]
        return []

    def _check(self, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise IndexError(f"id {token} is outside the tokenizer's {self.vocab_size} ids")


def read_tokenizer_json(data: bytes, origin: str) -> HuggingFaceTokenizer:
    """A tokenizer from the bytes of a tokenizer.json, with truncation and padding removed.

    The runtime applies both sections: a prompt would silently be cut or padded.

    Raises:
        BadInputError: not JSON, or a tokenizer the library refuses.
        UnsupportedModelError: a component type that aborts the runtime.
    """
    settings = parse(data, origin)
    _refuse_unknown_types(settings, origin)
    if settings.get("truncation") is not None or settings.get("padding") is not None:
        settings = {**settings, "truncation": None, "padding": None}
        data = json.dumps(settings, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    return HuggingFaceTokenizer(data, origin)


def added_token(token_id: int, piece: Piece) -> dict[str, object]:
    """An entry of the section `added_tokens`."""
    return {
        "id": token_id,
        "content": piece.text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": piece.kind != USER_DEFINED,
    }


def parse(data: bytes, origin: str) -> dict[str, object]:
    """The JSON object in the bytes."""
    if len(data) > _LARGEST:
        raise BadInputError(f"{origin}: {len(data)} bytes, too large for a tokenizer")
    try:
        settings = json.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadInputError(f"{origin}: not readable as JSON: {error}") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        raise BadInputError(
            f"{origin}: no tokenizer in it",
            expected="a tokenizer.json as written by the Hugging Face tokenizers library",
        )
    return settings


def _refuse_unknown_types(settings: Mapping[str, object], origin: str) -> None:
    problems = [
        f"{part} type {name!r} is not one of {', '.join(sorted(RUNTIME_TYPES[part]))}"
        for part in RUNTIME_TYPES
        for name in _type_names(settings.get(part), _NESTED.get(part, ""))
        if name not in RUNTIME_TYPES[part]
    ]
    if problems:
        raise UnsupportedModelError(
            f"{origin}: the runtime cannot load this tokenizer",
            problems=problems,
            todo="save the tokenizer with components from these lists",
        )


def _type_names(part: object, nested: str) -> Iterator[str]:
    pending = [part]
    while pending:
        current = pending.pop()
        if isinstance(current, dict):
            # Files of old library versions leave the model's type out; the library then tries each.
            if "type" in current:
                yield str(current["type"])
            inner = current.get(nested)
            pending.extend(inner if isinstance(inner, list) else [])


def _load(data: bytes, origin: str) -> RustTokenizer:
    from tokenizers import Tokenizer as RustTokenizer

    with _rust_errors(origin):
        tokenizer = RustTokenizer.from_str(data.decode("utf-8"))
        # Some contradictions (an unk token outside the vocabulary) show only at work.
        tokenizer.decode(tokenizer.encode(_EXERCISE).ids)
    return tokenizer


@contextmanager
def _rust_errors(origin: str) -> Iterator[None]:
    try:
        yield
    # A panic of the Rust library is a BaseException of its own class.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadInputError(
            f"{origin}: not a usable tokenizer: {error}",
            expected="a tokenizer.json as written by the Hugging Face tokenizers library",
            todo="save it again with a current version of the library",
        ) from error
