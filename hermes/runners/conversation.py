"""A conversation with a bundle in LiteRT-LM: streamed, stoppable, in a child process.

What litert-lm-api 0.18.1 does, observed:
- A conversation whose answer was cancelled accepts further messages and never answers again; one
  whose message was too long fails for every later one. Both are made anew from what was said.
- A message that finds no room left in the context is answered by nothing or, now and then in the
  very same conversation, refused: "Chosen prefill work group size exceeds available state entries".
- Sampling settings that are not given are taken from the bundle, one by one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hermes.errors import BadInputError
from hermes.runners.child import Child
from hermes.runners.closing import Closing
from hermes.runners.litert_lm import NO_WEIGHT_CACHE, text_of

if TYPE_CHECKING:
    import litert_lm

_POLL_SECONDS = 0.05
_LOAD_SECONDS = 600.0
_POLL_LIMIT = 120.0
"""Seconds without any sign of the child; it answers a poll every 0.05 s, whatever it computes."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the seed makes it repeatable."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0


def choose_sampling(
    temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> Sampling | None:
    """The options with defaults for those that are not given; None if none is."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(Sampling(), **chosen) if chosen else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class Answer:
    """How an answer ended, and what it cost.

    Attributes:
        problem: the runtime's refusal; `""` if it answered.
        stopped: it was stopped from outside.
        prompt_tokens: fed for this message.
        new_tokens: decoded.
        prefill_rate: tokens per second, by the runtime's own clock.
        decode_rate: tokens per second, by the runtime's own clock.
        cache_tokens: of the whole conversation.
    """

    problem: str = ""
    stopped: bool = False
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    cache_tokens: int = 0


class Conversation(Closing):
    """A bundle to talk to.

    Args:
        path: a .litertlm file.
        system: system message; none if None.
        sampling: as the bundle says if None.
        max_new_tokens: of one answer; no limit but the context if None.
        threads: of the CPU kernels.

    Raises:
        NativeToolError: the runtime died, hung, or refused the bundle.
    """

    def __init__(
        self,
        path: Path,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        threads: int = 2,
    ) -> None:
        if not path.is_file():
            raise BadInputError(f"{path}: no such file", expected="a .litertlm file")
        self.last = Answer()
        self._child = Child(
            "hermes.runners.conversation:ConversationHost",
            str(path),
            system,
            sampling,
            max_new_tokens,
            threads,
            tool="LiteRT-LM runtime",
            timeout=_LOAD_SECONDS,
        )

    def stream(self, text: str, stop: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Pieces of the answer as they come; `last` describes it afterwards.

        Args:
            text: the user's message.
            stop: asked between pieces; once it says so, the answer ends. The message and what was
                answered stay part of the conversation.
        """
        self._child.call("start", text, timeout=_POLL_LIMIT)
        stopping = False
        while True:
            if stop() and not stopping:
                stopping = True
                self._child.call("cancel", timeout=_POLL_LIMIT)
            piece, answer = self._child.call("poll", timeout=_POLL_LIMIT)
            if piece:
                yield str(piece)
            if answer is not None:
                self.last = cast(Answer, answer)
                return

    def reset(self) -> None:
        """Forget everything that was said; the system message stays."""
        self._child.call("reset", timeout=_POLL_LIMIT)

    def close(self, kill: bool = False) -> None:
        """End the runtime's process."""
        self._child.close(kill)


class ConversationHost:
    """The child's side: answers run in a thread, so that they can be followed and stopped."""

    def __init__(
        self,
        path: str,
        system: str | None,
        sampling: Sampling | None,
        max_new_tokens: int | None,
        threads: int,
    ) -> None:
        import litert_lm

        self._engine: litert_lm.Engine = litert_lm.Engine(
            path,
            backend=litert_lm.Backend.CPU(thread_count=threads),
            cache_dir=NO_WEIGHT_CACHE,
            enable_benchmark=True,
        )
        self._sampler = None if sampling is None else _sampler(sampling)
        self._max_new_tokens = max_new_tokens
        self._preface = [] if system is None else [{"role": "system", "content": system}]
        self._pieces: queue.Queue[str | Answer] = queue.Queue()
        self._stopped = threading.Event()
        self.reset()

    def reset(self) -> None:
        """A fresh conversation."""
        self._said: list[dict[str, str]] = []
        self._conversation: litert_lm.AbstractConversation | None = None

    def start(self, text: str) -> None:
        """Begin to answer."""
        self._stopped.clear()
        if self._conversation is None:
            self._conversation = self._engine.create_conversation(
                messages=[*self._preface, *self._said] or None, sampler_config=self._sampler
            )
        threading.Thread(target=self._answer, args=(text,), daemon=True).start()

    def poll(self) -> tuple[str, Answer | None]:
        """What has been said since the last poll, and the end of the answer once it is there."""
        text = ""
        try:
            item = self._pieces.get(timeout=_POLL_SECONDS)
            while isinstance(item, str):
                text += item
                item = self._pieces.get_nowait()
        except queue.Empty:
            return text, None
        return text, item

    def cancel(self) -> None:
        """Stop the answer; `poll` brings its end."""
        self._stopped.set()
        if self._conversation is not None:
            self._conversation.cancel_process()

    def _answer(self, text: str) -> None:
        conversation, answered = self._conversation, ""
        assert conversation is not None
        before = _count(conversation)
        try:
            stream = conversation.send_message_async(text, max_output_tokens=self._max_new_tokens)
            for message in stream:
                piece = text_of(message.to_json())
                answered += piece
                self._pieces.put(piece)
                if self._stopped.is_set():
                    # The first request may have come before there was anything to cancel.
                    conversation.cancel_process()
            fed = _count(conversation) != before
            answer = self._described(conversation, fed or bool(answered))
        except Exception as error:
            fed, answer = False, Answer(problem=str(error) or type(error).__name__)
        if answered or (fed and not answer.stopped):
            self._said.append({"role": "user", "content": text})
            self._said.append({"role": "assistant", "content": answered})
        if answer.problem or answer.stopped:
            self._conversation = None
        self._pieces.put(answer)

    def _described(self, conversation: litert_lm.AbstractConversation, fed: bool) -> Answer:
        stopped, tokens = self._stopped.is_set(), _count(conversation)
        if not fed:
            return Answer(stopped=stopped, cache_tokens=tokens)
        info = conversation.get_benchmark_info()
        return Answer(
            stopped=stopped,
            prompt_tokens=int(info.last_prefill_token_count),
            new_tokens=int(info.last_decode_token_count),
            prefill_rate=float(info.last_prefill_tokens_per_second),
            decode_rate=float(info.last_decode_tokens_per_second),
            cache_tokens=tokens,
        )


def _sampler(sampling: Sampling) -> litert_lm.SamplerConfig:
    import litert_lm

    greedy = sampling.temperature == 0
    return litert_lm.SamplerConfig(
        top_k=1 if greedy else sampling.top_k,
        top_p=sampling.top_p,
        temperature=1.0 if greedy else sampling.temperature,
        seed=sampling.seed,
    )


def _count(conversation: litert_lm.AbstractConversation) -> int:
    return int(conversation.token_count)
