"""Hugging Face names of Llama, Mistral, Qwen and SmolLM, with and without the `model.` root."""

from hermes.layouts.hermes import NAMES
from hermes.layouts.table import Layout, decoder_rules

_REFUSED = (
    (r".*\.(pre|post)_feedforward_layernorm\.weight", "Gemma's and OLMo's extra norms"),
    (r".*\.block_sparse_moe\..*|.*\.mlp\.experts\..*|.*\.mlp\.gate\.weight", "experts"),
)

HUGGINGFACE = Layout(
    name="huggingface",
    title="Hugging Face Llama family",
    rules=decoder_rules(
        embedding="model.embed_tokens",
        final_norm="model.norm",
        head="lm_head",
        layer="model.layers.{}.",
        **NAMES,
    ),
    families=("huggingface", "hermes"),
    refused=_REFUSED,
)

HUGGINGFACE_BARE = Layout(
    name="huggingface-bare",
    title="Hugging Face names without the model. root (SmolLM2 from scratch)",
    rules=decoder_rules(
        embedding="embed_tokens", final_norm="norm", head="lm_head", layer="layers.{}.", **NAMES
    ),
    families=("huggingface",),
    refused=_REFUSED,
)
