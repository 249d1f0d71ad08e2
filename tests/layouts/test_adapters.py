"""LoRA adapters: merged exactly, or refused; the base alone is never what comes out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from mapped_logits import logits_of, mapped, write_config
from safetensors.torch import save_file
from tiny_llama import (
    PROMPT_IDS,
    Weights,
    largest_gap,
    reference_logits,
    tiny_config,
    tiny_weights,
)

from hermes.errors import BadInputError, UnsupportedModelError

CONFIG = tiny_config(tie_word_embeddings=False)
BASE = tiny_weights(CONFIG)
RANK, ALPHA = 4, 8.0
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def matrices() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B for every target module, far from zero."""
    draw = torch.Generator().manual_seed(3)
    pairs = {}
    for layer in range(2):
        for target in TARGETS:
            name = f"model.layers.{layer}.{target}"
            rows, columns = BASE[f"{name}.weight"].shape
            a = torch.randn(RANK, columns, generator=draw) / math.sqrt(columns)
            pairs[name] = (a, torch.randn(rows, RANK, generator=draw) * 0.3)
    return pairs


def expected(scale: float) -> torch.Tensor:
    weights = {name: value.double() for name, value in BASE.items()}
    for name, (a, b) in matrices().items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale * b.double() @ a.double()
    return reference_logits(weights, CONFIG, PROMPT_IDS)


def adapter_tensors(prefix: str = "base_model.model.", adapter: str = "") -> Weights:
    tensors: Weights = {}
    for name, (a, b) in matrices().items():
        tensors[f"{prefix}{name}.lora_A.{adapter}weight"] = a.contiguous()
        tensors[f"{prefix}{name}.lora_B.{adapter}weight"] = b.contiguous()
    return tensors


def adapter_config(**changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "base_model_name_or_path": "../base",
    } | changes


def write_folders(folder: Path, **changes: Any) -> Path:
    base, adapter = folder / "base", folder / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file(BASE, base / "model.safetensors")
    write_config(base, CONFIG)
    save_file(adapter_tensors(), adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(adapter_config(**changes)))
    return adapter


def test_folder_with_its_base(tmp_path: Path) -> None:
    adapter = write_folders(tmp_path)
    for path in (adapter, adapter / "adapter_model.safetensors"):
        model = mapped(path)
        assert largest_gap(logits_of(model), expected(ALPHA / RANK)) < 1e-4
        assert len(model.used) == 21 + 2 * len(matrices())
    assert largest_gap(expected(ALPHA / RANK), expected(0.0)) > 1
    row_read = model.weights["layers.1.mlp.down_proj.weight"].read(3, 9)
    assert torch.allclose(row_read, model.weights["layers.1.mlp.down_proj.weight"].read()[3:9])


def test_base_in_the_same_folder(tmp_path: Path) -> None:
    adapter = write_folders(tmp_path, base_model_name_or_path="somebody/somewhere")
    save_file(BASE, adapter / "model.safetensors")
    write_config(adapter, CONFIG)
    assert largest_gap(logits_of(mapped(adapter)), expected(ALPHA / RANK)) < 1e-4


@pytest.mark.parametrize("layer_name", ["base_layer.", ""])
def test_unmerged_state_dict(tmp_path: Path, layer_name: str) -> None:
    state: Weights = {}
    for name, value in BASE.items():
        module, _, kind = name.rpartition(".")
        middle = layer_name if module.endswith(TARGETS) else ""
        state[f"base_model.model.{module}.{middle}{kind}"] = value
    state |= adapter_tensors(adapter="default.")
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(BadInputError, match="lora_alpha is None"):
        mapped(tmp_path / "model.pt", CONFIG)
    model = mapped(tmp_path / "model.pt", CONFIG | {"lora_alpha": ALPHA})
    assert largest_gap(logits_of(model), expected(ALPHA / RANK)) < 1e-4
    torch.save({"model": state, "peft_config": {"default": adapter_config()}}, tmp_path / "b.pt")
    model = mapped(tmp_path / "b.pt", CONFIG)
    assert largest_gap(logits_of(model), expected(ALPHA / RANK)) < 1e-4


def test_rank_stabilised_scale(tmp_path: Path) -> None:
    adapter = write_folders(tmp_path, use_rslora=True)
    assert largest_gap(logits_of(mapped(adapter)), expected(ALPHA / math.sqrt(RANK))) < 1e-4


def test_saved_modules_replace_the_base(tmp_path: Path) -> None:
    adapter = write_folders(tmp_path, modules_to_save=["lm_head"])
    head = tiny_weights(CONFIG, seed=5)["lm_head.weight"]
    tensors = adapter_tensors() | {"base_model.model.lm_head.weight": head}
    save_file(tensors, adapter / "adapter_model.safetensors")
    model = mapped(adapter)
    assert torch.equal(model.weights["lm_head.weight"].read(), head)
    assert ("lm_head.weight", "replaced by the adapter's own") in model.ignored


def test_a_hidden_full_tensor_is_refused(tmp_path: Path) -> None:
    adapter = write_folders(tmp_path)
    tensors = adapter_tensors() | {"base_model.model.lm_head.weight": BASE["lm_head.weight"]}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(BadInputError, match="modules_to_save does not name"):
        mapped(adapter)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": "somebody/somewhere"}, "which is not here"),
        ({"base_model_name_or_path": None}, "which is not here"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"r": 8}, "rank 4 of its matrices, r is 8"),
    ],
)
def test_incomplete_adapters(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        mapped(write_folders(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"peft_type": "LOHA"},
        {"fan_in_fan_out": True},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
    ],
)
def test_other_adapters_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        mapped(write_folders(tmp_path, **changes))


def test_missing_parts(tmp_path: Path) -> None:
    adapter = write_folders(tmp_path)
    (adapter / "adapter_config.json").rename(tmp_path / "kept.json")
    with pytest.raises(BadInputError, match=r"without adapter_config\.json"):
        mapped(adapter)
    (tmp_path / "kept.json").rename(adapter / "adapter_config.json")
    tensors = adapter_tensors()
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(BadInputError, match="only one of lora_A and lora_B"):
        mapped(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(BadInputError, match="without adapter weights"):
        mapped(adapter)
    torch.save(adapter_tensors(), tmp_path / "alone.pt")
    with pytest.raises(BadInputError, match="without the base weight"):
        mapped(tmp_path / "alone.pt", CONFIG | {"lora_alpha": 1})
