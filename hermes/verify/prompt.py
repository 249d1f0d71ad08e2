"""Rung 6: the runtime sees text and conversations exactly as training did."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from hermes.report.check import Check, at_most, equals, holds
from hermes.runners.interface import TokenRunner
from hermes.tokenizer.interface import PromptContract, Tokenizer
from hermes.tokenizer.probes import PROBES

RANDOM_TEXTS = 64
_SHOWN = 3


class BundlePrompt(Protocol):
    """What the bundle's metadata says about prompts."""

    @property
    def start_token_id(self) -> int | None: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
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
    capacity: int | None = None,
) -> list[Check]:
    """Compare the bundle, in the runtime, with the training tokenizer and its conventions.

    Args:
        open_runtime: opens the bundle in LiteRT-LM.
        tokenizer: the training tokenizer.
        contract: the prompt contract of the checkpoint.
        suppressed: ids that must never be emitted.
        bundle: the bundle's own metadata.
        capacity: slots of the model's cache, None if unknown.
    """
    checks = [
        _same("start token", _ids(contract.start_token_id), _ids(bundle.start_token_id)),
        _same("stop tokens", contract.stop_token_ids, tuple(sorted(bundle.stop_token_ids))),
        _same("suppressed rows of a padded vocabulary", suppressed, bundle.suppress_tokens),
    ]
    if capacity is not None:
        detail = "the runtime believes the metadata, and writes past the end of a smaller cache"
        announced = bundle.max_num_tokens
        checks.append(at_most("context the bundle announces", 6, announced, capacity, detail))
    with open_runtime() as runtime:
        stops = {rule[0] for rule in runtime.stop_tokens if len(rule) == 1}
        missing = sorted(set(contract.stop_token_ids) - stops)
        checks.append(
            equals("stop tokens the runtime does not know", 6, len(missing), 0, str(missing))
        )
        checks += _check_tokenizer(runtime, tokenizer)
        checks += _check_template(runtime, contract)
        checks += _check_start(runtime, tokenizer, contract)
    return checks


def probe_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts that tokenizers get wrong: added tokens, each Latin letter, scripts, spaces, noise.

    U+0000 is left out: the runtime's interface ends a text there.
    """
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.piece(token_id)
        if piece.startswith("<") and piece.endswith(">") and not piece.startswith("<0x"):
            yield piece
            yield f"a{piece} b\n{piece}"
    yield from (chr(code) for code in range(1, 0x180))
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


def _check_start(
    runtime: TokenRunner, tokenizer: Tokenizer, contract: PromptContract
) -> list[Check]:
    """Count what the runtime really feeds for a raw text."""
    text = "Hello"
    fed = runtime.generate(text, 1).prompt_tokens
    wanted = len(tokenizer.encode(text)) + (contract.start_token_id is not None)
    return [equals("tokens fed for a raw text", 6, fed, wanted, f"{text!r} with its start token")]


def _same(name: str, wanted: tuple[int, ...], found: tuple[int, ...]) -> Check:
    detail = "" if wanted == found else f"the bundle has {list(found)}, training {list(wanted)}"
    return holds(f"{name} as in training", 6, wanted == found, str(list(found)[:8]), detail)


def _ids(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)


def _few(found: list[str], otherwise: str) -> str:
    return "; ".join(found[:_SHOWN]) if found else otherwise
