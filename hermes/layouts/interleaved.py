"""SmolLM2 trained from scratch with interleaved rotary pairs.

Its rotary tables are made with a base of 10000 whatever the configuration says.
"""

from hermes.layouts.table import Layout, decoder_rules

INTERLEAVED = Layout(
    name="interleaved",
    title="SmolLM2 with interleaved rotation",
    rules=decoder_rules(
        embedding="embedding",
        final_norm="norm",
        head="lm_head",
        layer="layers.{}.",
        attention_norm="attention_norm",
        q="attention.q_proj",
        k="attention.k_proj",
        v="attention.v_proj",
        o="attention.o_proj",
        mlp_norm="ffn_norm",
        gate="feed_forward.gate",
        up="feed_forward.up",
        down="feed_forward.down",
    ),
    pairing="interleaved",
    families=("interleaved", "huggingface"),
    constants={"rope_theta": 10000.0},
)
