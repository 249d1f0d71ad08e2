"""Layouts that are recognised and refused, because their maths is another."""

from __future__ import annotations

import re
from collections.abc import Iterable

UNSUPPORTED: tuple[tuple[str, str, str], ...] = (
    (
        r"(.*\.)?transformer\.h\.\d+\.attn\.c_q\.weight",
        "nanochat",
        "squared ReLU, norms without weights, normed queries and keys, capped logits",
    ),
    (
        r"(.*\.)?h\.\d+\.attn\.c_attn\.weight",
        "GPT-2 or nanoGPT",
        "learned positions, LayerNorm and GELU",
    ),
    (
        r"(.*\.)?layers\.\d+\.attention\.query_key_value\.weight",
        "GPT-NeoX (Pythia)",
        "partial rotation, LayerNorm, parallel residuals, qkv rows interleaved by head",
    ),
    (
        r"(.*\.)?layers\.\d+\.pre_feedforward_layernorm\.weight",
        "Gemma 2 or 3",
        "norms around both branches, gains of 1 + weight, scaled embeddings, GELU",
    ),
    (
        r"(.*\.)?layers\.\d+\.(mlp\.experts|block_sparse_moe|feed_forward\.experts)\..*",
        "a mixture of experts",
        "routing between feed-forwards",
    ),
    (r"(.*\.)?mixer\.(A_log|in_proj\.weight)", "Mamba", "state space layers"),
    (r"(.*\.)?(self_attn|attn)\.kv_a_proj_with_mqa\.weight", "DeepSeek", "latent attention"),
    (
        r"(.*\.)?_?flat_param(_\d+)?",
        "FSDP shards",
        "gather the full state_dict where the model was trained",
    ),
    (
        r"(.*\.)?(encoder|bert)\.(layer|block)\.\d+\..*",
        "an encoder model",
        "attention to later tokens",
    ),
)
"""(pattern of a tensor name, what it is, which maths Hermes lacks)."""


def unsupported_layout(names: Iterable[str]) -> tuple[str, str] | None:
    """(what it is, which maths Hermes lacks) of the first name that gives a layout away."""
    for name in names:
        for pattern, title, maths in UNSUPPORTED:
            if re.fullmatch(pattern, name):
                return title, maths
    return None
