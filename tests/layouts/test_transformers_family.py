"""Folders written by transformers itself: config.json with all its fields, and its own logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mapped_logits import logits_of, mapped
from tiny_llama import PROMPT_IDS, largest_gap

from hermes.checkpoint.safetensors_write import write_safetensors
from hermes.errors import UnsupportedModelError
from hermes.layouts.saving import foreign_weights, huggingface_config

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BASE = {"rope_type": "default", "rope_theta": 5e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "linear": ("Llama", {"rope_parameters": BASE | {"rope_type": "linear", "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-wide": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {}),
    "phi3": ("Phi3", {"tie_word_embeddings": False}),
}


def make(kind: str, folder: Path, **changes: Any) -> Any:
    """A model with telling weights, saved by transformers."""
    name, own = FAMILY[kind]
    options = SIZES | {"rope_parameters": BASE} | own | changes
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim == 1:
                value.copy_(0.5 + torch.rand(value.shape, generator=draw))
            else:
                gain = 1.6 if "q_proj" in key or "k_proj" in key else 1.0
                value.normal_(0.0, gain / value.shape[1] ** 0.5, generator=draw)
    model.save_pretrained(folder)
    return model


def their_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT_IDS])).logits[0]
    return logits


@pytest.mark.parametrize("kind", FAMILY)
def test_same_logits_as_transformers(tmp_path: Path, kind: str) -> None:
    wanted = their_logits(make(kind, tmp_path))
    model = mapped(tmp_path)
    assert largest_gap(logits_of(model), wanted) < 1e-4
    assert not model.warnings
    if kind == "smollm3":
        assert model.config.no_rope_layers == (3,)


@pytest.mark.parametrize("kind", [kind for kind in FAMILY if kind != "phi3"])
def test_transformers_reads_what_we_export(tmp_path: Path, kind: str) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    wanted = their_logits(make(kind, theirs))
    model = mapped(theirs)
    ours.mkdir()
    weights = foreign_weights(model.weights, model.config, "huggingface")
    write_safetensors(ours / "model.safetensors", weights, {"format": "pt"})
    config = huggingface_config(model.config)
    (ours / "config.json").write_text(json.dumps(config))
    again = transformers.AutoModelForCausalLM.from_pretrained(ours).eval()
    assert torch.equal(their_logits(again), wanted)
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert mapped(ours).config == model.config


def test_version_4_spelling(tmp_path: Path) -> None:
    wanted = their_logits(make("llama3", tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert largest_gap(logits_of(mapped(tmp_path)), wanted) < 1e-4


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral", {"sliding_window": 16}, "sliding_window is 16, shorter than the context of 64"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
            "slid",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("phi3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            "llama",
            {"rope_parameters": BASE | {"rope_type": "yarn", "factor": 4.0}},
            "rope_type 'yarn'",
        ),
    ],
)
def test_other_maths_is_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    make(kind, tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        mapped(tmp_path)


@pytest.mark.parametrize("name", ["Gemma", "Gemma2", "GPT2", "Olmo2", "Granite", "Cohere"])
def test_other_families_are_refused_by_name(tmp_path: Path, name: str) -> None:
    options = SIZES | {"head_dim": 16} if name.startswith("Gemma") else SIZES
    if name == "GPT2":
        options = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = getattr(transformers, f"{name}Config")(**options)
    prefix = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    getattr(transformers, prefix)(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        mapped(tmp_path)
    assert name.lower().rstrip("2") in str(caught.value).lower().replace("-", "")
