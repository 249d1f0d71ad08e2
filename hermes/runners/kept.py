"""One opened runner for several rungs: loading a model costs more than asking it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Generic, TypeVar

from hermes.runners.closing import Closing

_Runner = TypeVar("_Runner")


class Kept(Closing, Generic[_Runner]):
    """Opens a runner at its first use and closes it at the end.

    After an error it is closed at once, so that the next rung gets a new one. A thread that opens
    it waits until no other one uses it.
    """

    def __init__(self, opener: Callable[[], AbstractContextManager[_Runner]]) -> None:
        self._opener = opener
        self._stack: ExitStack | None = None
        self._runner: _Runner | None = None
        self._used = threading.RLock()

    @contextmanager
    def open(self) -> Iterator[_Runner]:
        """The runner; it stays open when the block ends."""
        with self._used:
            if self._stack is None or self._runner is None:
                self._stack = ExitStack()
                self._runner = self._stack.enter_context(self._opener())
            try:
                yield self._runner
            except BaseException:
                self.close()
                raise

    def close(self, kill: bool = False) -> None:
        """End the runner, if it is open."""
        stack, self._stack, self._runner = self._stack, None, None
        if stack is not None:
            stack.close()
