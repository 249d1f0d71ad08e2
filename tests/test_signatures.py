"""Signatures and graph weights as data: names and shapes, and every parameter exactly once."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from hermes.config import HermesConfig
from hermes.parameters import parameter_shapes
from hermes.recipe import GraphOptions
from hermes.signatures import TensorSpec, build_signatures, cache_specs, graph_weights

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
}


def test_signatures_are_what_the_runtime_looks_for() -> None:
    signatures = build_signatures(HermesConfig(**SIZES), 32, (16, 4))
    assert [s.name for s in signatures] == ["prefill_4", "prefill_16", "decode"]
    for signature, length in zip(signatures, (4, 16, 1), strict=True):
        assert signature.length == length
        shapes = {spec.name: (spec.shape, spec.dtype) for spec in signature.inputs}
        cache = {
            "kv_cache_k_0": ((1, 2, 32, 8), "float32"),
            "kv_cache_v_0": ((1, 2, 8, 32), "float32"),
            "kv_cache_k_1": ((1, 2, 32, 8), "float32"),
            "kv_cache_v_1": ((1, 2, 8, 32), "float32"),
        }
        assert shapes == {
            "tokens": ((1, length), "int32"),
            "input_pos": ((length,), "int32"),
            "mask": ((1, 1, length, 32), "float32"),
            **cache,
        }
        outputs = {spec.name: (spec.shape, spec.dtype) for spec in signature.outputs}
        logits = {"logits": ((1, 1, 100), "float32")} if signature.name == "decode" else {}
        assert outputs == cache | logits
    assert cache_specs(HermesConfig(**SIZES), 32)[0] == TensorSpec(
        "kv_cache_k_0", (1, 2, 32, 8), "float32"
    )


@pytest.mark.parametrize("flags", itertools.product([False, True], repeat=7))
def test_every_parameter_is_in_the_graph_once(flags: tuple[bool, ...]) -> None:
    tied, attention, output, mlp, qk_norm, fuse_qkv, fuse_gate_up = flags
    config = HermesConfig(
        **SIZES,
        tie_embeddings=tied,
        attention_bias=attention,
        output_bias=output,
        mlp_bias=mlp,
        qk_norm=qk_norm,
    )
    shapes = parameter_shapes(config)
    weights = graph_weights(config, GraphOptions(fuse_qkv, fuse_gate_up))
    assert Counter(part for weight in weights for part in weight.parts) == Counter(list(shapes))
    assert len({weight.name for weight in weights}) == len(weights)
    for weight in weights:
        parts = [shapes[part] for part in weight.parts]
        assert weight.shape == (sum(shape[0] for shape in parts), *parts[0][1:])
        kinds = {"matrix" if len(shape) == 2 else "vector" for shape in parts}
        assert kinds == {"matrix" if weight.kind == "matrix" else "vector"}
        assert (weight.kind == "bias") == all(part.endswith("bias") for part in weight.parts)


@pytest.mark.parametrize(("fused", "expected"), [(True, 4), (False, 7)])
def test_fusing_joins_the_rows_in_order(fused: bool, expected: int) -> None:
    config = HermesConfig(**SIZES, attention_bias=True)
    weights = {w.name: w for w in graph_weights(config, GraphOptions(fused, fused))}
    matrices = [w for w in weights.values() if w.kind == "matrix" and w.name.endswith("_1")]
    assert len(matrices) == expected
    if fused:
        assert weights["qkv_proj_1"].parts == tuple(
            f"layers.1.self_attn.{part}_proj.weight" for part in "qkv"
        )
        assert weights["qkv_proj_1"].shape == (80, 40)
        assert weights["qkv_proj_bias_1"].parts == tuple(
            f"layers.1.self_attn.{part}_proj.bias" for part in "qkv"
        )
        assert weights["gate_up_proj_0"].parts == (
            "layers.0.mlp.gate_proj.weight",
            "layers.0.mlp.up_proj.weight",
        )
    else:
        assert weights["k_proj_1"].shape == (16, 40)
        assert weights["k_proj_bias_1"].parts == ("layers.1.self_attn.k_proj.bias",)
