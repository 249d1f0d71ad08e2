"""One small tied model as each seed codebase saves it, and what that codebase's formulas answer.

All have the same architecture, so that one graph serves every conversion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layout_oracles import interleaved_logits, nanovlm_greedy, nanovlm_logits
from small_checkpoints import train_tokenizer
from tiny_llama import NANOVLM_NAMES, Weights, reference_logits, rename, tiny_config, tiny_weights
from torch import Tensor

CONFIG = tiny_config()
NANOVLM = {
    "lm_hidden_dim": 64,
    "lm_inter_dim": 96,
    "lm_rms_eps": 1e-5,
    "lm_re_base": 10000.0,
    "lm_max_position_embeddings": 64,
    "lm_vocab_size": 128,
    "lm_n_heads": 4,
    "lm_n_kv_heads": 2,
    "lm_n_blocks": 2,
    "lm_attn_scaling": 1.0,
    "lm_use_tokens": True,
    "lm_tie_weights": True,
}
INTERLEAVED = {
    "nn_embed": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_sequence_len": 64,
    "ffn_intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
HERMES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_embeddings": True,
}
INTERLEAVED_NAMES = [
    ("model.embed_tokens", "embedding"),
    ("model.", ""),
    ("self_attn", "attention"),
    ("mlp.gate_proj", "feed_forward.gate"),
    ("mlp.up_proj", "feed_forward.up"),
    ("mlp.down_proj", "feed_forward.down"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attention_norm"),
]
Greedy = Callable[[Weights, Sequence[int], int], list[int]]


@dataclass(frozen=True)
class Style:
    """A codebase: its names, its configuration, its formulas.

    Attributes:
        layout: the table that must be recognised.
        names: (ours, theirs) pairs for `rename`.
        config: as the checkpoint carries it.
        logits: of its own weights, [T, V] float64.
        cached: its greedy continuation with a cache, if it has one.
    """

    layout: str
    names: list[tuple[str, str]]
    config: dict[str, Any]
    logits: Callable[[Weights, Sequence[int]], Tensor]
    cached: Greedy | None = None

    def weights(self) -> Weights:
        """Unit-gain weights under its names."""
        return rename(tiny_weights(CONFIG), self.names)

    def write(self, folder: Path, weights: Weights | None = None) -> Path:
        """A training checkpoint with optimizer state, and the tokenizer beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "model": self.weights() if weights is None else weights,
            "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": []},
            "config": self.config,
        }
        torch.save(content, folder / "checkpoint.pt")
        (folder / "tokenizer.model").write_bytes(train_tokenizer())
        (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
        return folder / "checkpoint.pt"

    def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """New ids, and at each step the lead of the best logit over the second."""
        weights, extended, leads = self.weights(), list(ids), []
        for _ in range(count):
            last = self.logits(weights, extended)[-1]
            first, second = last.topk(2).values.tolist()
            leads.append(first - second)
            extended.append(int(last.argmax()))
        new = extended[len(ids) :]
        if self.cached is not None:
            assert self.cached(weights, ids, count) == new
        return new, leads


@dataclass(frozen=True)
class Oracle:
    """A style's formulas as a scorer of the ladder."""

    style: Style
    name: str = "oracle"
    capacity: int = 64

    def score(self, ids: Sequence[int]) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
        """Logits after each token."""
        yield from self.style.logits(self.style.weights(), ids).float().numpy()


def _by_our_names(root: str) -> Callable[[Weights, Sequence[int]], Tensor]:
    def logits(weights: Weights, ids: Sequence[int]) -> Tensor:
        ours = {f"{root}{name}": value for name, value in weights.items()}
        return reference_logits(ours, CONFIG, ids)

    return logits


def _nanovlm(weights: Weights, ids: Sequence[int]) -> Tensor:
    return nanovlm_logits(weights, NANOVLM, ids)


def _nanovlm_cached(weights: Weights, ids: Sequence[int], count: int) -> list[int]:
    return nanovlm_greedy(weights, NANOVLM, ids, count)


STYLES = {
    "hermes": Style("hermes", [("model.", "")], HERMES, _by_our_names("model.")),
    "nanovlm without cache": Style("nanovlm", NANOVLM_NAMES, NANOVLM, _nanovlm),
    "nanovlm with cache": Style("nanovlm", NANOVLM_NAMES, NANOVLM, _nanovlm, _nanovlm_cached),
    "smollm2 from scratch": Style(
        "huggingface-bare",
        [("model.", "")],
        CONFIG | {"model_type": "llama", "hidden_act": "silu", "eos_token_id": 2},
        _by_our_names("model."),
    ),
    "interleaved": Style(
        "interleaved",
        INTERLEAVED_NAMES,
        INTERLEAVED,
        lambda weights, ids: interleaved_logits(weights, INTERLEAVED, ids),
    ),
}
