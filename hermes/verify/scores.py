"""The logits of some texts, computed once however many rungs ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from hermes.runners.interface import FileScorer, Logits, LogitsRunner, Scorer, score_by_steps


class KnownScores:
    """A scorer that remembers what it said about the beginning of each text.

    The logits lie in a temporary file that is mapped, so that a large vocabulary costs no memory
    that the system cannot take back.

    Args:
        scorer: asked once for each text, and for every other one each time.
        texts: as far as any rung will ask; cut where the scorer's context is full.
    """

    def __init__(self, scorer: Scorer | LogitsRunner, *texts: Sequence[int]) -> None:
        self.name = scorer.name
        self.capacity = scorer.capacity
        self.vocab_size = scorer.vocab_size
        self._scorer = scorer
        self._texts = [list(text[: scorer.capacity]) for text in texts]
        self._rows: dict[int, Logits] = {}

    def score(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Logits [vocab] after each id."""
        wanted = list(ids)
        for index, text in enumerate(self._texts):
            if wanted == text[: len(wanted)]:
                yield from islice(self._known(index), len(wanted))
                return
        yield from self._ask(ids)

    def remember(self) -> None:
        """Ask for every text now."""
        for index in range(len(self._texts)):
            self._known(index)

    def _known(self, index: int) -> Logits:
        if index not in self._rows:
            self._rows[index] = self._written(self._texts[index])
        return self._rows[index]

    def _written(self, text: Sequence[int]) -> Logits:
        shape = (len(text), self.vocab_size)
        with NamedTemporaryFile(prefix="hermes-scores-") as file:
            if isinstance(self._scorer, FileScorer):
                self._scorer.score_into(text, Path(file.name))
                return np.memmap(file.name, np.float32, "r", shape=shape)
            rows: Logits = np.memmap(file.name, np.float32, "w+", shape=shape)
        for row, logits in zip(rows, self._ask(text), strict=True):
            row[:] = logits
        return rows

    def _ask(self, ids: Sequence[int]) -> Iterator[Logits]:
        scorer = self._scorer
        return scorer.score(ids) if isinstance(scorer, Scorer) else score_by_steps(scorer, ids)
