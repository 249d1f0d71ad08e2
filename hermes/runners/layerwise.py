"""The reference for models that do not fit memory in float: one layer's weights at a time.

A text goes through the model layer by layer instead of token by token, so each weight is read once
per text and forgotten. There is no cache to step on with: it scores texts and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.parameters import EMBEDDING, FINAL_NORM, HEAD
from hermes.runners.interface import Logits
from hermes.runners.reference import SCORED_AT_ONCE

if TYPE_CHECKING:
    from torch import Tensor

    from hermes.model import DecoderBlock

_HEAD_ROWS = 8192


class LayerwiseScorer:
    """Logits of whole texts from lazily opened weights.

    Args:
        config: the model.
        weights: Hermes parameter name -> tensor.
        prepare: told every layer before it computes.
    """

    def __init__(
        self,
        config: HermesConfig,
        weights: Mapping[str, LazyTensor],
        prepare: Callable[[DecoderBlock], None] = lambda layer: None,
    ) -> None:
        self.name = "reference"
        self.capacity = config.max_seq_len
        self.vocab_size = config.vocab_size
        self._config = config
        self._weights = weights
        self._prepare = prepare

    def score(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Logits [vocab] after each id."""
        import torch

        with torch.inference_mode():
            hidden = self._embed(ids)
            for layer in range(self._config.num_layers):
                hidden = self._through(layer, hidden)
            normed = self._normed(hidden)
            blocks = torch.split(normed, SCORED_AT_ONCE)
        for block in blocks:
            yield from self._logits(block).numpy()

    def _read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self._weights[name].read(start, stop).float()

    def _embed(self, ids: Sequence[int]) -> Tensor:
        """[T, H]; only the rows that occur are read."""
        import torch

        rows = {token: self._read(EMBEDDING, token, token + 1)[0] for token in sorted(set(ids))}
        return torch.stack([rows[token] for token in ids])

    def _through(self, layer: int, hidden: Tensor) -> Tensor:
        """[T, H] through one layer, in blocks whose keys and values grow as in the reference."""
        import torch

        from hermes.model import DecoderBlock, build_rope_tables

        config, prefix = self._config, f"layers.{layer}."
        with torch.device("meta"):
            block = DecoderBlock(config, rotary=layer not in config.no_rope_layers).eval()
        names = [name for name in self._weights if name.startswith(prefix)]
        state = {name.removeprefix(prefix): self._read(name) for name in names}
        block.load_state_dict(state, strict=True, assign=True)
        self._prepare(block)
        cos, sin = build_rope_tables(config, len(hidden))
        past, parts = None, []
        for start in range(0, len(hidden), SCORED_AT_ONCE):
            part = hidden[start : start + SCORED_AT_ONCE]
            stop = start + len(part)
            closed = torch.full((len(part), stop), float("-inf"))
            mask = torch.triu(closed, diagonal=start + 1)
            out, past = block(part[None], cos[start:stop], sin[start:stop], mask, past)
            parts.append(out[0])
        return torch.cat(parts)

    def _normed(self, hidden: Tensor) -> Tensor:
        from hermes.model import RMSNorm

        norm = RMSNorm(self._config.hidden_size, self._config.rms_norm_eps)
        norm.load_state_dict({"weight": self._read(FINAL_NORM)})
        out: Tensor = norm(hidden)
        return out

    def _logits(self, normed: Tensor) -> Tensor:
        """[T, V]; the head is read in slices."""
        import torch

        head = EMBEDDING if self._config.tie_embeddings else HEAD
        with torch.inference_mode():
            parts = [
                normed @ self._read(head, start, min(start + _HEAD_ROWS, self.vocab_size)).T
                for start in range(0, self.vocab_size, _HEAD_ROWS)
            ]
            return torch.cat(parts, dim=1)
