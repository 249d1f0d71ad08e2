"""Every layout against its own codebase's formulas, and back to its own names byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_oracles import (
    MetaArgs,
    interleaved_logits,
    meta_logits,
    nanovlm_greedy,
    nanovlm_logits,
)
from mapped_logits import load_model, logits_of, mapped
from tiny_llama import (
    NANOVLM_NAMES,
    PROMPT_IDS,
    Weights,
    largest_gap,
    reference_logits,
    rename,
    tiny_config,
    tiny_weights,
)
from torch import Tensor

from hermes.checkpoint.safetensors_write import write_safetensors
from hermes.errors import BadInputError, UnsupportedModelError
from hermes.layouts.saving import foreign_weights

TOLERANCE = 1e-4
GROUPED = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 72}

META_NAMES = [
    ("model.embed_tokens", "tok_embeddings"),
    ("model.", ""),
    ("lm_head", "output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attention_norm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("self_attn.q_proj", "attention.wq"),
    ("self_attn.k_proj", "attention.wk"),
    ("self_attn.v_proj", "attention.wv"),
    ("self_attn.o_proj", "attention.wo"),
]
INTERLEAVED_NAMES = [
    ("model.embed_tokens", "embedding"),
    ("model.", ""),
    ("self_attn", "attention"),
    ("mlp.gate_proj", "feed_forward.gate"),
    ("mlp.up_proj", "feed_forward.up"),
    ("mlp.down_proj", "feed_forward.down"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attention_norm"),
]


def nanovlm_config(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "lm_hidden_dim": config["hidden_size"],
        "lm_inter_dim": config["intermediate_size"],
        "lm_rms_eps": config["rms_norm_eps"],
        "lm_re_base": config["rope_theta"],
        "lm_max_position_embeddings": config["max_position_embeddings"],
        "lm_vocab_size": config["vocab_size"],
        "lm_base_vocab_size": config["vocab_size"] - 17,
        "extra_token_amount": 17,
        "lm_n_heads": config["num_attention_heads"],
        "lm_n_kv_heads": config["num_key_value_heads"],
        "lm_n_blocks": config["num_hidden_layers"],
        "lm_attn_scaling": 1.0,
        "lm_dropout": 0.0,
        "lm_use_tokens": True,
        "lm_tie_weights": config["tie_word_embeddings"],
        "lm_model_type": "HuggingFaceTB/SmolLM2-135M",
        "lm_tokenizer": "HuggingFaceTB/cosmo2-tokenizer",
        "vit_hidden_dim": 768,
    } | changes


def interleaved_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "nn_embed": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "max_sequence_len": config["max_position_embeddings"],
        "ffn_intermediate_size": config["intermediate_size"],
        "rms_norm_eps": config["rms_norm_eps"],
        "num_hidden_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
    }


def meta_args(config: dict[str, Any]) -> dict[str, Any]:
    return asdict(
        MetaArgs(
            dim=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
        )
    )


def fused_wqkv(weights: Weights) -> Weights:
    result = dict(weights)
    for layer in range(2):
        parts = [
            result.pop(f"layers.{layer}.attention.{name}.weight") for name in ("wq", "wk", "wv")
        ]
        result[f"layers.{layer}.attention.wqkv.weight"] = torch.cat(parts)
    return result


def fused_huggingface(weights: Weights) -> Weights:
    result = dict(weights)
    for layer in range(2):
        for group, fused, parts in (
            ("self_attn", "qkv_proj", ("q", "k", "v")),
            ("mlp", "gate_up_proj", ("gate", "up")),
        ):
            names = [f"model.layers.{layer}.{group}.{part}_proj.weight" for part in parts]
            result[f"model.layers.{layer}.{group}.{fused}.weight"] = torch.cat(
                [result.pop(name) for name in names]
            )
    return result


@dataclass(frozen=True)
class Case:
    """One layout: how its files look, what its config says, what it answers."""

    layout: str
    store: Callable[[Weights], Weights]
    configure: Callable[[dict[str, Any]], dict[str, Any]]
    answer: Callable[[Weights, dict[str, Any], Sequence[int]], Tensor]


def _plain(weights: Weights, config: dict[str, Any], ids: Sequence[int]) -> Tensor:
    renamed = {
        name if name.startswith(("model.", "lm_head")) else f"model.{name}": value
        for name, value in weights.items()
    }
    return reference_logits(renamed, config, ids)


def _meta(weights: Weights, config: dict[str, Any], ids: Sequence[int]) -> Tensor:
    return meta_logits(weights, MetaArgs(**meta_args(config)), ids)


CASES = {
    "hermes": Case(
        "hermes",
        lambda weights: rename(weights, [("model.", "")]),
        lambda config: {
            "vocab_size": config["vocab_size"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "num_layers": config["num_hidden_layers"],
            "num_heads": config["num_attention_heads"],
            "num_kv_heads": config["num_key_value_heads"],
            "max_seq_len": config["max_position_embeddings"],
            "rope_theta": config["rope_theta"],
            "rms_norm_eps": config["rms_norm_eps"],
            "tie_embeddings": config["tie_word_embeddings"],
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
        _plain,
    ),
    "nanovlm": Case(
        "nanovlm",
        lambda weights: rename(weights, NANOVLM_NAMES),
        nanovlm_config,
        lambda weights, config, ids: nanovlm_logits(weights, nanovlm_config(config), ids),
    ),
    "scratch": Case(
        "huggingface-bare",
        lambda weights: rename(weights, [("model.", "")]),
        lambda config: config | {"model_type": "llama", "torch_dtype": "bfloat16"},
        _plain,
    ),
    "huggingface": Case("huggingface", dict, dict, _plain),
    "interleaved": Case(
        "interleaved",
        lambda weights: rename(weights, INTERLEAVED_NAMES),
        interleaved_config,
        lambda weights, config, ids: interleaved_logits(weights, interleaved_config(config), ids),
    ),
    "meta": Case(
        "meta",
        lambda weights: rename(weights, META_NAMES),
        lambda config: meta_args(config) | {"max_seq_len": 64, "vocab_size": -1, "multiple_of": 32},
        _meta,
    ),
    "gpt-fast": Case(
        "gpt-fast",
        lambda weights: fused_wqkv(rename(weights, META_NAMES)),
        lambda config: meta_args(config) | {"max_seq_len": 64},
        _meta,
    ),
    "fused": Case(
        "huggingface-fused",
        fused_huggingface,
        lambda config: config | {"model_type": "phi3"},
        lambda weights, config, ids: _plain(split_huggingface(weights, config), config, ids),
    ),
}


def split_huggingface(weights: Weights, config: dict[str, Any]) -> Weights:
    """Phi-3's own order: all query rows, all key rows, all value rows; gate rows, up rows."""
    width = config["head_dim"]
    kv = config["num_key_value_heads"] * width
    result = dict(weights)
    for layer in range(2):
        name = f"model.layers.{layer}"
        rows = result.pop(f"{name}.self_attn.qkv_proj.weight")
        q = config["num_attention_heads"] * width
        for part, value in zip("qkv", (rows[:q], rows[q : q + kv], rows[q + kv :]), strict=True):
            result[f"{name}.self_attn.{part}_proj.weight"] = value
        gate, up = result.pop(f"{name}.mlp.gate_up_proj.weight").chunk(2)
        result[f"{name}.mlp.gate_proj.weight"] = gate
        result[f"{name}.mlp.up_proj.weight"] = up
    return result


def prepared(case: Case, tied: bool, changes: dict[str, int]) -> tuple[Weights, dict[str, Any]]:
    config = tiny_config(tie_word_embeddings=tied, **changes)
    return case.store(tiny_weights(config)), config


@pytest.mark.parametrize("changes", [{}, GROUPED], ids=["4/2", "9/3"])
@pytest.mark.parametrize(
    ("name", "tied"),
    # The interleaved codebase has no head of its own.
    [(name, tied) for name in CASES for tied in (True, False) if tied or name != "interleaved"],
)
def test_equals_the_codebase(
    tmp_path: Path, name: str, tied: bool, changes: dict[str, int]
) -> None:
    case = CASES[name]
    weights, config = prepared(case, tied, changes)
    torch.save({"model": weights, "config": case.configure(config)}, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt")
    assert model.layout == case.layout
    assert set(model.used) == set(weights)
    wanted = case.answer(weights, config, PROMPT_IDS)
    assert largest_gap(logits_of(model), wanted) < TOLERANCE
    # Back to the codebase's own names: the same bytes.
    again = foreign_weights(model.weights, model.config, case.layout)
    assert {key: tuple(value.shape) for key, value in weights.items()} == {
        key: tensor.shape for key, tensor in again.items()
    }
    for key, tensor in again.items():
        assert torch.equal(tensor.read(), weights[key])
        assert torch.equal(tensor.read(3, 20), weights[key][3:20])


def test_b16_interleaved_answers_stated_in_the_report(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=False)
    weights = rename(tiny_weights(config), INTERLEAVED_NAMES)
    torch.save(weights, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt", config)
    assert int(logits_of(model)[-1].argmax()) == 15
    ids = load_model(model).generate(torch.tensor([PROMPT_IDS]), max_new_tokens=8, temperature=0.0)
    assert ids[0, 12:].tolist() == [15, 123, 94, 10, 44, 34, 42, 13]


def test_pairing_can_be_given(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=False)
    weights = tiny_weights(config)
    torch.save(weights, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt", config | {"rope_pairing": "interleaved"})
    wanted = reference_logits(weights, config, PROMPT_IDS, style="interleaved")
    assert largest_gap(logits_of(model), wanted) < TOLERANCE
    with pytest.raises(BadInputError, match="rope_pairing is 'both'"):
        mapped(tmp_path / "model.pt", config | {"rope_pairing": "both"})


@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_nanovlm_with_cache(tmp_path: Path, scaling: float) -> None:
    config = tiny_config()
    weights = rename(tiny_weights(config), NANOVLM_NAMES)
    own = nanovlm_config(config, lm_attn_scaling=scaling)
    width = config["head_dim"]
    inv_freq = 1e4 ** -(torch.arange(0, width, 2).float() / width)
    torch.save({**weights, "rotary_embd.inv_freq": inv_freq}, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt", own)
    assert ("rotary_embd.inv_freq", "rotary table, as configured") in model.ignored
    assert any("past lm_max_position_embeddings" in warning for warning in model.warnings)
    assert largest_gap(logits_of(model), nanovlm_logits(weights, own, PROMPT_IDS)) < TOLERANCE
    module = load_model(model)
    ids = module.generate(torch.tensor([PROMPT_IDS]), max_new_tokens=10, temperature=0.0)
    assert ids[0, 12:].tolist() == nanovlm_greedy(weights, own, PROMPT_IDS, 10)


def test_nanovlm_without_tokens_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    torch.save(rename(tiny_weights(config), NANOVLM_NAMES), tmp_path / "model.pt")
    with pytest.raises(UnsupportedModelError, match="lm_use_tokens is False") as caught:
        mapped(tmp_path / "model.pt", nanovlm_config(config, lm_use_tokens=False))
    assert "samples from logits" in str(caught.value)
    # The same weights as the token model that they also are, when the user says so.
    content = {"model": rename(tiny_weights(config), NANOVLM_NAMES)}
    content["config"] = nanovlm_config(config, lm_use_tokens=False)
    torch.save(content, tmp_path / "both.pt")
    model = mapped(tmp_path / "both.pt", {"lm_use_tokens": True})
    assert (
        largest_gap(logits_of(model), reference_logits(tiny_weights(config), config, PROMPT_IDS))
        < TOLERANCE
    )


def test_the_language_model_of_a_whole_vlm_is_not_cut_out_silently(tmp_path: Path) -> None:
    config = tiny_config()
    weights = {f"decoder.{k}": v for k, v in rename(tiny_weights(config), NANOVLM_NAMES).items()}
    weights["vision_encoder.patch_embedding.conv.weight"] = torch.ones(3, 3)
    torch.save(weights, tmp_path / "model.pt")
    with pytest.raises(UnsupportedModelError, match="vision_encoder"):
        mapped(tmp_path / "model.pt", nanovlm_config(config))


def test_interleaved_base_that_its_code_never_reads(tmp_path: Path) -> None:
    config = tiny_config()
    weights = rename(tiny_weights(config), INTERLEAVED_NAMES)
    torch.save(weights, tmp_path / "model.pt")
    own = interleaved_config(config)
    model = mapped(tmp_path / "model.pt", own)
    assert "constant in the code" in model.config_sources["rope_theta"]
    model = mapped(tmp_path / "model.pt", own | {"rope_theta": 1e5})
    assert any("always computes with 10000" in warning for warning in model.warnings)


def test_meta_fields_that_nothing_tells(tmp_path: Path) -> None:
    config = tiny_config()
    torch.save(rename(tiny_weights(config), META_NAMES), tmp_path / "model.pt")
    arguments = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 64}
    with pytest.raises(BadInputError, match="500000 for Llama 3") as caught:
        mapped(tmp_path / "model.pt", arguments)
    assert "nothing tells rms_norm_eps" in str(caught.value)


def test_a_checkpoint_of_llama2_c(tmp_path: Path) -> None:
    """Compiled names, settings of the run beside the model's, no eps and no base anywhere."""
    config = tiny_config()
    weights = rename(tiny_weights(config), META_NAMES)
    weights["output.weight"] = weights["tok_embeddings.weight"]
    arguments = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128}
    arguments |= {"multiple_of": 32, "max_seq_len": 64, "dropout": 0.0}
    content = {
        "model": {f"_orig_mod.{name}": value for name, value in weights.items()},
        "optimizer": {"state": {}},
        "model_args": arguments,
        "iter_num": 100,
        "best_val_loss": torch.tensor(1.0),
        "config": arguments | {"grad_clip": 1.0, "learning_rate": 5e-4, "decay_lr": True},
    }
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(BadInputError, match="nothing tells rope_theta") as caught:
        mapped(tmp_path / "ckpt.pt")
    assert len(caught.value.problems) == 2
    assert "10000 for Llama 1, 2 and llama2.c" in str(caught.value)
    model = mapped(tmp_path / "ckpt.pt", {"rope_theta": 10000.0, "norm_eps": 1e-5})
    assert not model.warnings
    assert model.config.tie_embeddings
    wanted = meta_logits(weights, MetaArgs(**meta_args(config)), PROMPT_IDS)
    assert largest_gap(logits_of(model), wanted) < TOLERANCE


def test_meta_scaling_is_asked_about(tmp_path: Path) -> None:
    config = tiny_config()
    weights = rename(tiny_weights(config), META_NAMES)
    torch.save(weights, tmp_path / "model.pt")
    own = CASES["meta"].configure(config) | {"use_scaled_rope": True}
    with pytest.raises(BadInputError, match="use_scaled_rope is set"):
        mapped(tmp_path / "model.pt", own)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = mapped(tmp_path / "model.pt", own | {"rope_scaling": scaling})
    wanted = reference_logits(
        tiny_weights(config), config, PROMPT_IDS, style="interleaved", scaling=scaling
    )
    assert largest_gap(logits_of(model), wanted) < TOLERANCE


# Planted faults: each must move the logits far, or the tests above prove nothing.


def _swapped(weights: Weights, first: str, second: str) -> Weights:
    result = dict(weights)
    for name in weights:
        if first in name:
            other = name.replace(first, second)
            result[name], result[other] = weights[other], weights[name]
    return result


@pytest.mark.parametrize(
    "fault",
    ["halves", "query heads for keys", "norms", "gate and up", "kv grouping", "base"],
)
def test_planted_faults_are_far_away(tmp_path: Path, fault: str) -> None:
    case = CASES["meta"]
    weights, config = prepared(case, False, {"head_dim": 16})
    wanted = case.answer(weights, config, PROMPT_IDS)
    own = case.configure(config)
    if fault == "halves":
        own["rope_pairing"] = "halves"
    elif fault == "query heads for keys":
        name = "layers.0.attention.wk.weight"
        weights[name] = weights[name].view(2, 2, 4, 2, 64).transpose(2, 3).reshape(32, 64)
    elif fault == "norms":
        weights = _swapped(weights, "attention_norm", "ffn_norm")
    elif fault == "gate and up":
        weights = _swapped(weights, "w1", "w3")
    elif fault == "kv grouping":
        for layer in range(2):
            name = f"layers.{layer}.attention.wv.weight"
            weights[name] = weights[name].view(2, 16, 64).flip(0).reshape(32, 64)
    else:
        own["rope_theta"] = 5e5
    torch.save(weights, tmp_path / "model.pt")
    assert largest_gap(logits_of(mapped(tmp_path / "model.pt", own)), wanted) > 0.3


def test_written_file_reopens_equal(tmp_path: Path) -> None:
    case = CASES["meta"]
    weights, config = prepared(case, False, {})
    torch.save(weights, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt", case.configure(config))
    write_safetensors(tmp_path / "hermes.safetensors", model.weights)
    again = mapped(tmp_path / "hermes.safetensors", model.config.to_dict())
    assert again.config == model.config
    assert torch.equal(logits_of(again), logits_of(model))
