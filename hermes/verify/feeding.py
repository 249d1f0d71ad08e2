"""Ways to feed the same tokens, all of which must leave the same state behind.

A feed is a sequence of prefill calls and decode steps; only decode steps have logits. Whatever the
feed, the logits after a token depend on the tokens before it and on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hermes.runners.interface import Logits, LogitsRunner

_CHEAP_LENGTH = 32
_ALONE = 8
"""Decode steps from an empty cache, without any prefill."""
_LOOKS = 2
"""Decode steps after each way of filling the cache: the logits of the first depend on every row
that was filled, and those of the second also on the row that the first has written."""
_LAST = 4
"""Slots at the end of the context that are left to decode steps."""


@dataclass(frozen=True)
class Prefill:
    """One prefill call: `count` real tokens in a signature of `length` rows."""

    count: int
    length: int


@dataclass(frozen=True)
class Steps:
    """`count` decode steps."""

    count: int


@dataclass(frozen=True)
class Feed:
    """A named way to feed the first `size` tokens of a text."""

    name: str
    parts: tuple[Prefill | Steps, ...]

    @property
    def size(self) -> int:
        """Tokens it consumes."""
        return sum(part.count for part in self.parts)


Observation = list[tuple[int, Logits]]
"""Position and logits [V] of every decode step of a feed."""


def run_feed(runner: LogitsRunner, ids: Sequence[int], feed: Feed) -> Iterator[tuple[int, Logits]]:
    """Feed from an empty cache; yields position and logits of every decode step."""
    runner.reset()
    position = 0
    for part in feed.parts:
        if isinstance(part, Prefill):
            runner.prefill(ids[position : position + part.count], position, part.length)
            position += part.count
            continue
        for _ in range(part.count):
            yield position, runner.step(ids[position], position)
            position += 1


def observe(
    runner: LogitsRunner, ids: Sequence[int], feeds: Sequence[Feed]
) -> dict[str, Observation]:
    """Run every feed; feed name -> what it showed."""
    return {feed.name: list(run_feed(runner, ids, feed)) for feed in feeds}


def runtime_plan(
    count: int, lengths: Sequence[int], position: int, capacity: int
) -> tuple[Prefill, ...]:
    """Prefill calls for `count` tokens at `position`, in the order LiteRT-LM makes them.

    Largest signature first while it is full; the rest in the smallest that covers it, or token by
    token where there is a signature of length 1. A signature longer than the room left is never
    used, so fewer than `count` tokens may be covered; the caller feeds the others by decode.
    """
    calls = []
    rest, room = count, capacity - position
    for length in sorted(lengths, reverse=True):
        while rest >= length and room >= length:
            calls.append(Prefill(length, length))
            rest, room = rest - length, room - length
    covering = [length for length in sorted(lengths) if rest <= length <= room]
    if rest and covering:
        calls.append(Prefill(rest, covering[0]))
    return tuple(calls)


def greedy_feed(name: str, count: int, lengths: Sequence[int], capacity: int) -> Feed:
    """A prompt of `count` tokens as the runtime feeds it: all but the last by prefill."""
    calls = runtime_plan(count - 1, lengths, 0, capacity)
    fed = sum(call.count for call in calls)
    return Feed(name, (*calls, Steps(count - fed)))


def equivalence_feeds(
    lengths: Sequence[int], capacity: int, widths: Sequence[int] = ()
) -> list[Feed]:
    """Everything that a static cache gets wrong: borders, padded tails, turns and the end.

    Args:
        lengths: rows of the prefill signatures.
        capacity: cache slots.
        widths: numbers of slots at which the graph changes its path.
    """
    feeds = [Feed("stepwise", (Steps(min(capacity, _ALONE)),))]
    for length in sorted(lengths):
        # The longest costs most, and filling the context begins with it, padded and then full.
        if length <= _CHEAP_LENGTH or length < max(lengths):
            feeds.extend(_length_feeds(length, capacity))
    if capacity >= 2 * _ALONE:
        feeds.append(_second_turn(lengths, capacity))
    feeds.append(_to_the_end(lengths, capacity, widths))
    return feeds


def _length_feeds(length: int, capacity: int) -> list[Feed]:
    """A signature padded, then full at a position that is no multiple of it; short ones also alone.

    Rows cost time, so what differs only at position 0 is tried where it is cheap.
    """
    part = max(1, length // 3)
    plans: dict[str, tuple[Prefill, ...]] = {}
    if part + length <= capacity:
        plans["padded, then full"] = (Prefill(part, length), Prefill(length, length))
    if length <= _CHEAP_LENGTH or not plans:
        plans["full"] = (Prefill(length, length),)
    if 1 < length <= _CHEAP_LENGTH:
        plans["one token in"] = (Prefill(1, length),)
    if 2 < length <= _CHEAP_LENGTH:
        plans["one short of"] = (Prefill(length - 1, length),)
    feeds = []
    for name, calls in plans.items():
        room = capacity - sum(call.count for call in calls)
        if room > 0:
            feeds.append(Feed(f"{name} {length}", (*calls, Steps(min(_LOOKS, room)))))
    return feeds


def _second_turn(lengths: Sequence[int], capacity: int) -> Feed:
    """Prompt, answer, and a second prompt that starts in the middle of everything."""
    first = max(2, min(capacity // 3, 3 * _CHEAP_LENGTH))
    opening = greedy_feed("", first, lengths, capacity).parts
    fed = first + _LOOKS
    # The last token of the answer is pending: it goes in front of the second prompt's prefill.
    turn = max(1, min(capacity // 4, 2 * _CHEAP_LENGTH + 3))
    second = runtime_plan(turn, lengths, fed, capacity)
    fed += sum(call.count for call in second)
    last = Steps(max(0, min(_LOOKS, capacity - fed)))
    return Feed("second turn", (*opening, Steps(_LOOKS), *second, last))


def _to_the_end(lengths: Sequence[int], capacity: int, widths: Sequence[int]) -> Feed:
    """Prefill as far as possible, the longest signature padded first; decode to the last slot.

    On the way decoding crosses each width.
    """
    parts: list[Prefill | Steps] = []
    longest, fed = max(lengths, default=0), 0
    if longest > 1 and max(1, longest // 3) + longest + _LAST <= capacity:
        parts.append(Prefill(max(1, longest // 3), longest))
        fed = max(1, longest // 3)
    for turn, width in enumerate(sorted(widths)):
        if fed < width - 1 and width + 1 + _LAST <= capacity:
            calls = _approach(width - 1 - fed, lengths, fed, capacity, turn)
            # The last step of the narrow path, and the first of the wide one, which reads its row.
            rest = width + 1 - fed - sum(call.count for call in calls)
            parts += [*calls, Steps(rest)]
            fed = width + 1
    calls = runtime_plan(max(0, capacity - _LAST - fed), lengths, fed, capacity)
    fed += sum(call.count for call in calls)
    return Feed("context filled", (*parts, *calls, Steps(capacity - fed)))


def _approach(
    count: int, lengths: Sequence[int], position: int, capacity: int, turn: int
) -> tuple[Prefill, ...]:
    """Prefill calls for `count` tokens in front of a width, as few as show every path.

    Most rows by the longest signature, whose last call is padded; then one call of every second
    shorter signature, the others at the next width: prefill has every second width
    (`converters.branches.prefill_widths`), so each of its paths is walked by each signature. The
    runtime's own plan makes ten calls where these are three.
    """
    if not lengths:
        return ()
    *shorter, longest = sorted(lengths)
    last = shorter[turn % 2 :: 2]
    rows = count - sum(last)
    padded = -(-rows // longest) * longest
    if rows < 1 or position + padded > capacity:
        return runtime_plan(count, lengths, position, capacity)
    full, rest = divmod(rows, longest)
    calls = [Prefill(longest, longest)] * full + [Prefill(rest, longest)] * (rest > 0)
    return (*calls, *(Prefill(length, length) for length in last))
