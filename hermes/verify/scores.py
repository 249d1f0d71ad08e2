"""The logits of one text, computed once however many rungs ask for them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from hermes.runners.interface import Logits, Scorer


class KnownScores:
    """A scorer that remembers what it said about the beginning of one text.

    The logits lie in a temporary file that is mapped, so that a large vocabulary costs no memory
    that the system cannot take back.

    Args:
        scorer: asked once for the text, and for every other one each time.
        ids: the text, as far as any rung will ask; cut where the scorer's context is full.
    """

    def __init__(self, scorer: Scorer, ids: Sequence[int]) -> None:
        self.name = scorer.name
        self.capacity = scorer.capacity
        self.vocab_size = scorer.vocab_size
        self._scorer = scorer
        self._ids = list(ids[: scorer.capacity])
        self._rows: Logits | None = None

    def score(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Logits [vocab] after each id."""
        if list(ids) != self._ids[: len(ids)]:
            yield from self._scorer.score(ids)
            return
        if self._rows is None:
            self._rows = self._remember()
        yield from islice(self._rows, len(ids))

    def _remember(self) -> Logits:
        with tempfile.TemporaryFile(prefix="hermes-scores-") as file:
            shape = (len(self._ids), self.vocab_size)
            rows: Logits = np.memmap(file, np.float32, "w+", shape=shape)
        for index, row in enumerate(self._scorer.score(self._ids)):
            rows[index] = row
        return rows
