"""Names and shapes of a Hermes model's parameters, without torch.

A test holds this list equal to `HermesForCausalLM(config).state_dict()`.
"""

from __future__ import annotations

from hermes.config import HermesConfig

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "norm.weight"


def parameter_shapes(config: HermesConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter once, in model order; a tied head has no entry of its own."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for name, shape in layer_shapes(config).items():
            shapes[f"layers.{layer}.{name}"] = shape
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_shapes(config: HermesConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of one decoder block, named relative to the block."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = [
        ("self_attn.q_proj", query, hidden, config.attention_bias),
        ("self_attn.k_proj", key, hidden, config.attention_bias),
        ("self_attn.v_proj", key, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, query, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows, columns, bias in linears:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes


def parameter_count(config: HermesConfig, *, embeddings: bool = True) -> int:
    """Number of parameters, a tied table counted once; without both tables on request."""
    total = 0
    for name, shape in parameter_shapes(config).items():
        if embeddings or name not in (EMBEDDING, HEAD):
            size = 1
            for length in shape:
                size *= length
            total += size
    return total
