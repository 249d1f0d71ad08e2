"""What a few tokens put into every matrix: the activations that some rewrites and roundings need.

The text goes through the model layer by layer, in numpy, with a few rows of a matrix in memory.
Only the inputs are kept, a few dozen rows per matrix.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.parameters import EMBEDDING, FINAL_NORM, HEAD
from hermes.rotary import rope_rows

THREADS = 2
CHUNK_VALUES = 1 << 19
"""Of a matrix that a thread multiplies by at a time."""

Rows = NDArray[np.float32]
Inputs = Callable[[], Rows]
"""Makes the rows [T, columns] that a matrix was multiplied by, or a norm's gain."""


def record_inputs(
    config: HermesConfig, weights: Mapping[str, LazyTensor], sequences: Sequence[Sequence[int]]
) -> dict[str, Inputs]:
    """Parameter name of every matrix and gain -> its inputs over all sequences, one after another.

    Nothing is read before the first input is asked for; then one pass makes all.

    Args:
        config: the model.
        weights: its weights.
        sequences: token ids; each sequence starts at position 0.
    """
    walk = _OneWalk(config, weights, sequences).inputs
    names = [name for name in weights if name.endswith(("proj.weight", "norm.weight"))]
    return {name: functools.partial(lambda key: walk()[key], name) for name in (*names, HEAD)}


class _OneWalk:
    """The inputs of all matrices, made when they are first asked for; others wait for them."""

    def __init__(
        self,
        config: HermesConfig,
        weights: Mapping[str, LazyTensor],
        sequences: Sequence[Sequence[int]],
    ) -> None:
        self._arguments = (config, weights, sequences)
        self._lock = threading.Lock()
        self._made: dict[str, Rows] | None = None

    def inputs(self) -> dict[str, Rows]:
        with self._lock:
            if self._made is None:
                with ThreadPoolExecutor(THREADS) as pool:
                    self._made = _Walk(*self._arguments, pool).inputs()
            return self._made


class _Walk:
    """One pass of all sequences through all layers."""

    def __init__(
        self,
        config: HermesConfig,
        weights: Mapping[str, LazyTensor],
        sequences: Sequence[Sequence[int]],
        pool: ThreadPoolExecutor,
    ) -> None:
        self.config = config
        self.weights = weights
        self.sequences = sequences
        self.pool = pool
        ends = np.cumsum([len(ids) for ids in sequences]).tolist()
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self.seen: dict[str, Rows] = {}

    def inputs(self) -> dict[str, Rows]:
        config = self.config
        tokens = [token for ids in self.sequences for token in ids]
        rows = {t: self.weights[EMBEDDING].floats(t, t + 1)[0] for t in sorted(set(tokens))}
        x = np.stack([rows[token] for token in tokens])  # [T, H]
        cos, sin = rope_rows(config, max(len(ids) for ids in self.sequences))
        for layer in range(config.num_layers):
            prefix = f"layers.{layer}."
            x = x + self._attention(prefix, self._norm(f"{prefix}input_layernorm", x), cos, sin)
            x = x + self._feed_forward(prefix, self._norm(f"{prefix}post_attention_layernorm", x))
        self.seen[HEAD] = self._norm(FINAL_NORM.removesuffix(".weight"), x)
        return self.seen

    def _norm(self, name: str, x: Rows) -> Rows:
        normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config.rms_norm_eps)
        self.seen[f"{name}.weight"] = normed
        result: Rows = normed * self.weights[f"{name}.weight"].floats()
        return result

    def _linear(self, name: str, x: Rows) -> Rows:
        self.seen[f"{name}.weight"] = x
        weight = self.weights[f"{name}.weight"]
        y = np.empty((len(x), weight.rows), dtype=np.float32)
        step = max(1, CHUNK_VALUES // x.shape[1])

        def multiply(start: int) -> None:
            stop = min(start + step, weight.rows)
            np.matmul(x, weight.floats(start, stop).T, out=y[:, start:stop])

        for _ in self.pool.map(multiply, range(0, weight.rows, step)):
            pass
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias.floats()

    def _heads(self, name: str, x: Rows) -> Rows:
        return self._linear(name, x).reshape(len(x), -1, self.config.head_dim)

    def _attention(self, prefix: str, x: Rows, cos: Rows, sin: Rows) -> Rows:
        config, name = self.config, f"{prefix}self_attn."
        q, k, v = (self._heads(f"{name}{part}_proj", x) for part in "qkv")
        if config.qk_norm:
            q, k = self._norm(f"{name}q_norm", q), self._norm(f"{name}k_norm", k)
        rotary = int(prefix.split(".")[1]) not in config.no_rope_layers
        attended = np.concatenate(
            [
                _attend(*(part[start:stop] for part in (q, k, v)), *((cos, sin) if rotary else ()))
                for start, stop in self.spans
            ]
        )
        return self._linear(f"{name}o_proj", attended)

    def _feed_forward(self, prefix: str, x: Rows) -> Rows:
        gate = self._linear(f"{prefix}mlp.gate_proj", x)
        up = self._linear(f"{prefix}mlp.up_proj", x)
        # The clipped exponent is float32's last one; its sigmoid is 0 either way.
        product = gate / (1 + np.exp(np.minimum(-gate, 88))) * up
        return self._linear(f"{prefix}mlp.down_proj", product)


def _attend(q: Rows, k: Rows, v: Rows, *tables: Rows) -> Rows:
    """Causal attention of one sequence: [T, N, D] and twice [T, K, D] give [T, N*D]."""
    length, heads, dim = q.shape
    if tables:
        cos, sin = (table[:length, None] for table in tables)
        q, k = (part * cos + np.roll(part, dim // 2, axis=-1) * sin for part in (q, k))
    k, v = (np.repeat(part, heads // part.shape[1], axis=1) for part in (k, v))
    scores = np.einsum("tnd,snd->nts", q, k) / np.float32(np.sqrt(dim))
    scores += np.triu(np.full((length, length), -np.inf, dtype=np.float32), 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended: Rows = np.einsum("nts,snd->tnd", weights, v).reshape(length, -1)
    return attended
