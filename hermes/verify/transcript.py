"""What was said: each prompt as fed, the runtime's answer, and the float model's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hermes.runners.interface import Logits, TokenRunner
from hermes.verify.runtime import RuntimeData, Spoken

FLOAT_TOKENS = 12


def described(entry: Spoken) -> dict[str, Any]:
    """JSON values of one entry of the transcript."""
    return {
        "prompt": entry.prompt,
        "fed": entry.fed,
        "ids": list(entry.ids),
        "answer": entry.answer.text,
        "smallest_margin": entry.agreement.smallest_margin,
    }


def float_answer(
    entry: Spoken, reference: Stepper, runtime: TokenRunner, data: RuntimeData
) -> dict[str, Any]:
    """The float model's greedy answer beside the quantized one: a fact, not a check.

    On near ties the two differ and neither is wrong.
    """
    count = min(FLOAT_TOKENS, entry.answer.new_tokens)
    ids = float_greedy(reference, entry.ids, entry.agreement.chosen[:count], count, data)
    text = runtime.detokenize(ids)
    return {"float_answer": text, "same_as_float": entry.answer.text.startswith(text)}


@runtime_checkable
class Stepper(Protocol):
    """A float model that scores a text in one pass and goes on from it token by token."""

    @property
    def capacity(self) -> int: ...

    def score(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Logits [vocab] after each id, from an empty cache on."""
        ...

    def step(self, token: int, position: int) -> Logits:
        """Logits [vocab] after one more token; what was cached from `position` on is dropped."""
        ...


def float_greedy(
    reference: Stepper,
    prompt: Sequence[int],
    said: Sequence[int],
    count: int,
    data: RuntimeData,
) -> list[int]:
    """Up to `count` greedy tokens after `prompt`, without the stop token.

    What was `said` is mostly what the float model says too, so it is scored in one pass, and steps
    begin where the two part.
    """
    count = min(count, reference.capacity - len(prompt))
    rows = list(reference.score([*prompt, *said]))[len(prompt) - 1 :]
    answer: list[int] = []
    while len(answer) < count:
        same = answer == list(said[: len(answer)])
        position = len(prompt) - 1 + len(answer)
        known = same and len(answer) < len(rows)
        logits = rows[len(answer)] if known else reference.step(answer[-1], position)
        token = _choice(logits, data)
        if token in data.stop_tokens:
            break
        answer.append(token)
    return answer


def _choice(logits: Logits, data: RuntimeData) -> int:
    allowed = logits.copy()
    if data.suppressed:
        allowed[list(data.suppressed)] = -np.inf
    return int(allowed.argmax())
