"""GGUF tensor names of llama.cpp.

llama.cpp's converter reorders the query and key rows of Llama-type models (llama, smollm3) to
interleaved pairs; Qwen2 and Qwen3 keep halves. `general.architecture` tells which.
"""

from hermes.layouts.table import Layout, decoder_rules

_RULES = decoder_rules(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    o="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)

GGUF_LLAMA = Layout(
    name="gguf-llama",
    title="GGUF, Llama-type (interleaved query and key rows)",
    rules=_RULES,
    pairing="interleaved",
    families=("gguf",),
    model_types=("llama", "smollm3"),
)

GGUF_QWEN = Layout(
    name="gguf-qwen",
    title="GGUF, Qwen-type (halves)",
    rules=_RULES,
    families=("gguf",),
    model_types=("qwen2", "qwen3"),
)
