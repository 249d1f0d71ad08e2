"""A tiny Llama with static shapes and an explicit cache, and its flatbuffer, for runner tests.

Independent of `hermes.exportable` and of `converters`: it reads Hugging Face named weights and is
traced with its weights as constants. Faults of an export can be planted by name.
Shapes in comments: T tokens, S cache slots, N query heads, K kv heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

Fault = Literal["none", "cache offset", "cache not written", "last row"]


class StaticLlama(nn.Module):
    """One step of `T` tokens at `input_pos` against a cache of `context` slots.

    Keys (1, K, S, D) and values (1, K, D, S), as `hermes.signatures.cache_specs` says.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: Mapping[str, Any],
        context: int,
        *,
        with_logits: bool,
        fault: Fault = "none",
    ) -> None:
        super().__init__()
        self.config = config
        self.with_logits = with_logits
        self.fault = fault
        for name, value in weights.items():
            self.register_buffer(name.replace(".", "_"), value.float().contiguous())
        dim = config["head_dim"]
        frequencies = config["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.arange(context + 8)[:, None] * frequencies[None]
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def _weight(self, name: str) -> Tensor:
        weight: Tensor = getattr(self, f"{name}.weight".replace(".", "_"))
        return weight

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self._weight(name)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, self._weight(name))

    def _attend(
        self, x: Tensor, layer: str, position: Tensor, mask: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        from litert_torch.generative.custom_ops.bmm_4d import bmm_4d
        from litert_torch.generative.custom_ops.dynamic_update_slice import dynamic_update_slice

        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim, length = self.config["head_dim"], x.shape[1]
        q = self._linear(x, f"{layer}.q_proj").view(1, length, heads, dim).transpose(1, 2)
        k = self._linear(x, f"{layer}.k_proj").view(1, length, kv_heads, dim).transpose(1, 2)
        v = self._linear(x, f"{layer}.v_proj").view(1, length, kv_heads, dim)
        cos, sin = self.cos[position], self.sin[position]  # [T, D]
        q, k = (part * cos + _turn(part) * sin for part in (q, k))
        if self.fault != "cache not written":
            zero = torch.zeros((), dtype=torch.int32)
            start = position[0] + (1 if self.fault == "cache offset" else 0)
            keys = dynamic_update_slice(keys, k, [zero, zero, start, zero])
            rows = v.permute(0, 2, 3, 1)
            values = dynamic_update_slice(values, rows, [zero, zero, zero, start])
        q = q.reshape(1, kv_heads, heads // kv_heads * length, dim)
        scores = bmm_4d(q, keys) / math.sqrt(dim)
        scores = scores.view(1, heads, length, -1) + mask
        shape = (1, kv_heads, heads // kv_heads * length, keys.shape[2])
        weights = torch.softmax(scores, dim=-1).view(shape)
        mixed = bmm_4d(weights, values).view(1, heads, length, dim).transpose(1, 2)
        return self._linear(mixed.reshape(1, length, -1), f"{layer}.o_proj"), keys, values

    def forward(
        self, tokens: Tensor, input_pos: Tensor, mask: Tensor, kv_cache: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Caches of all layers and, for decode, logits [1, T, vocab]."""
        table = self._weight("model.embed_tokens")
        x = nn.functional.embedding(tokens, table)
        outputs: dict[str, Tensor] = {}
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            attended, keys, values = self._attend(
                self._norm(x, f"{layer}.input_layernorm"),
                f"{layer}.self_attn",
                input_pos,
                mask,
                kv_cache[f"k_{index}"],
                kv_cache[f"v_{index}"],
            )
            outputs[f"kv_cache_k_{index}"], outputs[f"kv_cache_v_{index}"] = keys, values
            x = x + attended
            normed = self._norm(x, f"{layer}.post_attention_layernorm")
            gate = nn.functional.silu(self._linear(normed, f"{layer}.mlp.gate_proj"))
            inner = gate * self._linear(normed, f"{layer}.mlp.up_proj")
            x = x + self._linear(inner, f"{layer}.mlp.down_proj")
        if self.with_logits:
            tied = not hasattr(self, "lm_head_weight")
            head = table if tied else self.lm_head_weight
            outputs["logits"] = nn.functional.linear(self._norm(x, "model.norm"), head)
        return outputs


def _turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def write_flatbuffer(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    target: Path,
    *,
    context: int = 64,
    prefill: Sequence[int] = (1, 8, 16, 32),
    fault: Fault = "none",
) -> Path:
    """Trace with litert-torch and write a float32 .tflite with the runtime's signatures."""
    import litert_torch

    dim, heads = config["head_dim"], config["num_key_value_heads"]
    cache = {}
    for index in range(config["num_hidden_layers"]):
        cache[f"k_{index}"] = torch.zeros(1, heads, context, dim)
        cache[f"v_{index}"] = torch.zeros(1, heads, dim, context)
    decode = StaticLlama(weights, config, context, with_logits=True, fault=fault).eval()
    fill = StaticLlama(weights, config, context, with_logits=False, fault=fault).eval()
    converter = litert_torch.Converter()
    modules = [(f"prefill_{length}", fill, length) for length in prefill]
    for name, module, length in [*modules, ("decode", decode, 1)]:
        sample = {
            "tokens": torch.zeros(1, length, dtype=torch.int32),
            "input_pos": torch.arange(length, dtype=torch.int32),
            "mask": torch.zeros(1, 1, length, context),
            "kv_cache": dict(cache),
        }
        converter = converter.add_signature(name, module, sample_kwargs=sample)
    converter.convert().export(str(target))
    return target
