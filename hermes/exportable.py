"""The model as it is exported: static shapes, an explicit KV cache, weights as inputs.

Written from the same architecture as `hermes.model` but sharing no code with it, so that comparing
the two means something. Two operations need a particular TFLite operator; they are torch custom
operators with plain bodies here and get their lowering in `converters.lowerings`.

Shapes in comments: T tokens, H hidden, N query heads, K key/value heads, G = N / K, D head width,
C context.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hermes.config import HermesConfig
from hermes.hadamard import hadamard, mixing_block
from hermes.recipe import GraphOptions
from hermes.rotary import rope_rows
from hermes.signatures import graph_weights


@torch.library.custom_op("hermes::cache_write", mutates_args=())
def cache_write(cache: Tensor, update: Tensor, position: Tensor, axis: int) -> Tensor:
    """Copy of `cache` with `update` written from `position` (scalar) on along `axis`.

    The start is clamped so that the update fits, as DYNAMIC_UPDATE_SLICE does.
    """
    last = cache.shape[axis] - update.shape[axis]
    start = min(max(int(position), 0), last)
    written = cache.clone()
    written.narrow(axis, start, update.shape[axis]).copy_(update)
    return written


@cache_write.register_fake
def _(cache: Tensor, update: Tensor, position: Tensor, axis: int) -> Tensor:
    return torch.empty_like(cache)


@torch.library.custom_op("hermes::batched_matmul", mutates_args=())
def batched_matmul(left: Tensor, right: Tensor) -> Tensor:
    """[1, B, M, K] times the transpose of [1, B, P, K] gives [1, B, M, P]."""
    return left @ right.transpose(2, 3)


@batched_matmul.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((*left.shape[:3], right.shape[2]))


class ExportableModel(nn.Module):
    """One signature's computation.

    Matrices and norm gains come in as inputs, so that a graph can be traced without any weight.
    Biases are module constants: as inputs they would not fold into their matmuls.

    Args:
        config: the model.
        context: slots of the KV cache.
        options: graph choices.
        with_logits: compute logits (decode) or only the cache (prefill).
        biases: bias tensors by graph weight name; zeros where absent.
    """

    rope_cos: Tensor
    rope_sin: Tensor
    mixing: Tensor

    def __init__(
        self,
        config: HermesConfig,
        context: int,
        options: GraphOptions,
        *,
        with_logits: bool,
        biases: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.options = options
        self.with_logits = with_logits
        cos, sin = rope_rows(config, context)
        self.register_buffer("rope_cos", torch.from_numpy(cos))
        self.register_buffer("rope_sin", torch.from_numpy(sin))
        mixing = hadamard(mixing_block(config)).astype(np.float32)
        self.register_buffer("mixing", torch.from_numpy(mixing))
        for weight in graph_weights(config, options):
            if weight.kind == "bias":
                value = (biases or {}).get(weight.name)
                self.register_buffer(
                    weight.name, torch.zeros(weight.shape) if value is None else value
                )

    def forward(
        self,
        tokens: Tensor,
        input_pos: Tensor,
        mask: Tensor,
        kv_cache: dict[str, Tensor],
        weights: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Outputs `kv_cache_k_<layer>`, `kv_cache_v_<layer>` and, for decode, `logits` [1, 1, V].

        Args:
            tokens: [1, T] int32.
            input_pos: [T] int32, consecutive from the first row's position (padding rows hold 0).
            mask: [1, 1, T, C] float32, added to the scores.
            kv_cache: `k_<layer>` [1, K, C, D] and `v_<layer>` [1, K, D, C].
            weights: by graph weight name; matrices [rows, columns].
        """
        x = F.embedding(tokens.reshape(-1), weights["embed_tokens"])  # [T, H]
        cos = F.embedding(input_pos, self.rope_cos).unsqueeze(1)  # [T, 1, D]
        sin = F.embedding(input_pos, self.rope_sin).unsqueeze(1)
        position = input_pos[0]
        outputs: dict[str, Tensor] = {}
        for layer in range(self.config.num_layers):
            normed = self._norm(x, weights.get(f"input_layernorm_{layer}"))
            q, k, v = self._project(normed, layer, cos, sin, weights)
            keys = cache_write(kv_cache[f"k_{layer}"], k, position, 2)
            values = cache_write(kv_cache[f"v_{layer}"], v, position, 3)
            outputs[f"kv_cache_k_{layer}"], outputs[f"kv_cache_v_{layer}"] = keys, values
            attended = self._attend(q, keys, values, mask)
            x = x + self._linear(attended, f"o_proj_{layer}", weights)
            normed = self._norm(x, weights.get(f"post_attention_layernorm_{layer}"))
            x = x + self._feed_forward(normed, layer, weights)
        if self.with_logits:
            x = self._norm(x, weights.get("norm"))
            head = weights["embed_tokens" if self.config.tie_embeddings else "lm_head"]
            outputs["logits"] = F.linear(x, head).unsqueeze(0)
        return outputs

    def _norm(self, x: Tensor, gain: Tensor | None) -> Tensor:
        """RMSNorm; without a gain where the recipe folds it into the next matrix."""
        mean_square = (x * x).mean(-1, keepdim=True)
        normed = x * torch.rsqrt(mean_square + self.config.rms_norm_eps)
        return normed if gain is None else normed * gain

    def _linear(self, x: Tensor, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        stem, layer = name.rsplit("_", 1)
        bias = getattr(self, f"{stem}_bias_{layer}", None)
        return F.linear(x, weights[name], bias)

    def _project(
        self,
        x: Tensor,
        layer: int,
        cos: Tensor,
        sin: Tensor,
        weights: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, K, G*T, D], scaled here or by its weights; k [1, K, T, D]; v [1, K, D, T]."""
        config, length = self.config, x.shape[0]
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        if self.options.fuse_qkv:
            fused = self._linear(x, f"qkv_proj_{layer}", weights).view(length, -1, dim)
            qk, v = fused[:, : heads + kv_heads], fused[:, heads + kv_heads :]
        else:
            q, k, v = (
                self._linear(x, f"{name}_{layer}", weights).view(length, -1, dim)
                for name in ("q_proj", "k_proj", "v_proj")
            )
            qk = torch.cat((q, k), dim=1)
        if config.qk_norm:
            q = self._norm(qk[:, :heads], weights[f"q_norm_{layer}"])
            k = self._norm(qk[:, heads:], weights[f"k_norm_{layer}"])
            qk = torch.cat((q, k), dim=1)
        if layer not in config.no_rope_layers:
            swapped = torch.cat((qk[..., dim // 2 :], qk[..., : dim // 2]), dim=-1)
            qk = qk * cos + swapped * sin
        q = qk[:, :heads]
        if self.options.scale_queries:
            q = q * (dim**-0.5)
        return (
            q.transpose(0, 1).reshape(1, kv_heads, -1, dim),
            qk[:, heads:].transpose(0, 1).unsqueeze(0),
            v.permute(1, 2, 0).unsqueeze(0),
        )

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of the G*T query rows of each key/value head over the whole cache: [T, N*D]."""
        heads, length = self.config.num_heads, mask.shape[2]
        scores = batched_matmul(q, keys)  # [1, K, G*T, C]
        if length > 1:  # one mask row per token: give the groups an axis of their own
            rows = scores.view(self.config.num_kv_heads, -1, length, scores.shape[-1])
            probabilities = torch.softmax(rows + mask, dim=-1).view(scores.shape)
        else:
            probabilities = torch.softmax(scores + mask, dim=-1)
        out: Tensor = batched_matmul(probabilities, values)  # [1, K, G*T, D]
        return out.view(heads, length, -1).transpose(0, 1).reshape(length, -1)

    def _feed_forward(self, x: Tensor, layer: int, weights: Mapping[str, Tensor]) -> Tensor:
        if self.options.fuse_gate_up:
            gate, up = self._linear(x, f"gate_up_proj_{layer}", weights).chunk(2, dim=-1)
        else:
            gate = self._linear(x, f"gate_proj_{layer}", weights)
            up = self._linear(x, f"up_proj_{layer}", weights)
        product = F.silu(gate) * up
        if self.options.mix_down_input:
            # The matrix is symmetric, so a linear layer's transpose changes nothing.
            blocks = product.view(-1, len(self.mixing))
            product = F.linear(blocks, self.mixing).view(product.shape)
        return self._linear(product, f"down_proj_{layer}", weights)
