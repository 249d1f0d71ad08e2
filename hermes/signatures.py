"""The exported functions as data: names, shapes and types that every stage reads.

The names are those LiteRT-LM looks for: `decode` and everything that starts with `prefill`; inputs
`tokens`, `input_pos`, `mask` and the cache tensors, whose outputs carry the same names so that the
runtime updates the cache in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hermes.config import HermesConfig
from hermes.parameters import layer_shapes
from hermes.recipe import GraphOptions

DECODE = "decode"
MASK_CLOSED = -0.7 * 3.4028234663852886e38
"""What LiteRT-LM writes into closed entries of a float32 mask; open entries are 0."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, shape and element type."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["int32", "float32"]


@dataclass(frozen=True)
class Signature:
    """One exported function: `length` tokens at consecutive positions against the whole cache."""

    name: str
    length: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def prefill_name(length: int) -> str:
    """Name of the prefill signature that takes `length` tokens."""
    return f"prefill_{length}"


def cache_specs(config: HermesConfig, context: int) -> tuple[TensorSpec, ...]:
    """Keys (1, kv_heads, context, head_dim) and values, stored transposed, per layer.

    Values are (1, kv_heads, head_dim, context) so that both attention products contract the last
    axis of both operands.
    """
    heads, dim = config.num_kv_heads, config.head_dim
    specs = []
    for layer in range(config.num_layers):
        specs.append(TensorSpec(f"kv_cache_k_{layer}", (1, heads, context, dim), "float32"))
        specs.append(TensorSpec(f"kv_cache_v_{layer}", (1, heads, dim, context), "float32"))
    return tuple(specs)


def build_signatures(
    config: HermesConfig, context: int, prefill_lengths: Sequence[int]
) -> tuple[Signature, ...]:
    """The prefill ladder, shortest first, and `decode`, which computes logits.

    A prefill of length 1 is `decode` under another name, logits included.
    """
    cache = cache_specs(config, context)
    logits = TensorSpec("logits", (1, 1, config.vocab_size), "float32")
    ladder = [(prefill_name(length), length) for length in sorted(prefill_lengths)]
    return tuple(
        Signature(
            name,
            length,
            _step_inputs(length, context) + cache,
            (*cache, logits) if length == 1 else cache,
        )
        for name, length in [*ladder, (DECODE, 1)]
    )


def _step_inputs(length: int, context: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("tokens", (1, length), "int32"),
        TensorSpec("input_pos", (length,), "int32"),
        TensorSpec("mask", (1, 1, length, context), "float32"),
    )


@dataclass(frozen=True)
class GraphWeight:
    """A weight of the exported graph, traced as an input and bound as a constant later.

    Attributes:
        name: key in the exportable module's `weights`; the traced input is `weights_<name>`.
        shape: rows first for matrices.
        parts: Hermes parameters whose rows, one after the other, make this weight.
        kind: `matrix` (read by a matmul or a lookup, quantized by the recipe), `gain` (a norm's
            vector, always float32) or `bias` (float32, folded into its matmul).
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    kind: Literal["matrix", "gain", "bias"]


def graph_weights(config: HermesConfig, options: GraphOptions) -> tuple[GraphWeight, ...]:
    """Every weight of the graph in model order; a tied head reads the embedding's entry."""
    table = (config.vocab_size, config.hidden_size)
    weights = [GraphWeight("embed_tokens", table, ("embed_tokens.weight",), "matrix")]
    for layer in range(config.num_layers):
        weights.extend(_layer_weights(config, options, layer))
    if options.norm_gains:
        weights.append(GraphWeight("norm", (config.hidden_size,), ("norm.weight",), "gain"))
    if not config.tie_embeddings:
        weights.append(GraphWeight("lm_head", table, ("lm_head.weight",), "matrix"))
    return tuple(weights)


def layer_projections(config: HermesConfig, options: GraphOptions) -> dict[str, tuple[str, ...]]:
    """Matmuls of one layer: graph name -> the Hermes projections fused into it."""
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    feed_forward = ("mlp.gate_proj", "mlp.up_proj")
    projections: dict[str, tuple[str, ...]] = {}
    if options.fuse_qkv:
        projections["qkv_proj"] = attention
    else:
        projections.update({name.split(".")[1]: (name,) for name in attention})
    projections["o_proj"] = ("self_attn.o_proj",)
    if options.fuse_gate_up:
        projections["gate_up_proj"] = feed_forward
    else:
        projections.update({name.split(".")[1]: (name,) for name in feed_forward})
    projections["down_proj"] = ("mlp.down_proj",)
    return projections


def _layer_weights(config: HermesConfig, options: GraphOptions, layer: int) -> list[GraphWeight]:
    shapes = layer_shapes(config)
    prefix = f"layers.{layer}."
    weights = []
    for name, projections in layer_projections(config, options).items():
        rows = sum(shapes[f"{part}.weight"][0] for part in projections)
        columns = shapes[f"{projections[0]}.weight"][1]
        parts = tuple(f"{prefix}{part}.weight" for part in projections)
        weights.append(GraphWeight(f"{name}_{layer}", (rows, columns), parts, "matrix"))
        if f"{projections[0]}.bias" in shapes:
            biases = tuple(f"{prefix}{part}.bias" for part in projections)
            weights.append(GraphWeight(f"{name}_bias_{layer}", (rows,), biases, "bias"))
    for name, shape in shapes.items():
        # The q and k norms' gains act inside the attention and are never folded.
        folded = not options.norm_gains and name.endswith("layernorm.weight")
        if name.endswith("norm.weight") and not folded:
            gain = name.removesuffix(".weight").split(".")[-1]
            weights.append(GraphWeight(f"{gain}_{layer}", shape, (prefix + name,), "gain"))
    return weights
