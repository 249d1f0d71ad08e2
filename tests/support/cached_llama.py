"""A LogitsRunner in numpy that can be wrong on purpose, one fault at a time.

Float64, Hugging Face named weights, one row at a time against an explicit cache. It shares nothing
with `hermes`. Shapes in comments: N query heads, K kv heads, D head width, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

Fault = Literal[
    "none",
    "cache position off by one",
    "prefill not written",
    "last slot written one early",
    "pads visible",
    "positions counted from the bucket",
    "pads scattered to row 0",
    "closed mask too weak",
    "one future slot open",
    "NaN in padding rows",
    "chunks restart at position 0",
    "rotary pairs interleaved",
    "key heads in the wrong order",
]
FAULTS: tuple[Fault, ...] = Fault.__args__[1:]  # type: ignore[attr-defined]

_CLOSED = -2e38


class CachedLlama:
    """See the module; `pad` is the token of padding rows, which must not matter."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: Mapping[str, Any],
        *,
        capacity: int = 64,
        prefill: Sequence[int] = (1, 8, 16, 32),
        fault: Fault = "none",
        pad: int = 0,
        name: str = "numpy",
    ) -> None:
        self.weights = {key: value.double().numpy() for key, value in weights.items()}
        self.config = config
        self.capacity = capacity
        self.prefill_lengths = tuple(sorted(prefill))
        self.vocab_size = int(config["vocab_size"])
        self.fault = fault
        self.pad = pad
        self.name = name
        self.reset()

    def reset(self) -> None:
        shape = (self.config["num_key_value_heads"], self.capacity, self.config["head_dim"])
        layers = range(self.config["num_hidden_layers"])
        self.cache = [(np.full(shape, 3.0), np.full(shape, 3.0)) for _ in layers]
        self.bucket_end = 0
        self.excess = 0

    def prefill(self, ids: Sequence[int], position: int, length: int) -> None:
        position += self.excess if self.fault == "positions counted from the bucket" else 0
        if self.fault == "chunks restart at position 0":
            position = 0
        padding = range(len(ids), length)
        before = [(k.copy(), v.copy()) for k, v in self.cache]
        for row, token in enumerate(ids):
            self._row(token, position + row, position + row, position + row + 1)
        for row in padding:  # slices of the cache take padding rows too, hidden by the mask
            self._row(self.pad, 0, position + row, 0)
        if self.fault == "pads scattered to row 0" and padding:
            self._row(self.pad, 0, 0, 1)
        if self.fault == "NaN in padding rows" and padding:
            for keys, values in self.cache:
                keys[:, position + len(ids) : position + length] = np.nan
                values[:, position + len(ids) : position + length] = np.nan
        if self.fault == "prefill not written":
            self.cache = before
        self.bucket_end = position + length
        self.excess += length - len(ids)

    def step(self, token: int, position: int) -> np.ndarray:
        position += self.excess if self.fault == "positions counted from the bucket" else 0
        open_slots = position + 1
        if self.fault == "pads visible":
            open_slots = max(open_slots, self.bucket_end)
        slot = position
        if self.fault == "last slot written one early" and position == self.capacity - 1:
            slot -= 1
        if self.fault == "cache position off by one":
            slot = position + 1
        x = self._row(token, position, slot, open_slots)
        x = self._norm(x, "model.norm")
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        logits: np.ndarray = (head @ x).astype(np.float32)
        return logits

    def last_padding_row(self, ids: Sequence[int], length: int) -> int:
        """What a prefill with logits prefers when its last slot is read instead of the prompt's."""
        self.reset()
        for position, token in enumerate([*ids, *[self.pad] * (length - len(ids))]):
            logits = self.step(token, position)
        return int(logits.argmax())

    def _row(self, token: int, position: int, slot: int, open_slots: int) -> np.ndarray:
        """Hidden state of one token that sees the first `open_slots` slots."""
        slot = min(slot, self.capacity - 1)
        x = self.weights["model.embed_tokens.weight"][token]
        for index, (keys, values) in enumerate(self.cache):
            layer = f"model.layers.{index}"
            h = self._norm(x, f"{layer}.input_layernorm")
            x = x + self._attend(h, f"{layer}.self_attn", position, slot, open_slots, keys, values)
            h = self._norm(x, f"{layer}.post_attention_layernorm")
            gate = self.weights[f"{layer}.mlp.gate_proj.weight"] @ h
            up = self.weights[f"{layer}.mlp.up_proj.weight"] @ h
            inner = gate / (1 + np.exp(-gate)) * up
            x = x + self.weights[f"{layer}.mlp.down_proj.weight"] @ inner
        return x

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = 1 / np.sqrt((x**2).mean() + self.config["rms_norm_eps"])
        normed: np.ndarray = x * scale * self.weights[f"{name}.weight"]
        return normed

    def _attend(
        self,
        h: np.ndarray,
        name: str,
        position: int,
        slot: int,
        open_slots: int,
        keys: np.ndarray,
        values: np.ndarray,
    ) -> np.ndarray:
        width = self.config["head_dim"]
        q, k, v = (
            (self.weights[f"{name}.{part}_proj.weight"] @ h).reshape(-1, width) for part in "qkv"
        )
        q, k = self._rotate(q, position), self._rotate(k, position)
        if self.fault == "key heads in the wrong order":
            k = k[::-1]
        keys[:, slot], values[:, slot] = k, v
        groups = len(q) // len(k)
        all_keys, all_values = keys.repeat(groups, axis=0), values.repeat(groups, axis=0)
        mask = np.full(self.capacity, -4.0 if self.fault == "closed mask too weak" else _CLOSED)
        mask[: open_slots + (self.fault == "one future slot open" and open_slots > 0)] = 0
        scores = np.einsum("nd,nsd->ns", q, all_keys) / np.sqrt(width) + mask
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        mixed = np.einsum("ns,nsd->nd", weights, all_values).reshape(-1)
        out: np.ndarray = self.weights[f"{name}.o_proj.weight"] @ mixed
        return out

    def _rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        width = x.shape[1]
        angles = position * self.config["rope_theta"] ** -(np.arange(0, width, 2) / width)
        cos, sin = np.cos(angles), np.sin(angles)
        if self.fault == "rotary pairs interleaved":
            turned = np.empty_like(x)
            turned[:, 0::2] = x[:, 0::2] * cos - x[:, 1::2] * sin
            turned[:, 1::2] = x[:, 1::2] * cos + x[:, 0::2] * sin
            return turned
        a, b = x[:, : width // 2], x[:, width // 2 :]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=1)


def greedy(runner: Any, prompt: Sequence[int], count: int, bucket: int) -> list[int]:
    """Continue with all but the last prompt token prefilled in buckets, as LiteRT-LM does."""
    runner.reset()
    for start in range(0, len(prompt) - 1, bucket):
        runner.prefill(prompt[start : min(start + bucket, len(prompt) - 1)], start, bucket)
    answer = [prompt[-1]]
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        answer.append(int(runner.step(answer[-1], position).argmax()))
    return answer[1:]
