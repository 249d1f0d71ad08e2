"""A Llama forward pass in float64 numpy, written apart from every other one, for exact comparisons.

It can do the two things that a graph with rewritten weights does differently: mix blocks of the
down projection's input with a Hadamard matrix, and leave the attention scale out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.linalg import hadamard as scipy_hadamard

from hermes.config import HermesConfig

Weights = Mapping[str, np.ndarray]


def logits(
    config: HermesConfig,
    weights: Weights,
    ids: Sequence[int],
    *,
    mixing: int = 1,
    scaled: bool = True,
) -> np.ndarray:
    """[T, vocab]."""
    x = weights["embed_tokens.weight"][list(ids)]
    for layer in range(config.num_layers):
        own = {
            k.split(".", 2)[2]: v for k, v in weights.items() if k.startswith(f"layers.{layer}.")
        }
        normed = _norm(x, own["input_layernorm.weight"], config)
        rotary = layer not in config.no_rope_layers
        x = x + _attention(config, own, normed, rotary=rotary, scaled=scaled)
        normed = _norm(x, own["post_attention_layernorm.weight"], config)
        gate, up = _linear(own, "mlp.gate_proj", normed), _linear(own, "mlp.up_proj", normed)
        product = gate / (1 + np.exp(-gate)) * up
        matrix = scipy_hadamard(mixing) / np.sqrt(mixing)
        mixed = np.concatenate(
            [product[:, at : at + mixing] @ matrix for at in range(0, product.shape[1], mixing)],
            axis=1,
        )
        x = x + _linear(own, "mlp.down_proj", mixed)
    table = "embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return _norm(x, weights["norm.weight"], config) @ weights[table].T


def _norm(x: np.ndarray, gain: np.ndarray, config: HermesConfig) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * gain


def _linear(own: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)


def _attention(
    config: HermesConfig, own: Weights, x: np.ndarray, *, rotary: bool, scaled: bool
) -> np.ndarray:
    length, dim, groups = len(x), config.head_dim, config.num_query_groups
    heads = []
    for head in range(config.num_heads):
        parts = []
        for name, index in (("q", head), ("k", head // groups), ("v", head // groups)):
            part = _linear(own, f"self_attn.{name}_proj", x)[:, index * dim : (index + 1) * dim]
            if name != "v" and config.qk_norm:
                part = _norm(part, own[f"self_attn.{name}_norm.weight"], config)
            if name != "v" and rotary:
                part = _rotated(part, config)
            parts.append(part)
        q, k, v = parts
        scores = q @ k.T / (np.sqrt(dim) if scaled else 1.0)
        scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v)
    return _linear(own, "self_attn.o_proj", np.concatenate(heads, axis=1))


def _rotated(x: np.ndarray, config: HermesConfig) -> np.ndarray:
    half = config.head_dim // 2
    angles = np.arange(len(x))[:, None] / config.rope_theta ** (np.arange(half) / half)
    pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=1)
