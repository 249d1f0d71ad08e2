"""Failure reports about names, shapes, tying, rotation and configuration, with their neighbours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mapped_logits import load_model, logits_of, mapped, write_config
from safetensors.torch import save_file
from tiny_llama import (
    GREEDY_UNTIED,
    NANOVLM_NAMES,
    PROMPT_IDS,
    Weights,
    largest_gap,
    reference_greedy,
    reference_logits,
    rename,
    tiny_config,
    tiny_weights,
)

from hermes.errors import BadInputError, HermesError, UnsupportedModelError

UNTIED = tiny_config(tie_word_embeddings=False)
TIED = tiny_config()
TOLERANCE = 1e-4


def bare(weights: Weights) -> Weights:
    return {name.replace("model.", "", 1): value for name, value in weights.items()}


def refused(path: Path, config: dict[str, Any] | None, *words: str) -> HermesError:
    with pytest.raises(HermesError) as caught:
        mapped(path, config)
    for word in words:
        assert word in str(caught.value)
    return caught.value


# B08: placeholders of sharded training


@pytest.mark.parametrize("given", ["everything", "what shapes cannot tell", "nothing"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.self_attn.v_proj.weight", torch.empty(0), "[0], expected [32, 64]"),
        ("model.layers.1.input_layernorm.weight", torch.ones(1), "[1], expected [64]"),
        ("model.layers.0.self_attn.q_proj.weight", torch.empty(0), "[0], expected [64, 64]"),
        ("model.layers.0.mlp.down_proj.weight", torch.ones(1, 1), "[1, 1], expected [64, 96]"),
        ("model.norm.weight", torch.empty(0), "[0], expected [64]"),
    ],
)
def test_b08_placeholders(
    tmp_path: Path, name: str, value: torch.Tensor, message: str, given: str
) -> None:
    torch.save({**tiny_weights(UNTIED), name: value}, tmp_path / "model.bin")
    minimal = {
        "num_attention_heads": 4,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    config = {"everything": UNTIED, "what shapes cannot tell": minimal, "nothing": None}[given]
    error = refused(tmp_path / "model.bin", config, name, message)
    assert isinstance(error, BadInputError)
    assert "gather the full weights" in error.todo


def test_b08_placeholder_embedding(tmp_path: Path) -> None:
    weights = tiny_weights(UNTIED)
    weights["model.embed_tokens.weight"] = torch.empty(0)
    torch.save(weights, tmp_path / "model.bin")
    refused(tmp_path / "model.bin", UNTIED, "model.embed_tokens.weight has shape [0]")


# B12: biases


def test_b12_biases_are_used(tmp_path: Path) -> None:
    weights = tiny_weights(UNTIED, bias=True)
    torch.save(weights, tmp_path / "model.pt")
    for config in (UNTIED, UNTIED | {"attention_bias": True}):
        logits = logits_of(mapped(tmp_path / "model.pt", config))
        assert int(logits[-1].argmax()) == 24
        assert largest_gap(logits, reference_logits(weights, UNTIED, PROMPT_IDS)) < TOLERANCE


def test_b12_qwen_biases_without_output_bias(tmp_path: Path) -> None:
    weights = tiny_weights(UNTIED, bias=True)
    for layer in range(2):
        del weights[f"model.layers.{layer}.self_attn.o_proj.bias"]
    torch.save(weights, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt", UNTIED | {"model_type": "qwen2"})
    assert (model.config.attention_bias, model.config.output_bias) == (True, False)
    wanted = reference_logits(weights, UNTIED, PROMPT_IDS)
    assert largest_gap(logits_of(model), wanted) < TOLERANCE


def test_b12_contradictions_about_biases(tmp_path: Path) -> None:
    weights = tiny_weights(UNTIED, bias=True)
    torch.save(weights, tmp_path / "with.pt")
    torch.save(tiny_weights(UNTIED), tmp_path / "without.pt")
    refused(tmp_path / "with.pt", UNTIED | {"attention_bias": False}, "attention_bias is false")
    refused(
        tmp_path / "without.pt",
        UNTIED | {"attention_bias": True},
        "model.layers.0.self_attn.q_proj.bias is missing",
    )
    del weights["model.layers.1.self_attn.k_proj.bias"]
    torch.save(weights, tmp_path / "part.pt")
    refused(tmp_path / "part.pt", UNTIED, "model.layers.1.self_attn.k_proj.bias is missing")


def test_an_unknown_tensor_is_never_passed_over(tmp_path: Path) -> None:
    weights = tiny_weights(UNTIED) | {"model.layers.0.self_attn.sinks": torch.ones(4)}
    torch.save(weights, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", UNTIED, "model.layers.0.self_attn.sinks [4]", "no part of")


# B13, B14: tied heads


@pytest.mark.parametrize("style", ["huggingface", "bare", "nanovlm"])
def test_b13_tied_without_head(tmp_path: Path, style: str) -> None:
    weights = tiny_weights(TIED)
    assert "lm_head.weight" not in weights
    stored = {
        "huggingface": weights,
        "bare": bare(weights),
        "nanovlm": rename(weights, NANOVLM_NAMES),
    }[style]
    save_file(stored, tmp_path / "model.safetensors")
    for _ in range(2):
        model = mapped(tmp_path / "model.safetensors", TIED)
        assert model.config.tie_embeddings
        logits = logits_of(model)
        assert int(logits[-1].argmax()) == 31
        assert largest_gap(logits, reference_logits(weights, TIED, PROMPT_IDS)) < TOLERANCE


def test_b13_untied_without_head_is_refused(tmp_path: Path) -> None:
    save_file(tiny_weights(TIED), tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", UNTIED, "lm_head.weight is missing")


def test_b14_a_different_head_is_used_and_warned_about(tmp_path: Path) -> None:
    weights = tiny_weights(UNTIED)
    save_file(weights, tmp_path / "model.safetensors")
    write_config(tmp_path, TIED)
    model = mapped(tmp_path)
    assert not model.config.tie_embeddings
    assert any("lm_head.weight differs" in warning for warning in model.warnings)
    logits = logits_of(model)
    assert int(logits[-1].argmax()) == 119
    assert largest_gap(logits, reference_logits(weights, UNTIED, PROMPT_IDS)) < TOLERANCE


@pytest.mark.parametrize("config", [TIED, UNTIED])
@pytest.mark.parametrize("container", ["safetensors", "torch-shared", "torch-copy"])
def test_b14_an_equal_head_is_tied(tmp_path: Path, config: dict[str, Any], container: str) -> None:
    weights = tiny_weights(TIED)
    table = weights["model.embed_tokens.weight"]
    path = tmp_path / "model.safetensors"
    if container == "safetensors":
        save_file({**weights, "lm_head.weight": table.clone()}, path)
    else:
        head = table if container == "torch-shared" else table.clone()
        torch.save({**weights, "lm_head.weight": head}, path)
    model = mapped(path, config)
    assert model.config.tie_embeddings
    assert "lm_head.weight" not in model.weights
    assert model.used["lm_head.weight"] == ["embed_tokens.weight"]
    assert not model.warnings
    wanted = reference_logits(weights, TIED, PROMPT_IDS)
    assert largest_gap(logits_of(model), wanted) < TOLERANCE


# B18: where the rotary base is written

BASE = tiny_config(tie_word_embeddings=False, rope_theta=1e5)
WITHOUT = {name: value for name, value in BASE.items() if name != "rope_theta"}
FULL = {"rope_type": "default", "rope_theta": 1e5}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e5},
        {"rope_parameters": FULL},
        {"rope_theta": 1e5, "rope_scaling": None},
        {"rope_theta": 1e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": 100000, "rope_parameters": FULL},
        {"rope_parameters": {"full_attention": FULL, "sliding_attention": FULL}},
        {
            "rope_parameters": {
                "full_attention": FULL,
                "sliding_attention": FULL | {"rope_theta": 7},
            },
            "layer_types": ["full_attention", "full_attention"],
        },
    ],
)
def test_b18_spellings_of_the_base(tmp_path: Path, spelling: dict[str, Any]) -> None:
    weights = tiny_weights(BASE)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(WITHOUT | spelling))
    model = mapped(tmp_path)
    assert model.config.rope_theta == 1e5
    assert "rope" in model.config_sources["rope_theta"]
    logits = logits_of(model)
    assert largest_gap(logits, reference_logits(weights, BASE, PROMPT_IDS)) < TOLERANCE
    other = BASE | {"rope_theta": 1e4}
    assert largest_gap(logits, reference_logits(weights, other, PROMPT_IDS)) > 0.5


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ({}, "nothing tells rope_theta"),
        ({"rope_parameters": {"rope_type": "default"}}, "nothing tells rope_theta"),
        ({"rope_theta": 1e4, "rope_parameters": FULL}, "rope_theta is 10000.0 in"),
        (
            {"rope_parameters": {"full_attention": FULL, "sliding_attention": {"rope_theta": 7}}},
            "different rotary parameters per layer type",
        ),
        ({"rope_theta": 1e5, "rope_scaling": {"type": "yarn", "factor": 4}}, "'yarn'"),
        ({"rope_theta": 1e5, "rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic'"),
        ({"rope_theta": 1e5, "rope_scaling": {"rope_type": "llama3", "factor": 4}}, "without low"),
        ({"rope_theta": 1e5, "rope_scaling": 3}, "expected an object or null"),
        ({"rope_parameters": FULL | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"rope_parameters": FULL, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling is RopeScaling",
        ),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
    ],
)
def test_b18_refusals(tmp_path: Path, spelling: dict[str, Any], message: str) -> None:
    save_file(tiny_weights(BASE), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(WITHOUT | spelling))
    refused(tmp_path, None, message)


@pytest.mark.parametrize("kind", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling(tmp_path: Path, kind: str) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    weights = tiny_weights(UNTIED)
    save_file(weights, tmp_path / "model.safetensors")
    write_config(tmp_path, UNTIED | {kind: scaling})
    wanted = reference_logits(weights, UNTIED, PROMPT_IDS, scaling=scaling)
    assert largest_gap(logits_of(mapped(tmp_path)), wanted) < TOLERANCE
    assert largest_gap(wanted, reference_logits(weights, UNTIED, PROMPT_IDS)) > 0.1


# B22: explicit head size

ODD = {"hidden_size": 56, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}


@pytest.mark.parametrize(("changes", "argmax"), [(ODD, 127), ({"head_dim": 24}, 61)])
def test_b22_head_size(tmp_path: Path, changes: dict[str, int], argmax: int) -> None:
    config = tiny_config(tie_word_embeddings=False, **changes)
    weights = tiny_weights(config)
    torch.save(weights, tmp_path / "model.pt")
    without_size = {name: value for name, value in config.items() if name != "head_dim"}
    without_heads = {name: config[name] for name in config if "num_" not in name}
    for given in (config, without_size, without_heads):
        model = mapped(tmp_path / "model.pt", given)
        assert model.config.head_dim == config["head_dim"]
        assert model.config.num_heads == config["num_attention_heads"]
        assert model.config.num_kv_heads == config["num_key_value_heads"]
        logits = logits_of(model)
        assert int(logits[-1].argmax()) == argmax
        assert largest_gap(logits, reference_logits(weights, config, PROMPT_IDS)) < TOLERANCE


def test_b22_a_raw_file_is_asked_about(tmp_path: Path) -> None:
    torch.save(tiny_weights(UNTIED), tmp_path / "model.pt")
    error = refused(
        tmp_path / "model.pt",
        None,
        "nothing tells num_heads (num_attention_heads",
        "nothing tells rope_theta",
        "nothing tells rms_norm_eps",
        "nothing tells max_seq_len",
    )
    assert isinstance(error, BadInputError)
    assert "--config" in error.todo
    assert '"num_attention_heads"' in error.todo


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 24}, "num_heads 4 x head_dim 24 is 96, q_proj has 64 rows"),
        ({"head_dim": None, "num_attention_heads": 5}, "num_heads 5 does not divide"),
        ({"num_key_value_heads": 4}, "num_kv_heads is 4"),
        ({"hidden_size": 60}, "hidden_size is 60"),
        ({"vocab_size": 100}, "vocab_size is 100"),
        ({"intermediate_size": 64}, "intermediate_size is 64"),
        ({"num_hidden_layers": 3}, "num_layers is 3"),
        ({"num_hidden_layers": 1}, "num_layers is 1"),
        ({"head_dim": 10**9, "num_attention_heads": 1}, "q_proj has 64 rows"),
        ({"max_position_embeddings": -1}, "max_seq_len is -1"),
        ({"max_position_embeddings": 10**12}, "max_seq_len is 1000000000000"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ],
)
def test_b22_contradictions_with_the_shapes(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    torch.save(tiny_weights(UNTIED), tmp_path / "model.pt")
    assert isinstance(refused(tmp_path / "model.pt", UNTIED | changes, message), BadInputError)


# the fields that change the maths


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("sliding_window", 16),
        ("model_type", "gemma2"),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("embedding_multiplier", 12.0),
        ("logits_scaling", 8.0),
        ("partial_rotary_factor", 0.5),
        ("num_local_experts", 8),
        ("quantization_config", {"quant_method": "gptq"}),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("use_parallel_residual", True),
        ("my_new_attention_scale", 3.0),
        ("clip_qkv", 8),
        ("lm_use_tokens", False),
    ],
)
def test_unknown_maths_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    torch.save(tiny_weights(UNTIED), tmp_path / "model.pt")
    error = refused(tmp_path / "model.pt", UNTIED | {field: value}, field)
    assert isinstance(error, UnsupportedModelError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "silu"),
        ("sliding_window", None),
        ("sliding_window", 64),
        ("model_type", "mistral"),
        ("embedding_multiplier", 1.0),
        ("layer_types", ["full_attention", "full_attention"]),
        ("architectures", ["LlamaForCausalLM"]),
        ("torch_dtype", "bfloat16"),
        ("pretraining_tp", 1),
        ("my_new_attention_scale", None),
    ],
)
def test_neutral_fields_pass(tmp_path: Path, field: str, value: Any) -> None:
    torch.save(tiny_weights(UNTIED), tmp_path / "model.pt")
    assert not mapped(tmp_path / "model.pt", UNTIED | {field: value}).warnings


def test_unused_fields_are_mentioned(tmp_path: Path) -> None:
    torch.save(tiny_weights(UNTIED), tmp_path / "model.pt")
    warnings = mapped(tmp_path / "model.pt", UNTIED | {"run_id": "b7"}).warnings
    assert warnings == ["--config: not used: run_id = 'b7'"]


def test_settings_of_a_training_run_are_not_taken_for_maths(tmp_path: Path) -> None:
    run = {"grad_clip": 1.0, "max_grad_norm": 1.0, "flash_attn": True, "attn_dropout_p": 0.1}
    content = {"model": tiny_weights(UNTIED), "config": run | UNTIED, "model_args": UNTIED}
    torch.save(content, tmp_path / "model.pt")
    assert not mapped(tmp_path / "model.pt").warnings
    torch.save({"model": tiny_weights(UNTIED), "config": run | UNTIED}, tmp_path / "model.pt")
    assert "grad_clip" in mapped(tmp_path / "model.pt").warnings[0]


def test_override_wins_field_by_field(tmp_path: Path) -> None:
    weights = tiny_weights(UNTIED)
    save_file(weights, tmp_path / "model.safetensors")
    write_config(tmp_path, UNTIED | {"rope_theta": 5.0, "hidden_act": "gelu", "eos_token_id": 2})
    model = mapped(tmp_path, {"rope_theta": 1e4, "hidden_act": "silu"})
    assert model.config_sources["rope_theta"] == "--config: rope_theta"
    assert model.config_sources["eos_token_id"] == "config.json: eos_token_id"
    wanted = reference_logits(weights, UNTIED, PROMPT_IDS)
    assert largest_gap(logits_of(model), wanted) < TOLERANCE


def test_everything_wrong_in_one_error(tmp_path: Path) -> None:
    weights = tiny_weights(UNTIED)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.o_proj.weight"] = torch.ones(64, 48)
    weights["stray"] = torch.ones(3)
    torch.save(weights, tmp_path / "model.pt")
    refused(
        tmp_path / "model.pt",
        UNTIED | {"hidden_act": "gelu"},
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.0.self_attn.o_proj.weight has shape [64, 48], expected [64, 64]",
        "stray [3]",
        "hidden_act",
    )


# values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_not_a_number_is_refused_with_its_index(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in tiny_weights(UNTIED).items()}
    weights["model.layers.1.self_attn.k_proj.weight"][17, 5] = value
    torch.save(weights, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt", UNTIED)
    with pytest.raises(BadInputError, match=r"index \[17, 5\]") as caught:
        model.weights["layers.1.self_attn.k_proj.weight"].read(10, 20)
    assert "model.layers.1.self_attn.k_proj.weight" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_are_widened_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in tiny_weights(UNTIED).items()}
    save_file(weights, tmp_path / "model.safetensors")
    model = mapped(tmp_path / "model.safetensors", UNTIED)
    wanted = reference_logits(weights, UNTIED, PROMPT_IDS)
    assert largest_gap(logits_of(model), wanted) < TOLERANCE


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    weights = tiny_weights(UNTIED)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = (weights[name] * 50).to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors")
    error = refused(tmp_path / "model.safetensors", UNTIED, f"{name} is int8: already quantized")
    assert isinstance(error, UnsupportedModelError)


def test_greedy_tokens(tmp_path: Path) -> None:
    save_file(tiny_weights(UNTIED), tmp_path / "model.safetensors")
    write_config(tmp_path, UNTIED)
    module = load_model(mapped(tmp_path))
    ids = module.generate(torch.tensor([PROMPT_IDS]), max_new_tokens=8, temperature=0.0)
    assert ids[0, 12:].tolist() == GREEDY_UNTIED
    assert reference_greedy(tiny_weights(UNTIED), UNTIED, PROMPT_IDS, 8) == GREEDY_UNTIED


@pytest.mark.parametrize("tied", [True, False])
def test_planning_a_safetensors_file_needs_no_torch(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    save_file(tiny_weights(config), tmp_path / "model.safetensors")
    write_config(tmp_path, config)
    program = (
        "import sys; from pathlib import Path; from hermes.checkpoint import open_checkpoint; "
        "from hermes.layouts import map_checkpoint; "
        f"model = map_checkpoint(open_checkpoint(Path({str(tmp_path)!r}))); "
        f"assert len(model.weights) == {20 if tied else 21}; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
