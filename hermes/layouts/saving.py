"""From Hermes back to a foreign layout: the tables run backwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import BadInputError, UnsupportedModelError
from hermes.layouts.operations import Context
from hermes.layouts.registry import layout_named
from hermes.parameters import parameter_shapes


def foreign_weights(
    weights: Mapping[str, LazyTensor], config: HermesConfig, layout: str
) -> dict[str, LazyTensor]:
    """The weights under a layout's names and conventions, lazily; the inverse of mapping.

    Raises:
        BadInputError: weights that do not belong to the configuration.
        UnsupportedModelError: parameters that the layout has no name for.
    """
    table = layout_named(layout)
    shapes = parameter_shapes(config)
    wrong = [name for name in shapes if name not in weights or weights[name].shape != shapes[name]]
    wrong += [name for name in weights if name not in shapes]
    if wrong:
        raise BadInputError(
            "the weights do not belong to this configuration",
            problems=wrong[:20],
            expected="exactly the parameters of the configuration",
        )
    context = Context(config, table.pairing)
    saved: dict[str, LazyTensor] = {}
    done: set[str] = set()
    for rule in table.rules:
        for layer in range(config.num_layers) if rule.per_layer else [None]:
            number = "{}" if layer is None else str(layer)
            targets = [target.replace("{}", number) for target in rule.targets]
            if not all(target in shapes for target in targets):
                continue
            sources = [source.replace("{}", number) for source in rule.sources]
            results = rule.operation.save([weights[name] for name in targets], context)
            for source, tensor in zip(sources, results, strict=True):
                saved[source] = tensor.renamed(source)
            done.update(targets)
    left = [name for name in shapes if name not in done]
    if left:
        raise UnsupportedModelError(
            f"the {table.title} layout has no names for {len(left)} parameters",
            problems=left[:20],
            todo="choose another layout",
        )
    return saved


def huggingface_config(config: HermesConfig, dtype: str = "float32") -> dict[str, object]:
    """A config.json that transformers reads as the same model.

    Raises:
        UnsupportedModelError: no transformers model computes this configuration.
    """
    kind, architecture = _model_type(config)
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
    values: dict[str, object] = {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.rms_norm_eps,
        # transformers 4 reads the first, transformers 5 writes the second.
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": dtype,
    }
    if scaling is not None:
        values["rope_scaling"] = {key: item for key, item in rope.items() if key != "rope_theta"}
    if kind != "qwen2":
        values["attention_bias"] = config.attention_bias
        values["mlp_bias"] = config.mlp_bias
    if kind == "smollm3":
        values["no_rope_layers"] = [
            int(index not in config.no_rope_layers) for index in range(config.num_layers)
        ]
    return values


def _model_type(config: HermesConfig) -> tuple[str, str]:
    plain = replace(config, no_rope_layers=(), qk_norm=False)
    if config.rope_amplitude == 1.0 and not (config.no_rope_layers and config.qk_norm):
        same_bias = plain.attention_bias == plain.output_bias
        if config.qk_norm and same_bias and not config.mlp_bias:
            return "qwen3", "Qwen3ForCausalLM"
        if config.no_rope_layers and same_bias:
            return "smollm3", "SmolLM3ForCausalLM"
        if not config.qk_norm and not config.no_rope_layers:
            if same_bias:
                return "llama", "LlamaForCausalLM"
            if config.attention_bias and not config.mlp_bias:
                return "qwen2", "Qwen2ForCausalLM"
    raise UnsupportedModelError(
        "no transformers model computes this combination of biases, norms, unrotated layers and "
        "rotary amplitude",
        todo="keep the checkpoint in Hermes' own form",
    )
