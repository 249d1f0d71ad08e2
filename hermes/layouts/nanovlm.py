"""nanoVLM's language model, with and without its cache: the same names and the same maths.

Rotation in halves; both rotary tables times lm_attn_scaling.
"""

from hermes.layouts.table import Layout, decoder_rules

NANOVLM = Layout(
    name="nanovlm",
    title="nanoVLM language model",
    rules=decoder_rules(
        embedding="token_embedding",
        final_norm="norm",
        head="head",
        layer="blocks.{}.",
        attention_norm="norm1",
        q="attn.q_proj",
        k="attn.k_proj",
        v="attn.v_proj",
        o="attn.out_proj",
        mlp_norm="norm2",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
    ),
    families=("nanovlm", "huggingface"),
    past_training="its code divides all rotary frequencies anew with every position past "
    "lm_max_position_embeddings, which a graph of fixed tables cannot do",
)
