"""Which words configurations use for Hermes' fields, and which of their fields we understand."""

from __future__ import annotations

import re

SPELLINGS = {
    "vocab_size": ("vocab_size", "lm_vocab_size"),
    "hidden_size": ("hidden_size", "lm_hidden_dim", "nn_embed", "dim"),
    "intermediate_size": (
        "intermediate_size",
        "lm_inter_dim",
        "ffn_intermediate_size",
        "hidden_dim",
    ),
    "num_layers": ("num_layers", "num_hidden_layers", "lm_n_blocks", "n_layers"),
    "num_heads": ("num_heads", "num_attention_heads", "lm_n_heads", "n_heads"),
    "num_kv_heads": ("num_kv_heads", "num_key_value_heads", "lm_n_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim",),
    "max_seq_len": (
        "max_seq_len",
        "max_position_embeddings",
        "lm_max_position_embeddings",
        "max_sequence_len",
    ),
    "rope_theta": ("rope_theta", "lm_re_base"),
    "rms_norm_eps": ("rms_norm_eps", "lm_rms_eps", "norm_eps"),
    "tie_embeddings": ("tie_embeddings", "tie_word_embeddings", "lm_tie_weights"),
    "attention_bias": ("attention_bias",),
    "output_bias": ("output_bias",),
    "mlp_bias": ("mlp_bias",),
    "qk_norm": ("qk_norm",),
    "rope_amplitude": ("rope_amplitude", "lm_attn_scaling"),
    "pad_token_id": ("pad_token_id",),
    "bos_token_id": ("bos_token_id",),
    "eos_token_id": ("eos_token_id",),
}
"""Hermes field -> the names it has in configurations of the codebases we read."""

FIELD_OF = {word: field for field, words in SPELLINGS.items() for word in words}

FAMILY_MARKS = {
    "nanovlm": {"lm_hidden_dim", "lm_n_heads", "lm_n_blocks", "lm_re_base", "lm_use_tokens"},
    "interleaved": {"nn_embed", "ffn_intermediate_size", "max_sequence_len"},
    "meta": {"dim", "n_layers", "n_heads", "multiple_of", "ffn_dim_multiplier", "norm_eps"},
    "hermes": {"num_layers", "num_heads", "num_kv_heads", "tie_embeddings"},
    "gguf": {"gguf"},
}
"""Words that only one family's configurations have."""

ROTARY_WORDS = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "use_scaled_rope",
    "rope_scaling_type",
    "rope_interleaved",
    "rope_pairing",
    "no_rope_layers",
    "no_rope_layer_interval",
}
"""Handled by hermes.layouts.config_rope."""

# Values with which a field changes nothing. Any other value is refused by name.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish", None),
    "activation_function": ("silu", "swish"),
    "act_fn": ("silu", "swish"),
    "norm_type": ("rmsnorm", "rms_norm", "RMSNorm"),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "attention_multiplier": (None,),
    "logits_scaling": (1, None),
    "logit_scale": (1, None),
    "scale_emb": (1, None),
    "scale_depth": (None,),
    "clip_qkv": (None,),
    "alibi": (False, None),
    "use_alibi": (False, None),
    "parallel_residual": (False, None),
    "use_parallel_residual": (False, None),
    "partial_rotary_factor": (1, None),
    "rotary_pct": (1, None),
    "use_rope": (True,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "quantization_config": (None,),
    "quantization": (None,),
    "v_head_dim": (None,),
    "kv_lora_rank": (None,),
    "q_lora_rank": (None,),
    "lm_use_tokens": (True,),
    "text_config": (None,),
    "gguf:attention.causal": (True,),
}

REASONS = {
    "lm_use_tokens": "the model takes embeddings and returns hidden states instead of logits; "
    "LiteRT-LM feeds token ids and samples from logits, so it cannot run this model "
    "(docs/layouts.md shows the experiment). Where the file's own token_embedding and head were "
    "trained on text, --config with lm_use_tokens true exports that",
    "quantization_config": "the weights are already quantized; bring the float weights",
    "quantization": "the weights are already quantized; bring the float weights",
    "text_config": "a model with several parts; bring the language model alone",
    "partial_rotary_factor": "rotation of a part of every head",
}

# Fields that never change what an exported model computes.
WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_dropout",
        "auto_map",
        "batch_size",
        "block_size",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dropout",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "extra_token_amount",
        "finetuning_task",
        "flash_attn",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gguf",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "keys_to_ignore_at_inference",
        "label2id",
        "layer_norm_type",
        "length_penalty",
        "lm_base_vocab_size",
        "lm_chat_template",
        "lm_dropout",
        "lm_max_length",
        "lm_model_type",
        "lm_tokenizer",
        "lm_eos_token_id",
        "max_batch_size",
        "max_length",
        "max_window_layers",
        "min_length",
        "model_max_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "original_max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_dropout",
        "residual_dropout",
        "return_dict",
        "return_dict_in_generate",
        "rope_theta_source",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "transformers.js_config",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "multiple_of",
        "ffn_dim_multiplier",
        "seed",
        "vocab_source",
        "learning_rate",
        "weight_decay",
        "model_name",
    }
)

TRAINING = re.compile(
    r"(max_)?grad(ient)?_.*|clip_grad.*|optim.*|lr|lr_.*|.*_lr|learning_rate.*|.*warmup.*|.*decay.*"
    r"|beta\d?|adam.*|eval_.*|save_.*|.*_batch_size|.*dropout.*|num_workers|device|compile"
    r"|max_(steps|iters|epochs)|(num_)?epochs|init_from|backend|use_(flash|amp).*|.*flash.*"
    r"|.*attn_implementation.*|precision|accelerator"
)
"""Settings of a training run: mentioned as not used, never refused."""

IRRELEVANT_PREFIXES = ("vit_", "mp_", "vlm_", "hf_repo", "wandb_", "train_", "data_", "log_")

SUSPICIOUS = re.compile(
    r"scal|multipl|soft_?cap|window|expert|moe|alibi|rotary|rope|act_fn|activation|norm|residual"
    r"|clip|bias|sink|attn|attention|head|position|logit|softmax|embed|conv|mamba|ssm|gguf:",
    re.IGNORECASE,
)
"""Unknown fields with such names are taken to change the maths unless they say no."""
