"""Following a text along a runner's greedy choices: ties are explicit, never blanket."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hermes.runners.interface import Generation
from hermes.verify.runtime import Agreement, follow

LETTERS = "abcdefgh"
STOP = 7


class Scripted:
    """Prefers the letters of a script; at `tie`, a second letter is `gap` behind."""

    name = "scripted"
    capacity = 32
    prefill_lengths = (4,)
    vocab_size = 8

    def __init__(self, script: str, tie: tuple[int, str, float] | None = None) -> None:
        self.script = script
        self.tie = tie
        self.seen: list[int] = []

    def reset(self) -> None:
        self.seen = []

    def prefill(self, ids: Sequence[int], position: int, length: int) -> None:
        self.seen = [*self.seen[:position], *ids]

    def step(self, token: int, position: int) -> np.ndarray:
        self.seen = [*self.seen[:position], token]
        place = position - 1  # two prompt tokens: the answer's first letter follows position 1
        logits = np.zeros(8, np.float32)
        logits[LETTERS.index(self.script[place])] = 5
        if self.tie is not None and place == self.tie[0]:
            logits[LETTERS.index(self.tie[1])] = 5 - self.tie[2]
        return logits


def letters(ids: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in ids)


def walk(runner: Scripted, text: str, new_tokens: int | None = None) -> Agreement:
    answer = Generation(text, 2, len(text) if new_tokens is None else new_tokens, 0.0)
    return follow(runner, [0, 1], answer, letters, near_tie=0.01, stop_tokens=[STOP])


def test_the_same_text() -> None:
    assert walk(Scripted("abcd"), "abcd") == Agreement(4, 0, None, 0.0, 5.0)


def test_the_first_difference_is_found_with_its_margin() -> None:
    found = walk(Scripted("abcd"), "abdd")
    assert (found.tokens, found.difference, found.margin) == (2, 2, 5.0)


@pytest.mark.parametrize(("gap", "passes"), [(0.005, True), (0.02, False)])
def test_a_near_tie_is_judged_by_the_runners_own_margin(gap: float, passes: bool) -> None:
    found = walk(Scripted("abcd", tie=(2, "e", gap)), "abed")
    assert (found.difference is None) is passes
    assert found.ties == int(passes)


def test_a_tie_excuses_only_its_own_second_choice() -> None:
    assert walk(Scripted("abcd", tie=(2, "e", 0.005)), "abfd").difference == 2
    assert walk(Scripted("abcd", tie=(2, "e", 0.005)), "abee").difference == 3


def test_a_tie_elsewhere_excuses_nothing() -> None:
    assert walk(Scripted("abcd", tie=(1, "e", 0.005)), "abed").difference == 2


def test_a_stop_token_ends_both() -> None:
    assert walk(Scripted("abh"), "ab", new_tokens=3).difference is None
    assert walk(Scripted("abhd"), "abhd").difference == 2  # the runtime ran on
    assert walk(Scripted("abcd"), "ab", new_tokens=3).difference == 2  # it stopped too early


def test_suppressed_tokens_are_forbidden() -> None:
    answer = Generation("aacd", 2, 4, 0.0)
    runner = Scripted("abcd", tie=(1, "a", 1.0))
    found = follow(runner, [0, 1], answer, letters, near_tie=0.01, suppressed=[1])
    assert found.difference is None


def test_incomplete_characters_are_not_differences() -> None:
    parts = ["\u00e9".encode()[:1], "\u00e9".encode()[1:], b"c"]

    def decode(ids: Sequence[int]) -> str:
        return b"".join(parts[token] for token in ids).decode("utf-8", "replace")

    answer = Generation("\u00e9c", 2, 3, 0.0)
    found = follow(Scripted("abc"), [0, 1], answer, decode, near_tie=0.01)
    assert found.difference is None
