"""A conversation in the terminal: messages in, streamed answers out, Ctrl-C in between."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from hermes.errors import BadInputError
from hermes.runners.conversation import Answer

PROMPT = "> "
_TOO_LONG = "Input token ids are too long"
"""How LiteRT-LM 0.18.1 refuses a message; the token counts follow."""
_NO_ROOM = "exceeds available state entries"
"""How it refuses one when less is left than its shortest prefill; sometimes it says nothing."""
HELP = """/reset   forget the conversation; the system message stays
/help    this list
/quit    leave (so does Ctrl-D)
Ctrl-C   stop the answer; a second time leaves"""


class Talker(Protocol):
    """What the terminal needs of a conversation."""

    last: Answer

    def stream(self, text: str, stop: Callable[[], bool]) -> Iterator[str]: ...

    def reset(self) -> None: ...


class Interrupts:
    """Counts Ctrl-C since the last message.

    The first one during an answer only asks it to stop, so that the conversation with the child
    process is not torn in the middle of a message. While the terminal waits for a line, and at the
    second one, KeyboardInterrupt is raised.
    """

    def __init__(self) -> None:
        self.count = 0
        self._answering = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle SIGINT inside the block."""
        before = signal.signal(signal.SIGINT, self._came)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """An answer runs inside the block."""
        self.count, self._answering = 0, True
        try:
            yield
        finally:
            self._answering = False

    def stop(self) -> bool:
        """Whether the answer should end."""
        return self.count > 0

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 or not self._answering:
            raise KeyboardInterrupt


class Chat:
    """Messages and answers on standard output; what is said about them on standard error.

    Args:
        talker: the conversation.
        context: tokens that it may hold in all.
    """

    def __init__(self, talker: Talker, context: int) -> None:
        self._talker = talker
        self._context = context
        self._interrupts = Interrupts()

    def once(self, text: str) -> None:
        """One message, one answer.

        Raises:
            BadInputError: the message does not fit or the runtime refused it.
            KeyboardInterrupt: at the first Ctrl-C.
        """
        self._answer(text)
        problem = self._problem()
        if problem and not self._talker.last.new_tokens:
            raise BadInputError(problem, todo="shorten the message, or export a longer --context")
        if problem:
            _say(problem)

    def lines(self, texts: Iterator[str]) -> None:
        """One message a line, in one conversation; as `once`."""
        for text in texts:
            if text.strip():
                self.once(text.rstrip("\n"))

    def terminal(self) -> None:
        """Read, answer, repeat.

        Raises:
            KeyboardInterrupt: at the second Ctrl-C without a message in between.
        """
        with contextlib.suppress(ImportError):
            # Line editing and a history of what was typed.
            import readline  # noqa: F401
        with self._interrupts.watched():
            while True:
                try:
                    line = input(PROMPT)
                except EOFError:
                    print()
                    return
                except KeyboardInterrupt:
                    if self._interrupts.count > 1:
                        raise
                    print()
                    _say("Ctrl-C once more, or /quit, leaves")
                    continue
                if line.strip() == "/quit":
                    return
                self._obey(line.strip())

    def _obey(self, line: str) -> None:
        if line == "/reset":
            self._interrupts.count = 0
            self._talker.reset()
            _say("forgotten; the conversation begins anew")
        elif line == "/help":
            self._interrupts.count = 0
            _say(HELP)
        elif line.startswith("/"):
            _say(f"no such command: {line.split()[0]}; /help lists them")
        elif line:
            with self._interrupts.answering():
                self._answer(line, self._interrupts.stop)
            problem = self._problem()
            if problem:
                _say(problem)

    def _answer(self, text: str, stop: Callable[[], bool] = lambda: False) -> None:
        answered = False
        for piece in self._talker.stream(text, stop):
            print(piece, end="", flush=True)
            answered = True
        if answered:
            print(flush=True)
        if self._talker.last.new_tokens:
            _say(self._cost(self._talker.last))

    def _cost(self, answer: Answer) -> str:
        stopped = "stopped; " if answer.stopped else ""
        return (
            f"[{stopped}{answer.new_tokens} tokens at {answer.decode_rate:.1f}/s, "
            f"prompt {answer.prompt_tokens} at {answer.prefill_rate:.0f}/s, "
            f"context {min(answer.cache_tokens, self._context)} of {self._context}]"
        )

    def _problem(self) -> str:
        """What stands in the way of this message or the next; `""` if nothing does."""
        last = self._talker.last
        if _TOO_LONG in last.problem:
            return (
                f"the message is too long for the context of {self._context} tokens "
                f"({last.problem.rpartition(': ')[2]}); what was said before is kept"
            )
        if _NO_ROOM in last.problem or not (last.problem or last.stopped or last.new_tokens):
            room = f"the context of {self._context} tokens"
            return f"no room is left for this message in {room}; /reset begins anew"
        if last.problem:
            return f"the message was not answered: {last.problem}; what was said before is kept"
        if last.stopped:
            return ""
        if last.cache_tokens >= self._context - 1:
            return (
                f"the answer ended because the context of {self._context} tokens is full; "
                "/reset begins anew"
            )
        return ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
