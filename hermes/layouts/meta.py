"""Meta's original Llama names, which llama2.c and torchtitan share, and gpt-fast's fused form.

All of them rotate interleaved pairs. w1 is the gate, w3 the up and w2 the down projection.
"""

from hermes.layouts.table import Layout, decoder_rules

_OUTSIDE = {
    "embedding": "tok_embeddings",
    "final_norm": "norm",
    "head": "output",
    "layer": "layers.{}.",
}
_INSIDE = {
    "attention_norm": "attention_norm",
    "o": "attention.wo",
    "mlp_norm": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
_HINTS = {"rope_theta": "10000 for Llama 1, 2 and llama2.c, 500000 for Llama 3"}

META = Layout(
    name="meta",
    title="Meta's original Llama",
    rules=decoder_rules(
        **_OUTSIDE, **_INSIDE, q="attention.wq", k="attention.wk", v="attention.wv"
    ),
    pairing="interleaved",
    families=("meta",),
    hints=_HINTS | {"rms_norm_eps": "1e-5"},
)

GPT_FAST = Layout(
    name="gpt-fast",
    title="gpt-fast",
    rules=decoder_rules(**_OUTSIDE, **_INSIDE, qkv="attention.wqkv"),
    pairing="interleaved",
    families=("meta",),
    hints=_HINTS | {"rms_norm_eps": "1e-5"},
)
