"""What was said: each prompt as fed, the runtime's answer, and the float model's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hermes.runners.interface import LogitsRunner, TokenRunner
from hermes.verify.runtime import RuntimeData, Spoken

FLOAT_TOKENS = 12


def describe(
    entry: Spoken, reference: object, runtime: TokenRunner, data: RuntimeData
) -> dict[str, Any]:
    """JSON values of one entry of the transcript.

    The float model's greedy answer stands beside the quantized one as a fact, not as a check: on
    near ties the two differ and neither is wrong.
    """
    described: dict[str, Any] = {
        "prompt": entry.prompt,
        "fed": entry.fed,
        "ids": list(entry.ids),
        "answer": entry.answer.text,
        "smallest_margin": entry.agreement.smallest_margin,
    }
    if hasattr(reference, "prefill") and hasattr(reference, "step"):
        count = min(FLOAT_TOKENS, entry.answer.new_tokens)
        ids = float_greedy(reference, entry.ids, count, data)  # type: ignore[arg-type]
        described["float_answer"] = runtime.detokenize(ids)
        described["same_as_float"] = entry.answer.text.startswith(described["float_answer"])
    return described


def float_greedy(
    reference: LogitsRunner, prompt: Sequence[int], count: int, data: RuntimeData
) -> list[int]:
    """Up to `count` greedy tokens after `prompt`, without the stop token."""
    reference.reset()
    if len(prompt) > 1:
        reference.prefill(prompt[:-1], 0, len(prompt))
    answer: list[int] = []
    token = prompt[-1]
    for position in range(len(prompt) - 1, min(len(prompt) - 1 + count, reference.capacity)):
        logits = reference.step(token, position).copy()
        if data.suppressed:
            logits[list(data.suppressed)] = -np.inf
        token = int(logits.argmax())
        if token in data.stop_tokens:
            break
        answer.append(token)
    return answer
