"""Rung 6: the runtime sees text and conversations exactly as training did."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from hermes.recipe import ExportShapes
from hermes.report.check import Check, at_most, equals, holds
from hermes.runners.interface import TokenRunner
from hermes.tokenizer.interface import PromptContract, Tokenizer
from hermes.tokenizer.probes import PROBES
from hermes.verify.limits import check_limits

RANDOM_TEXTS = 64
_SHOWN = 3


class BundlePrompt(Protocol):
    """What the bundle's metadata says about prompts."""

    @property
    def suppress_tokens(self) -> tuple[int, ...]: ...
    @property
    def max_num_tokens(self) -> int: ...


def check_prompt(
    open_runtime: Callable[[], AbstractContextManager[TokenRunner]],
    tokenizer: Tokenizer,
    contract: PromptContract,
    suppressed: tuple[int, ...],
    bundle: BundlePrompt,
    shapes: ExportShapes | None = None,
) -> list[Check]:
    """Compare the bundle, in the runtime, with the training tokenizer and its conventions.

    Args:
        open_runtime: opens the bundle in LiteRT-LM.
        tokenizer: the training tokenizer.
        contract: the prompt contract of the checkpoint.
        suppressed: ids that must never be emitted.
        bundle: the bundle's own metadata.
        shapes: context and prefill lengths of the model, None if unknown.
    """
    checks = [_same("suppressed rows of a padded vocabulary", suppressed, bundle.suppress_tokens)]
    if shapes is not None:
        detail = "the runtime believes the metadata, and writes past the end of a smaller cache"
        announced = bundle.max_num_tokens
        checks.append(at_most("context the bundle announces", 6, announced, shapes.context, detail))
        checks += check_limits(shapes.context, shapes.prefill)
    with open_runtime() as runtime:
        # As the runtime resolved them: metadata may give ids, spellings and sequences.
        checks.append(
            _same("start token", _ids(contract.start_token_id), _ids(runtime.start_token))
        )
        checks += _check_stops(runtime, contract)
        checks += _check_tokenizer(runtime, tokenizer)
        checks += _check_template(runtime, contract)
        checks += _check_start(runtime, tokenizer)
    return checks


def probe_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts that tokenizers get wrong: added tokens, every byte, scripts, spaces, noise.

    U+0000 is left out: the runtime's interface ends a text there.
    """
    for piece in _marked_pieces(tokenizer):
        yield piece
        yield f"a{piece} b\n{piece}"
    # Latin-1 and its neighbours whole; then a character for every first byte that UTF-8 has.
    yield from (chr(code) for code in range(1, 0x180))
    yield from (chr(code) for code in range(0x180, 0x800, 0x40))
    yield from (chr(code) for code in range(0x1000, 0x110000, 0x1000) if code & 0xFF800 != 0xD800)
    yield from ("你好，世界", "日本語のテキスト", "한국어", "Привет", "\u0627\u0644\u0639", "हिन्दी")
    yield from (
        "\U0001f60a",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "e\u0301 o\u0308",
        "\u00a0",
    )
    yield from (" ", "  ", "   x", "x   ", "\n", "\n\n", " \n ", "\t\tx", "a\r\nb", "1234567 3.14")
    yield from ("It's we're I'd", "def f(x):\n    return x ** 2\n", "https://a.b/c?d=e#f")
    source = random.Random(6)
    alphabet = "abc XYZ\n.,!?019'\"\u00e9\u00df\u4e2d\U0001f60a\t<>|_"
    for _ in range(RANDOM_TEXTS):
        yield "".join(source.choices(alphabet, k=source.randint(1, 40)))
    # Random letters rarely meet two merges that compete; the vocabulary's own pieces do.
    for _ in range(RANDOM_TEXTS):
        ids = [source.randrange(tokenizer.vocab_size) for _ in range(source.randint(2, 24))]
        yield tokenizer.decode(ids).replace("\0", "")


def _marked_pieces(tokenizer: Tokenizer) -> list[str]:
    """Added, control and user-defined tokens, and whatever else looks like one."""
    pieces = dict.fromkeys(piece for piece in tokenizer.special_pieces if piece)
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.piece(token_id)
        if piece.startswith("<") and piece.endswith(">"):
            pieces[piece] = None
    return [piece for piece in pieces if not piece.startswith("<0x")]


def _check_tokenizer(runtime: TokenRunner, tokenizer: Tokenizer) -> list[Check]:
    texts = list(probe_texts(tokenizer))
    other, lossy = [], []
    for text in texts:
        wanted, found = tokenizer.encode(text), runtime.tokenize(text)
        if found != wanted:
            other.append(f"{text!r}: {found[:8]}, training has {wanted[:8]}")
        elif tokenizer.decode(wanted) != runtime.detokenize(found):
            lossy.append(repr(text))
    detail = f"{len(texts)} texts"
    return [
        equals("texts with other token ids in the runtime", 6, len(other), 0, _few(other, detail)),
        equals("texts that decode differently", 6, len(lossy), 0, _few(lossy, detail)),
    ]


def _check_template(runtime: TokenRunner, contract: PromptContract) -> list[Check]:
    if contract.chat_template is None:
        return []
    wrong = []
    for name, wanted in contract.prompts.items():
        found = runtime.render(PROBES[name])
        if found != wanted:
            wrong.append(f"{name}: {found[:60]!r}, training has {wanted[:60]!r}")
    detail = f"{len(contract.prompts)} conversations"
    return [equals("conversations rendered differently", 6, len(wrong), 0, _few(wrong, detail))]


def _check_stops(runtime: TokenRunner, contract: PromptContract) -> list[Check]:
    """Every stop token of training ends an answer, and nothing else does."""
    wanted = set(contract.stop_token_ids)
    single = {rule[0] for rule in runtime.stop_tokens if len(rule) == 1}
    missing = sorted(wanted - single)
    # A sequence with a stop token in it never comes to its end: the token has ended the answer.
    surplus = [list(rule) for rule in runtime.stop_tokens if not wanted & set(rule)]
    return [
        equals("stop tokens the runtime does not know", 6, len(missing), 0, str(missing or "")),
        equals("stop tokens that training does not know", 6, len(surplus), 0, str(surplus or "")),
    ]


def _check_start(runtime: TokenRunner, tokenizer: Tokenizer) -> list[Check]:
    """Count what the runtime really feeds for a raw text."""
    text = "Hello"
    fed = runtime.generate(text, 1).prompt_tokens
    wanted = len(tokenizer.encode(text)) + (runtime.start_token is not None)
    detail = f"{text!r} with the start token {runtime.start_token}"
    return [equals("tokens fed for a raw text", 6, fed, wanted, detail)]


def _same(name: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> Check:
    detail = "" if wanted == found else f"the bundle has {list(found)}, training {list(wanted)}"
    value = ", ".join(map(str, found[:8])) or "none"
    return holds(f"{name} as in training", 6, wanted == found, value, detail)


def _ids(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)


def _few(found: list[str], otherwise: str) -> str:
    return "; ".join(found[:_SHOWN]) if found else otherwise
