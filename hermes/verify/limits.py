"""What a prompt meets at the end of the context, from the exported shapes alone.

LiteRT-LM never calls a prefill signature that is longer than the room left; the turn that would
need it fails, and with it every later turn of the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hermes.report.check import Check, measured


def longest_prompt(context: int, lengths: Sequence[int]) -> int:
    """Tokens of the longest first prompt below which the runtime takes every one.

    Args:
        context: slots of the cache.
        lengths: rows of the prefill signatures.
    """
    longest = 1
    while longest + 1 < context and _fits(longest + 1, context, lengths):
        longest += 1
    return longest


def _fits(count: int, context: int, lengths: Sequence[int]) -> bool:
    """Whether the runtime's plan for `count` tokens stays inside the cache.

    It plans for all of them, although the last one is fed by decode.
    """
    position, rest = 0, count
    for length in sorted(lengths, reverse=True):
        while rest >= length:
            position, rest = position + length, rest - length
    covering = [length for length in lengths if length >= rest]
    return rest == 0 or (bool(covering) and position + min(covering) <= context)


def describe_limits(context: int, lengths: Sequence[int]) -> dict[str, Any]:
    """The report's section `limits`."""
    return {
        "context": context,
        "prefill lengths": sorted(lengths),
        "longest first prompt": longest_prompt(context, lengths),
        "last slots in which no later turn can begin": min(lengths, default=0),
        "a turn whose rest is longer than the room left": "is refused, and every later turn too",
        "an answer that reaches the end": "stops there without an error",
    }


def check_limits(context: int, lengths: Sequence[int]) -> list[Check]:
    """The same as lines of rung 6; the exporter's choice, so nothing here is red."""
    listed = ", ".join(map(str, sorted(lengths)))
    detail = f"context {context}, prefill lengths {listed}"
    shortest = min(lengths, default=0)
    room = "a turn needs room for the shortest prefill signature, however few its tokens are"
    return [
        measured("longest first prompt", 6, longest_prompt(context, lengths), detail),
        measured("last slots in which no later turn can begin", 6, shortest, room),
    ]
