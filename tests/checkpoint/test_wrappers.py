"""Prefixes and containers that training code puts around weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mapped_logits import logits_of, mapped
from tiny_llama import PROMPT_IDS, largest_gap, reference_logits, tiny_config, tiny_weights

from hermes.checkpoint import open_checkpoint
from hermes.errors import BadInputError, UsageError

CONFIG = tiny_config(tie_word_embeddings=False)
WEIGHTS = tiny_weights(CONFIG)
EXPECTED = reference_logits(WEIGHTS, CONFIG, PROMPT_IDS)


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in WEIGHTS.items()}


@pytest.mark.parametrize(
    "prefix",
    [
        "_orig_mod.",
        "module.",
        "module._orig_mod.",
        "_orig_mod.module.",
        "_forward_module.",
        "_forward_module._orig_mod.module.",
        "_fsdp_wrapped_module.",
        "base_model.model.",
        "model.",
        "net.",
        "student.llm.",
    ],
)
def test_b01_stacked_prefixes(tmp_path: Path, prefix: str) -> None:
    torch.save(WEIGHTS, tmp_path / "bare.pt")
    torch.save(prefixed(prefix), tmp_path / "wrapped.pt")
    bare, wrapped = (mapped(tmp_path / f"{name}.pt", CONFIG) for name in ("bare", "wrapped"))
    assert len(wrapped.used) == 21
    assert torch.equal(logits_of(bare), logits_of(wrapped))
    assert largest_gap(logits_of(wrapped), EXPECTED) < 1e-4


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module", "module"])
def test_b01_wrapper_in_the_middle(tmp_path: Path, wrapper: str) -> None:
    renamed = {
        name.replace("layers.0.", f"layers.0.{wrapper}."): value for name, value in WEIGHTS.items()
    }
    torch.save(renamed, tmp_path / "model.pt")
    assert largest_gap(logits_of(mapped(tmp_path / "model.pt", CONFIG)), EXPECTED) < 1e-4


def test_b01_clash_is_refused(tmp_path: Path) -> None:
    clash = {**WEIGHTS, "_orig_mod.model.norm.weight": WEIGHTS["model.norm.weight"] * 2}
    torch.save(clash, tmp_path / "model.pt")
    with pytest.raises(BadInputError, match=r"_orig_mod\.model\.norm\.weight") as caught:
        open_checkpoint(tmp_path / "model.pt")
    assert "model.norm.weight and" in str(caught.value)


def test_b01_equal_copy_is_listed_and_left_out(tmp_path: Path) -> None:
    twice = {**WEIGHTS, "_orig_mod.model.norm.weight": WEIGHTS["model.norm.weight"].clone()}
    torch.save(twice, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt", CONFIG)
    assert largest_gap(logits_of(model), EXPECTED) < 1e-4
    assert ("_orig_mod.model.norm.weight", "equal to model.norm.weight") in model.ignored


def test_b03_lightning(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model." + name: value for name, value in WEIGHTS.items()}
    state["criterion.weight"] = torch.ones(128)
    content = {
        "state_dict": state,
        "hyper_parameters": {"lr": 1e-3},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}],
        "epoch": 3,
        "pytorch-lightning_version": "2.4",
    }
    torch.save(content, tmp_path / "model.ckpt")
    model = mapped(tmp_path / "model.ckpt", CONFIG)
    assert largest_gap(logits_of(model), EXPECTED) < 1e-4
    reasons = dict(model.ignored)
    assert "loss" in reasons["criterion.weight"]
    assert "training state" in reasons["optimizer_states"]
    assert set(model.used) == set(state) - {"criterion.weight"}


@pytest.mark.parametrize("container", ["model", "state_dict", "model_state_dict", "module"])
def test_nested_containers(tmp_path: Path, container: str) -> None:
    content = {"epoch": 1, container: WEIGHTS, "optimizer": {"state": {0: torch.ones(2)}}}
    torch.save({"checkpoint": content}, tmp_path / "model.pt")
    assert largest_gap(logits_of(mapped(tmp_path / "model.pt", CONFIG)), EXPECTED) < 1e-4


@pytest.mark.parametrize("style", ["nested", "flat"])
def test_averaged_weights_are_selectable(tmp_path: Path, style: str) -> None:
    averaged = tiny_weights(CONFIG, seed=7)
    if style == "nested":
        content: dict[str, Any] = {"model": WEIGHTS, "ema": averaged}
    else:
        content = {**WEIGHTS, **{f"ema_model.{name}": value for name, value in averaged.items()}}
    torch.save(content, tmp_path / "model.pt")
    raw = mapped(tmp_path / "model.pt", CONFIG)
    assert largest_gap(logits_of(raw), EXPECTED) < 1e-4
    assert any("ema" in name for name, _ in raw.ignored)
    chosen = mapped(tmp_path / "model.pt", CONFIG, weights="ema")
    wanted = reference_logits(averaged, CONFIG, PROMPT_IDS)
    assert largest_gap(logits_of(chosen), wanted) < 1e-4
    with pytest.raises(BadInputError, match="sets of weights"):
        open_checkpoint(tmp_path / "model.pt", weights="best")


def test_two_equal_candidates_are_asked_about(tmp_path: Path) -> None:
    torch.save({"first": WEIGHTS, "second": tiny_weights(CONFIG, seed=1)}, tmp_path / "model.pt")
    with pytest.raises(BadInputError, match="--weights") as caught:
        open_checkpoint(tmp_path / "model.pt")
    assert "first: 21 tensors" in str(caught.value)
    model = mapped(tmp_path / "model.pt", CONFIG, weights="first")
    assert largest_gap(logits_of(model), EXPECTED) < 1e-4


def test_weights_option_on_a_plain_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="one set"):
        open_checkpoint(tmp_path / "model.safetensors", weights="ema")


@pytest.mark.parametrize("name", ["config", "model_args", "hparams", "hyper_parameters"])
def test_config_saved_beside_the_weights(tmp_path: Path, name: str) -> None:
    torch.save({"model": WEIGHTS, name: CONFIG}, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt")
    assert model.config_sources["rope_theta"] == f"model.pt: {name}: rope_theta"
    assert largest_gap(logits_of(model), EXPECTED) < 1e-4


def test_counters_of_averaging_and_training_are_listed(tmp_path: Path) -> None:
    counters = {"n_averaged": torch.tensor(7), "initted": torch.tensor([True])}
    torch.save({**prefixed("module."), **counters}, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt", CONFIG)
    assert {("n_averaged", "a counter"), ("initted", "a counter")} <= set(model.ignored)
    assert largest_gap(logits_of(model), EXPECTED) < 1e-4


def test_deepspeed_model_states(tmp_path: Path) -> None:
    content = {
        "module": WEIGHTS,
        "buffer_names": ["a"],
        "optimizer": None,
        "param_shapes": [{name: value.shape for name, value in WEIGHTS.items()}],
        "shared_params": {},
        "ds_config": {"train_batch_size": 8, "zero_optimization": {"stage": 2}},
        "ds_version": "0.16",
        "global_steps": 100,
    }
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    model = mapped(tmp_path / "mp_rank_00_model_states.pt", CONFIG)
    assert largest_gap(logits_of(model), EXPECTED) < 1e-4


def test_lists_and_tuples_of_a_saved_config(tmp_path: Path) -> None:
    config = CONFIG | {"no_rope_layers": (), "architectures": ("X",), "nested": {"empty": {}}}
    torch.save({"model": WEIGHTS, "config": config}, tmp_path / "model.pt")
    assert open_checkpoint(tmp_path / "model.pt").config == config | {
        "no_rope_layers": [],
        "architectures": ["X"],
    }


def test_a_list_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save([torch.ones(3)], tmp_path / "model.pt")
    with pytest.raises(BadInputError, match="holds a list"):
        open_checkpoint(tmp_path / "model.pt")
