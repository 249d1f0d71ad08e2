"""Tiny Llama-family models with telling weights, and an independent float64 reference.

Every draw has real gain (unit-gain projections, q and k at 1.6, random norm weights), because with
the usual N(0, 0.02) a wrong rotary style hardly moves the logits. The reference shares nothing with
`hermes.model`: it works on a dict of Hugging Face names, in float64, without modules.
Shapes in comments: T tokens, D head width, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hermes.config import HermesConfig, RopeScaling

Weights = dict[str, Tensor]
RopeStyle = Literal["half", "interleaved"]

PROMPT_IDS = [1, 17, 42, 99, 3, 64, 7, 23, 88, 5, 120, 31]
"""Twelve fixed ids below 128."""

GREEDY_UNTIED = [119, 84, 11, 46, 104, 114, 126, 64]
"""What `tiny_weights(tiny_config(tie_word_embeddings=False))` says after PROMPT_IDS."""

NANOVLM_NAMES = [
    ("model.embed_tokens", "token_embedding"),
    ("model.norm", "norm"),
    ("model.layers.", "blocks."),
    ("self_attn.o_proj", "attn.out_proj"),
    ("self_attn.", "attn."),
    ("input_layernorm", "norm1"),
    ("post_attention_layernorm", "norm2"),
    ("lm_head", "head"),
]


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A complete config.json of two layers, four heads, two kv heads, in Hugging Face spelling."""
    config: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
    }
    return config | changes


@dataclass
class _Draws:
    """Random tensors in a fixed order from one seed."""

    seed: int
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return self.normal(rows, columns) * (gain / math.sqrt(columns))

    def norm(self, width: int) -> Tensor:
        return 0.5 + torch.rand(width, generator=self.generator)


def tiny_weights(
    config: Mapping[str, Any],
    *,
    seed: int = 0,
    tied: bool | None = None,
    bias: bool = False,
    qk_gain: float = 1.6,
    embedding_gain: float = 1.0,
) -> Weights:
    """Float32 weights in Hugging Face names; `tied` overrides the config about storing a head."""
    draw = _Draws(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    weights = {
        "model.embed_tokens.weight": draw.normal(config["vocab_size"], hidden) * embedding_gain
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        weights[f"{layer}.input_layernorm.weight"] = draw.norm(hidden)
        weights[f"{layer}.post_attention_layernorm.weight"] = draw.norm(hidden)
        for name, rows, columns, gain in (
            ("self_attn.q_proj", query, hidden, qk_gain),
            ("self_attn.k_proj", key, hidden, qk_gain),
            ("self_attn.v_proj", key, hidden, 1.0),
            ("self_attn.o_proj", hidden, query, 1.0),
            ("mlp.gate_proj", inner, hidden, 1.0),
            ("mlp.up_proj", inner, hidden, 1.0),
            ("mlp.down_proj", hidden, inner, 1.0),
        ):
            weights[f"{layer}.{name}.weight"] = draw.matrix(rows, columns, gain)
        if bias:
            for name, rows in (("q", query), ("k", key), ("v", key), ("o", hidden)):
                weights[f"{layer}.self_attn.{name}_proj.bias"] = draw.normal(rows) * 0.5
    weights["model.norm.weight"] = draw.norm(hidden)
    if not (config["tie_word_embeddings"] if tied is None else tied):
        weights["lm_head.weight"] = draw.matrix(config["vocab_size"], hidden)
    return weights


def rename(weights: Mapping[str, Tensor], pairs: Sequence[tuple[str, str]]) -> Weights:
    """Replace every (old, new) in every key, in order."""
    renamed: Weights = {}
    for key, value in weights.items():
        for old, new in pairs:
            key = key.replace(old, new)
        renamed[key] = value
    return renamed


def rope_frequencies(config: Mapping[str, Any], scaling: Mapping[str, Any] | None = None) -> Tensor:
    """[D/2] angles per position; `scaling` in the spelling of Llama 3's config."""
    exponents = torch.arange(0, config["head_dim"], 2, dtype=torch.float64) / config["head_dim"]
    frequencies: Tensor = config["rope_theta"] ** -exponents
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelengths
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling["factor"] + kept * frequencies


def rotate(x: Tensor, angles: Tensor, style: RopeStyle) -> Tensor:
    """Turn the pairs of x [T, heads, D] by angles [T, D/2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    if style == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


@dataclass
class _Reference:
    weights: Weights
    config: Mapping[str, Any]
    eps: float
    amplitude: float = 1.0

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out: Tensor = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def attention(self, x: Tensor, name: str, angles: Tensor | None, style: RopeStyle) -> Tensor:
        """Causal attention over x [T, H]; angles None is a layer without rotation."""
        length, width = x.shape[0], self.config["head_dim"]
        q, k, v = (self.linear(x, f"{name}.{part}_proj").view(length, -1, width) for part in "qkv")
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        if angles is not None:
            q, k = (self.amplitude * rotate(part, angles, style) for part in (q, k))
        groups = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(width)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", probabilities, v).reshape(length, -1)
        return self.linear(mixed, f"{name}.o_proj")

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        gate = torch.nn.functional.silu(self.linear(x, f"{name}.gate_proj"))
        return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")


def reference_logits(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    ids: Sequence[int],
    *,
    style: RopeStyle = "half",
    scaling: Mapping[str, Any] | None = None,
    head: Tensor | None = None,
    no_rope_layers: Collection[int] = (),
    eps: float | None = None,
    positions: Tensor | None = None,
    rope_amplitude: float = 1.0,
) -> Tensor:
    """Logits [T, V] in float64 of Hugging Face named weights.

    Biases and q/k norms are used when the dict holds them. `head` replaces the output matrix;
    `rope_amplitude` multiplies the rotated queries and keys (where rotated).
    """
    wide = {name: value.double() for name, value in weights.items()}
    model = _Reference(wide, config, config["rms_norm_eps"] if eps is None else eps, rope_amplitude)
    positions = torch.arange(len(ids)) if positions is None else positions
    angles = positions.double()[:, None] * rope_frequencies(config, scaling)[None]
    x = wide["model.embed_tokens.weight"][torch.tensor(ids)]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        turned = None if index in no_rope_layers else angles
        normed = model.norm(x, f"{layer}.input_layernorm")
        x = x + model.attention(normed, f"{layer}.self_attn", turned, style)
        normed = model.norm(x, f"{layer}.post_attention_layernorm")
        x = x + model.feed_forward(normed, f"{layer}.mlp")
    if head is None:
        head = wide.get("lm_head.weight", wide["model.embed_tokens.weight"])
    return model.norm(x, "model.norm") @ head.double().T


def reference_greedy(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    ids: Sequence[int],
    count: int,
    **options: Any,
) -> list[int]:
    """The `count` new ids of greedy decoding without a cache; options of `reference_logits`."""
    extended = list(ids)
    for _ in range(count):
        extended.append(int(reference_logits(weights, config, extended, **options)[-1].argmax()))
    return extended[len(ids) :]


def largest_gap(first: Tensor, second: Tensor) -> float:
    """Largest absolute difference."""
    return float((first.double() - second.double()).abs().max())


def hermes_config(config: Mapping[str, Any], **changes: Any) -> HermesConfig:
    """The same sizes as a HermesConfig; special ids are left out."""
    values: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "max_seq_len": config["max_position_embeddings"],
        "rope_theta": config["rope_theta"],
        "rms_norm_eps": config["rms_norm_eps"],
        "tie_embeddings": config["tie_word_embeddings"],
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return HermesConfig(**(values | changes))


def hermes_scaling(scaling: Mapping[str, Any]) -> RopeScaling:
    """Llama 3's scaling dict as a RopeScaling."""
    return RopeScaling(
        kind="llama3",
        factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_seq_len=scaling["original_max_position_embeddings"],
    )


def hermes_weights(weights: Mapping[str, Tensor]) -> Weights:
    """Hugging Face names to Hermes names: the root `model.` is dropped."""
    return {name.removeprefix("model."): value for name, value in weights.items()}
