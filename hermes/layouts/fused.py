"""Hugging Face names with fused projections, as in Phi-3: rows of q, k, v; rows of gate, up."""

from hermes.layouts.hermes import NAMES
from hermes.layouts.table import Layout, decoder_rules

_SEPARATE = ("q", "k", "v", "gate", "up")
_NAMES = {role: name for role, name in NAMES.items() if role not in _SEPARATE}

HUGGINGFACE_FUSED = Layout(
    name="huggingface-fused",
    title="Hugging Face names with fused qkv and gate_up rows",
    rules=decoder_rules(
        embedding="model.embed_tokens",
        final_norm="model.norm",
        head="lm_head",
        layer="model.layers.{}.",
        qkv="self_attn.qkv_proj",
        gate_up="mlp.gate_up_proj",
        **_NAMES,
    ),
)
