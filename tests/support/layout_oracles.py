"""Each training codebase's own formulas, in float64, on its own tensor names.

Written from the formulas of the codebases, not from Hermes: own names, own way to rotate (sliced
pairs, complex numbers, halves), own way to repeat key/value heads. Shapes: T tokens, N heads,
D head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def _wide(weights: Weights) -> dict[str, Tensor]:
    return {name: value.double() for name, value in weights.items()}


def nanovlm_logits(weights: Weights, config: Mapping[str, Any], ids: Sequence[int]) -> Tensor:
    """The model without cache: every token at once."""
    return NanoVLM(_wide(weights), config).forward(ids, 0)


def nanovlm_greedy(
    weights: Weights, config: Mapping[str, Any], ids: Sequence[int], count: int
) -> list[int]:
    """The model with cache: the prompt, then one token at a time at its start position."""
    model, new = NanoVLM(_wide(weights), config), list[int]()
    logits = model.forward(ids, 0)
    for step in range(count):
        new.append(int(logits[-1].argmax()))
        logits = model.forward(new[-1:], len(ids) + step)
    return new


class NanoVLM:
    """blocks.N with norm1, attn, norm2, mlp; rotation by halves, tables times a factor."""

    def __init__(self, weights: dict[str, Tensor], config: Mapping[str, Any]) -> None:
        self.weights, self.config = weights, config
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def norm(self, x: Tensor, name: str) -> Tensor:
        inverse = torch.rsqrt((x**2).mean(-1, keepdim=True) + self.config["lm_rms_eps"])
        return x * inverse * self.weights[f"{name}.weight"]

    def rotate(self, x: Tensor, start: int) -> Tensor:
        width = self.config["lm_hidden_dim"] // self.config["lm_n_heads"]
        positions = torch.arange(start, start + x.shape[1], dtype=torch.float64)
        steps = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = positions[:, None] / self.config["lm_re_base"] ** steps
        table = torch.cat((angles, angles), -1)
        factor = self.config["lm_attn_scaling"]
        turned = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
        return x * (table.cos() * factor) + turned * (table.sin() * factor)

    def attend(self, x: Tensor, block: int, start: int) -> Tensor:
        heads, kv = self.config["lm_n_heads"], self.config["lm_n_kv_heads"]
        width, length = self.config["lm_hidden_dim"] // heads, len(x)
        name = f"blocks.{block}.attn"
        parts = [x @ self.weights[f"{name}.{p}_proj.weight"].T for p in "qkv"]
        q, k, v = (part.view(length, -1, width).transpose(0, 1) for part in parts)  # [N, T, D]
        q, k = self.rotate(q, start), self.rotate(k, start)
        if start:
            k = torch.cat((self.keys[block], k), dim=1)
            v = torch.cat((self.values[block], v), dim=1)
        self.keys[block], self.values[block] = k, v
        k, v = k.repeat_interleave(heads // kv, 0), v.repeat_interleave(heads // kv, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(width)
        if length > 1:
            open_ = torch.tril(torch.ones(length, k.shape[1]), diagonal=k.shape[1] - length)
            scores = scores.masked_fill(open_ == 0, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        return mixed @ self.weights[f"{name}.out_proj.weight"].T

    def forward(self, ids: Sequence[int], start: int) -> Tensor:
        x = self.weights["token_embedding.weight"][torch.tensor(list(ids))]
        for block in range(self.config["lm_n_blocks"]):
            name = f"blocks.{block}"
            x = x + self.attend(self.norm(x, f"{name}.norm1"), block, start)
            h = self.norm(x, f"{name}.norm2")
            gate = F.silu(h @ self.weights[f"{name}.mlp.gate_proj.weight"].T)
            up = h @ self.weights[f"{name}.mlp.up_proj.weight"].T
            x = x + (gate * up) @ self.weights[f"{name}.mlp.down_proj.weight"].T
        head = self.weights.get("head.weight", self.weights["token_embedding.weight"])
        return self.norm(x, "norm") @ head.T


def interleaved_logits(weights: Weights, config: Mapping[str, Any], ids: Sequence[int]) -> Tensor:
    """SmolLM2 with (even, odd) pairs, base 10000 always, head tied to the embedding."""
    w, length = _wide(weights), len(ids)
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["nn_embed"] // heads
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000) / width))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    sin, cos = angles.sin()[:, None], angles.cos()[:, None]  # [T, 1, D/2]

    def turn(x: Tensor) -> Tensor:
        even, odd = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), gain, config["rms_norm_eps"])

    x = w["embedding.weight"][torch.tensor(list(ids))]
    causal = torch.tril(torch.ones(length, length))
    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}"
        h = norm(x, w[f"{p}.attention_norm.weight"])
        q, k, v = (F.linear(h, w[f"{p}.attention.{part}_proj.weight"]) for part in "qkv")
        q = turn(q.view(length, heads, width))
        k = turn(k.view(length, kv, width))
        k = k.unsqueeze(2).expand(-1, -1, heads // kv, -1).reshape(length, heads, width)
        v = v.view(length, kv, 1, width).expand(-1, -1, heads // kv, -1)
        v = v.reshape(length, heads, width)
        scores = torch.einsum("thd,shd->hts", q, k) * width**-0.5
        scores = scores.masked_fill(causal == 0, -torch.inf).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", scores, v).flatten(1)
        x = x + F.linear(mixed, w[f"{p}.attention.o_proj.weight"])
        h = norm(x, w[f"{p}.ffn_norm.weight"])
        inner = F.silu(F.linear(h, w[f"{p}.feed_forward.gate.weight"]))
        inner = inner * F.linear(h, w[f"{p}.feed_forward.up.weight"])
        x = x + F.linear(inner, w[f"{p}.feed_forward.down.weight"])
    return norm(x, w["norm.weight"]) @ w["embedding.weight"].T


@dataclass(frozen=True)
class MetaArgs:
    """params.json of Meta's Llama."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    norm_eps: float
    rope_theta: float


def meta_logits(weights: Weights, args: MetaArgs, ids: Sequence[int]) -> Tensor:
    """Meta's Llama: neighbouring elements of a head are one complex number."""
    w, length, width = _wide(weights), len(ids), args.dim // args.n_heads
    rates = args.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), rates)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]  # [T, 1, D/2]

    def turn(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(length, -1, width // 2, 2))
        return torch.view_as_real(pairs * turns).flatten(-2)

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + args.norm_eps).rsqrt()
        return x * scale * w[f"{name}.weight"]

    def project(x: Tensor, p: str) -> list[Tensor]:
        if f"{p}.wqkv.weight" in w:
            kv = args.n_kv_heads * width
            fused = x @ w[f"{p}.wqkv.weight"].T
            return list(fused.split([args.dim, kv, kv], dim=-1))
        return [x @ w[f"{p}.{name}.weight"].T for name in ("wq", "wk", "wv")]

    h = w["tok_embeddings.weight"][torch.tensor(list(ids))]
    for layer in range(args.n_layers):
        p = f"layers.{layer}"
        xq, xk, xv = project(norm(h, f"{p}.attention_norm"), f"{p}.attention")
        xq, xk = turn(xq), turn(xk)
        groups = args.n_heads // args.n_kv_heads
        xk = xk[:, :, None].expand(-1, -1, groups, -1).reshape(length, args.n_heads, width)
        xv = xv.view(length, -1, 1, width).expand(-1, -1, groups, -1)
        xv = xv.reshape(length, args.n_heads, width)
        scores = (xq.transpose(0, 1) @ xk.permute(1, 2, 0)) / math.sqrt(width)
        scores = scores + torch.full((length, length), -torch.inf).triu(1)
        mixed = (scores.softmax(-1) @ xv.transpose(0, 1)).transpose(0, 1).reshape(length, -1)
        h = h + mixed @ w[f"{p}.attention.wo.weight"].T
        x = norm(h, f"{p}.ffn_norm")
        w1, w2, w3 = (w[f"{p}.feed_forward.{name}.weight"] for name in ("w1", "w2", "w3"))
        h = h + (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
    return norm(h, "norm") @ w.get("output.weight", w["tok_embeddings.weight"]).T
