"""Rules about the tokenizer section."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from hermes.deploy.lint import RuleBook
from hermes.deploy.lint_facts import BundleFacts
from hermes.errors import BadInputError, UnsupportedModelError

if TYPE_CHECKING:
    from hermes.tokenizer.interface import Tokenizer

BOOK = RuleBook()
_JSON = "HF_Tokenizer_Zlib"


@dataclass(frozen=True)
class _Opened:
    """A tokenizer, or why there is none."""

    tokenizer: Tokenizer | None = None
    damage: str = ""
    unsupported: tuple[str, ...] = ()


def opened(facts: BundleFacts) -> Tokenizer | None:
    """The tokenizer as the runtime uses it; None if there is not exactly one that loads."""
    if len(facts.tokenizers) != 1 or facts.tokenizers[0].problem:
        return None
    return _open(facts.tokenizers[0].kind, facts.tokenizers[0].data).tokenizer


@lru_cache(maxsize=4)
def _open(kind: str, data: bytes) -> _Opened:
    from hermes.tokenizer.huggingface import read_tokenizer_json
    from hermes.tokenizer.sentencepiece import SentencePieceTokenizer

    try:
        if kind == _JSON:
            return _Opened(read_tokenizer_json(data, "tokenizer"))
        return _Opened(SentencePieceTokenizer(data, "tokenizer"))
    except UnsupportedModelError as error:
        return _Opened(unsupported=error.problems or (error.found,))
    except BadInputError as error:
        return _Opened(damage=error.found)


def _each(facts: BundleFacts) -> Iterator[_Opened]:
    for section in facts.tokenizers:
        if section.problem:
            yield _Opened(damage=section.problem)
        else:
            yield _open(section.kind, section.data)


@BOOK.rule(
    "tokenizer-count",
    "error",
    "The runtime takes one tokenizer section: with none the engine is not created, and of two "
    "nothing says which one it takes.",
    "bundle exactly one: tokenizer.json or a SentencePiece model",
)
def tokenizer_count(facts: BundleFacts) -> Iterator[str]:
    if len(facts.tokenizers) != 1:
        yield f"{len(facts.tokenizers)} tokenizer sections"


@BOOK.rule(
    "tokenizer-damaged",
    "error",
    "A tokenizer that cannot be loaded ends the process of the app.",
    "bundle the tokenizer's file again",
)
def tokenizer_damaged(facts: BundleFacts) -> Iterator[str]:
    for entry in _each(facts):
        if entry.damage:
            yield entry.damage


@BOOK.rule(
    "tokenizer-type",
    "error",
    "The runtime's tokenizer library knows fewer components than the Python package, and aborts "
    "the process at an unknown one.",
    "save the tokenizer with components that the runtime has",
)
def tokenizer_type(facts: BundleFacts) -> Iterator[str]:
    for entry in _each(facts):
        yield from entry.unsupported


@BOOK.rule(
    "tokenizer-cuts",
    "error",
    "The runtime applies the truncation and padding sections of tokenizer.json: prompts are "
    "silently cut short or filled up.",
    "set truncation and padding to null in tokenizer.json",
)
def tokenizer_cuts(facts: BundleFacts) -> Iterator[str]:
    for section in facts.tokenizers:
        if section.kind != _JSON or section.problem:
            continue
        try:
            settings = json.loads(section.data)
        except ValueError:
            continue
        for part in ("truncation", "padding"):
            if isinstance(settings, dict) and settings.get(part) is not None:
                yield f"tokenizer.json has a {part} section"
