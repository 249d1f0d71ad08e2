"""LogitsRunner over the reference model, with its own growing cache, in float32."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hermes.runners.interface import Logits

if TYPE_CHECKING:
    import torch

    from hermes.model import HermesForCausalLM, KVCache

SCORED_AT_ONCE = 256
"""Tokens of one call, and of one block of logits: as many as fill the kernels."""


class ReferenceRunner:
    """The oracle behind the interface of the exported forms.

    It has no static shapes: a prefill feeds its real tokens only, so `prefill_lengths` are just the
    lengths that callers may name.
    """

    def __init__(self, model: HermesForCausalLM, prefill_lengths: Sequence[int] = (1,)) -> None:
        self.model = model.eval()
        self.name = "reference"
        self.capacity = model.config.max_seq_len
        self.prefill_lengths = tuple(sorted(prefill_lengths))
        self.vocab_size = model.config.vocab_size
        self._cache: KVCache = []

    def reset(self) -> None:
        """Drop the cache."""
        self._cache = []

    def prefill(self, ids: Sequence[int], position: int, length: int) -> None:
        """Append `ids`; `length` only bounds them."""
        if len(ids) > length:
            raise ValueError(f"{len(ids)} tokens for {length} rows")
        self._feed(ids, position)

    def step(self, token: int, position: int) -> Logits:
        """Logits [vocab] after one more token."""
        logits: Logits = self._logits(self._feed([token], position))[0]
        return logits

    def score(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Logits [vocab] after each id, computed in blocks."""
        self.reset()
        for start in range(0, len(ids), SCORED_AT_ONCE):
            yield from self._logits(self._feed(ids[start : start + SCORED_AT_ONCE], start))

    def score_at(self, ids: Sequence[int], positions: Collection[int]) -> dict[int, Logits]:
        """Position -> logits [vocab] after the id there; the head computes nothing else."""
        self.reset()
        rows: dict[int, Logits] = {}
        for start in range(0, len(ids), SCORED_AT_ONCE):
            states = self._feed(ids[start : start + SCORED_AT_ONCE], start)
            asked = [at for at in range(start, start + len(states)) if at in positions]
            rows.update(zip(asked, self._logits(states[[at - start for at in asked]]), strict=True))
        return rows

    def cache_rows(self, count: int) -> dict[str, Logits]:
        """Keys and values [kv_heads, count, head_dim] of every layer, `k_0`, `v_0`, `k_1`, ..."""
        rows: dict[str, Logits] = {}
        for layer, (keys, values) in enumerate(self._cache):
            rows[f"k_{layer}"] = keys[0, :, :count].float().numpy()
            rows[f"v_{layer}"] = values[0, :, :count].float().numpy()
        return rows

    def _feed(self, ids: Sequence[int], position: int) -> torch.Tensor:
        """States [T, hidden] after each id."""
        import torch

        filled = self._cache[0][0].shape[2] if self._cache else 0
        if position > filled:
            raise ValueError(f"position {position} leaves a gap after {filled}")
        if position < filled:
            self._cache = [(k[:, :, :position], v[:, :, :position]) for k, v in self._cache]
        if position == 0:
            self._cache = []
        tokens = torch.tensor([np.asarray(ids).tolist()])
        with torch.no_grad():
            states = self.model.hidden(tokens, position, self._cache)
        return states[0]

    def _logits(self, states: torch.Tensor) -> Logits:
        """[T, vocab] of states [T, hidden]."""
        import torch

        with torch.no_grad():
            logits: Logits = self.model.lm_head(states).float().numpy()
        return logits
