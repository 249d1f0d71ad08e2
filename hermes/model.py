"""The reference model: plain PyTorch, trainable, and the oracle of every later stage.

Decoder-only transformer of the Llama family: pre-norm RMSNorm, rotary positions (halves), grouped
query attention, SwiGLU. Shapes in comments: B batch, T tokens, H hidden, N query heads, K key/value
heads, D head width, S cached positions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hermes.config import HermesConfig, RopeScaling

KVCache = list[tuple[Tensor, Tensor]]
"""Per layer the rotated keys and the values, both [B, K, S, D]."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the quotient in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


def rope_frequencies(config: HermesConfig) -> Tensor:
    """Angle per position of each pair, [D/2], float32 (Su et al. 2021)."""
    exponent = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponent)
    if config.rope_scaling is not None:
        frequencies = _scale_frequencies(frequencies, config.rope_scaling)
    return frequencies


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = frequencies * scaling.original_max_seq_len / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def build_rope_tables(config: HermesConfig, seq_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0..seq_len-1, both [seq_len, D], halves repeated."""
    angles = torch.outer(torch.arange(seq_len).float(), rope_frequencies(config))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * config.rope_amplitude, angles.sin() * config.rope_amplitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]); x [B, heads, T, D], cos and sin [T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with an optional growing cache."""

    def __init__(self, config: HermesConfig, *, rotary: bool) -> None:
        super().__init__()
        self.config = config
        self.rotary = rotary
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.config.num_heads, -1)  # [B, T, N, D]
        k = self.k_proj(x).view(batch, length, self.config.num_kv_heads, -1)
        v = self.v_proj(x).view(batch, length, self.config.num_kv_heads, -1)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.rotary:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        present = (k, v)

        groups = self.config.num_query_groups
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.config.head_dim) + mask  # [B, N, T, S]
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        out = (weights @ v).transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(out), present


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: HermesConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: HermesConfig, *, rotary: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rotary=rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, present = self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), present


class HermesForCausalLM(nn.Module):
    """Decoder-only language model with a causal head."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: HermesConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderBlock(config, rotary=index not in config.no_rope_layers)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        cos, sin = build_rope_tables(config, config.max_seq_len)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        start_pos: int = 0,
        kv_cache: KVCache | None = None,
    ) -> dict[str, Tensor | None]:
        """Logits for every position, and the next-token loss if labels are given.

        Args:
            input_ids: [B, T] token ids.
            labels: [B, T] ids to predict, shifted here; `pad_token_id` is ignored.
            start_pos: position of the first token.
            kv_cache: an empty list to start a cache, or the list of an earlier call, holding
                positions 0..start_pos-1. It is extended in place.

        Returns:
            `logits` [B, T, vocab] and `loss` (scalar or None).
        """
        logits = self.lm_head(self.hidden(input_ids, start_pos, kv_cache))
        return {"logits": logits, "loss": self._loss(logits, labels)}

    def hidden(
        self, input_ids: Tensor, start_pos: int = 0, kv_cache: KVCache | None = None
    ) -> Tensor:
        """What the head multiplies, [B, T, hidden]; arguments as for `forward`."""
        length = input_ids.shape[1]
        end = start_pos + length
        if end > self.config.max_seq_len:
            raise ValueError(
                f"positions up to {end} asked for, the model has {self.config.max_seq_len}"
            )
        x = self.embed_tokens(input_ids)
        cos, sin = self.rope_cos[start_pos:end], self.rope_sin[start_pos:end]
        cached = start_pos if kv_cache else 0
        closed = torch.full((length, cached + length), float("-inf"), device=x.device)
        mask = torch.triu(closed, diagonal=cached + 1)
        for index, layer in enumerate(self.layers):
            x, present = layer(x, cos, sin, mask, kv_cache[index] if cached and kv_cache else None)
            if kv_cache is not None:
                kv_cache[index : index + 1] = [present]
        normed: Tensor = self.norm(x)
        return normed

    def _loss(self, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        if labels is None:
            return None
        pad = self.config.pad_token_id
        return F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]),
            labels[:, 1:].reshape(-1),
            ignore_index=-100 if pad is None else pad,
        )

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int = 50,
        eos_token_id: int | None = None,
        top_p: float = 1.0,
        use_cache: bool = True,
    ) -> Tensor:
        """Continue [B, T] ids; temperature 0 is greedy. Stops when every row emits eos.

        Past `max_seq_len` the oldest tokens are dropped and positions start at 0 again, with or
        without the cache, so both give the same tokens.
        """
        self.eval()
        eos = self.config.eos_token_id if eos_token_id is None else eos_token_id
        cache: KVCache = []
        done = 0  # positions already in the cache
        for _ in range(max_new_tokens):
            if use_cache and input_ids.shape[1] <= self.config.max_seq_len:
                logits = self(input_ids[:, done:], start_pos=done, kv_cache=cache)["logits"]
                done = input_ids.shape[1]
            else:
                logits = self(input_ids[:, -self.config.max_seq_len :])["logits"]
            next_id = sample(logits[:, -1], temperature, top_k, top_p)
            input_ids = torch.cat((input_ids, next_id), dim=1)
            if eos is not None and bool((next_id == eos).all()):
                break
        return input_ids


def sample(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Draw one id per row of [B, vocab] logits: temperature, then top-k, then nucleus."""
    if temperature <= 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k:
        worst = torch.topk(logits, min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < worst, float("-inf"))
    if top_p < 1.0:
        ordered, order = torch.sort(logits, descending=True)
        probabilities = F.softmax(ordered, dim=-1)
        # The token that crosses the threshold stays in.
        outside = probabilities.cumsum(-1) - probabilities > top_p
        logits = logits.masked_fill(outside.scatter(1, order, outside), float("-inf"))
    return torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)


def initialize_weights(
    model: HermesForCausalLM, std: float = 0.02, seed: int | None = None
) -> None:
    """Normal(0, std); matrices that write to the residual stream scaled by 1/sqrt(2 layers).

    Without a seed, PyTorch's global generator draws.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    residual = std / math.sqrt(2 * model.config.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, residual if into_residual else std, generator=generator)


def build_model(config: HermesConfig) -> HermesForCausalLM:
    """A model with PyTorch's default initialisation."""
    return HermesForCausalLM(config)
