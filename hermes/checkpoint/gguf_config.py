"""GGUF metadata in the words of a Hugging Face config.json.

Source of the keys: the metadata list in llama.cpp's GGUF description.
"""

from __future__ import annotations

from collections.abc import Mapping

_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_count": "num_local_experts",
}
_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
_SCALING = ("rope.scaling.type", "rope.scaling.factor")
_HANDLED = {"attention.value_length", "rope.dimension_count", *_SCALING}
_WITHOUT_MEANING = {
    "attention.value_length_mla",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_used_count",
    "tensor_data_layout",
}


def config_from_gguf(metadata: Mapping[str, object]) -> dict[str, object]:
    """A config.json-like dict; keys that have no counterpart come along as `gguf:<key>`."""
    architecture = metadata.get("general.architecture")
    config: dict[str, object] = {"model_type": architecture, "gguf": True}
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    for key, value in own.items():
        if key in _FIELDS:
            config[_FIELDS[key]] = value
        elif key not in _HANDLED | _WITHOUT_MEANING:
            config[f"gguf:{key}"] = value
    for key, name in _TOKENS.items():
        if key in metadata:
            config[name] = metadata[key]
    config.update(_rotary(own, config))
    if architecture == "smollm3":
        # llama.cpp has it in code, not in the file: every fourth layer does not rotate.
        config["no_rope_layer_interval"] = 4
    return config


def _rotary(own: Mapping[str, object], config: Mapping[str, object]) -> dict[str, object]:
    result: dict[str, object] = {}
    kind = own.get("rope.scaling.type")
    if kind not in (None, "none"):
        result["rope_scaling"] = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    head_dim = config.get("head_dim")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    rotated = own.get("rope.dimension_count")
    if isinstance(rotated, int) and isinstance(head_dim, int) and rotated != head_dim > 0:
        result["partial_rotary_factor"] = rotated / head_dim
    values = own.get("attention.value_length")
    if values is not None and values != head_dim:
        result["v_head_dim"] = values
    return result
