"""What the verification needs of a running model, whatever runs it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
Message = Mapping[str, object]
"""A chat message: `role`, and `content` as text or a list of parts."""


class LogitsRunner(Protocol):
    """A model with a cache of `capacity` slots that is fed as LiteRT-LM feeds it.

    Attributes:
        name: for reports.
        capacity: cache slots.
        prefill_lengths: rows of the prefill signatures, shortest first.
        vocab_size: width of the logits.
    """

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def prefill_lengths(self) -> tuple[int, ...]: ...
    @property
    def vocab_size(self) -> int: ...

    def reset(self) -> None:
        """Forget everything; what remains in the cache must be hidden by the mask."""
        ...

    def prefill(self, ids: Sequence[int], position: int, length: int) -> None:
        """Feed `ids` at `position` and after through the prefill signature of `length` rows.

        Unused rows are padded as the runtime pads them: token 0, position 0, mask row closed.
        """
        ...

    def step(self, token: int, position: int) -> Logits:
        """Feed one token through decode; its logits [vocab]."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """A model that gives the logits after every token of a text, each with all before it."""

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def score(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Logits [vocab] after each id, in order; `ids` fit the capacity."""
        ...


@runtime_checkable
class PositionScorer(Protocol):
    """A scorer that leaves out the logits that nobody asks for."""

    def score_at(self, ids: Sequence[int], positions: Collection[int]) -> dict[int, Logits]:
        """Position -> logits [vocab] after the id there."""
        ...


@runtime_checkable
class FileScorer(Protocol):
    """A scorer in another process, which can write a whole text's logits by itself."""

    def score_into(self, ids: Sequence[int], path: Path) -> None:
        """Write the logits after each id to a file, float32 [T, vocab]."""
        ...


@dataclass(frozen=True)
class Generation:
    """What a runtime continued a raw text with.

    Attributes:
        text: the continuation, without stop tokens.
        prompt_tokens: tokens the runtime fed for the prompt, a start token included.
        new_tokens: tokens it decoded, a stop token included.
        seconds: wall time of prefill and decoding.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        rendered: the prompt as the runtime's template engine renders it ('' if it cannot).
        generation: the reply. `prompt_tokens` counts this turn's prompt only.
        cache_tokens: tokens of the whole conversation after the turn.
    """

    rendered: str
    generation: Generation
    cache_tokens: int


class TokenRunner(Protocol):
    """A complete runtime: text in, greedy text out."""

    @property
    def name(self) -> str: ...
    @property
    def start_token(self) -> int | None: ...
    @property
    def stop_tokens(self) -> tuple[tuple[int, ...], ...]: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def generate(self, text: str, max_new_tokens: int) -> Generation:
        """Continue a raw text greedily."""
        ...

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that `messages` become, '' if the template fails."""
        ...

    def chat(
        self, turns: Sequence[str], max_new_tokens: int, preface: Sequence[Message] = ()
    ) -> tuple[Turn, ...]:
        """Send user messages one after the other in one conversation."""
        ...


def score_by_steps(runner: LogitsRunner, ids: Sequence[int]) -> Iterator[Logits]:
    """`Scorer.score` for a runner that has logits in decode only."""
    runner.reset()
    for position, token in enumerate(ids):
        yield runner.step(token, position)
