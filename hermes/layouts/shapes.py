"""What the tensors themselves tell about the model's sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import BadInputError
from hermes.layouts.matching import Match
from hermes.layouts.operations import SplitRows, Transpose


@dataclass(frozen=True)
class Evidence:
    """Sizes from shapes and flags from names; None where nothing tells."""

    vocab_size: int | None
    hidden_size: int | None
    intermediate_size: int | None
    num_layers: int
    query_rows: int | None
    key_rows: int | None
    head_dim: int | None
    has_head: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def provisional_config(self) -> HermesConfig | None:
        """A configuration with these shapes, for comparing shapes while fields are missing.

        Its head count and rotary fields mean nothing.
        """
        if not (self.query_rows and self.key_rows and not self.query_rows % self.key_rows):
            return None
        width = self.head_dim or self.key_rows
        try:
            return HermesConfig(
                vocab_size=self.vocab_size or 0,
                hidden_size=self.hidden_size or 0,
                intermediate_size=self.intermediate_size or 0,
                num_layers=self.num_layers,
                num_heads=self.query_rows // width,
                num_kv_heads=self.key_rows // width,
                head_dim=width,
                attention_bias=self.attention_bias,
                output_bias=self.output_bias,
                mlp_bias=self.mlp_bias,
                qk_norm=self.qk_norm,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
            )
        except BadInputError:
            return None


def gather(found: Match, tensors: Mapping[str, LazyTensor]) -> Evidence:
    """Per kind of tensor the shape that most layers have, so that one bad layer shows as bad."""
    view = _View(found, tensors)
    embedding = view.shape("embed_tokens.weight", 2)
    output = view.shape("layers.{}.self_attn.o_proj.weight", 2)
    down = view.shape("layers.{}.mlp.down_proj.weight", 2)
    query_rows = output[1] if output else None
    norm = view.shape("layers.{}.self_attn.q_norm.weight", 1)
    return Evidence(
        vocab_size=embedding[0] if embedding else None,
        hidden_size=embedding[1] if embedding else None,
        intermediate_size=down[1] if down else None,
        num_layers=found.layers,
        query_rows=query_rows,
        key_rows=view.key_rows(query_rows),
        head_dim=norm[0] if norm else None,
        has_head=found.rule_of("lm_head.weight") is not None,
        attention_bias=view.any_of("self_attn.{}_proj.bias", "qkv"),
        output_bias=view.any_of("self_attn.{}_proj.bias", "o"),
        mlp_bias=view.any_of("mlp.{}_proj.bias", ("gate", "up", "down")),
        qk_norm=view.any_of("self_attn.{}_norm.weight", "qk"),
    )


@dataclass(frozen=True)
class _View:
    found: Match
    tensors: Mapping[str, LazyTensor]

    def stored_shape(self, source: str, rank: int) -> tuple[int, ...] | None:
        shapes = Counter(
            self.tensors[name].shape
            for (template, _), name in self.found.found.items()
            if template == source and len(self.tensors[name].shape) == rank
        )
        # Of equally common shapes the larger: placeholders and cut tensors are the smaller ones.
        return max(shapes, key=lambda shape: (shapes[shape], math.prod(shape)), default=None)

    def shape(self, target: str, rank: int) -> tuple[int, ...] | None:
        rule = self.found.rule_of(target)
        if rule is None or isinstance(rule.operation, SplitRows):
            return None
        shape = self.stored_shape(rule.sources[0], rank)
        if shape and isinstance(rule.operation, Transpose):
            return shape[::-1]
        return shape

    def key_rows(self, query_rows: int | None) -> int | None:
        target = "layers.{}.self_attn.k_proj.weight"
        rule = self.found.rule_of(target)
        if rule is not None and isinstance(rule.operation, SplitRows):
            fused = self.stored_shape(rule.sources[0], 2)
            return (fused[0] - query_rows) // 2 if fused and query_rows else None
        shape = self.shape(target, 2)
        return shape[0] if shape else None

    def any_of(self, form: str, parts: str | tuple[str, ...]) -> bool:
        names = [f"layers.{{}}.{form.format(part)}" for part in parts]
        return any(self.found.rule_of(name) for name in names)
