"""Hermes' own names: the module tree of `hermes.model`."""

from hermes.layouts.table import Layout, decoder_rules

NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

HERMES = Layout(
    name="hermes",
    title="Hermes",
    rules=decoder_rules(
        embedding="embed_tokens", final_norm="norm", head="lm_head", layer="layers.{}.", **NAMES
    ),
    families=("hermes",),
)
