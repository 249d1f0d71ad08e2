"""Rotary tables, masks and buffers that training code saves with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mapped_logits import logits_of, mapped
from tiny_llama import PROMPT_IDS, largest_gap, reference_logits, tiny_config, tiny_weights

from hermes.errors import BadInputError, UnsupportedModelError

CONFIG = tiny_config(tie_word_embeddings=False)
WEIGHTS = tiny_weights(CONFIG)
STEPS = torch.arange(0, 16, 2).double() / 16


def tables(base: float, length: int = 64) -> dict[str, torch.Tensor]:
    """Every form of table that codebases save, made with one base."""
    rates = base**-STEPS
    angles = torch.outer(torch.arange(length).double(), rates)
    doubled, paired = torch.cat((angles, angles), -1), angles.repeat_interleave(2, -1)
    return {
        "model.layers.0.self_attn.rotary_emb.inv_freq": rates.float(),
        "model.rotary_emb.inv_freq": rates.bfloat16(),
        "rope.freqs": rates.float(),
        "rope_cos": doubled.cos().float(),
        "rope_sin": doubled.sin().float(),
        "layers.1.attn.cos_cached": paired.cos().float()[None, None],
        "freqs_cos": angles.cos().float(),
        "freqs_sin": angles.sin().half(),
        "freqs_cis": torch.polar(torch.ones_like(angles), angles).to(torch.complex64),
    }


@pytest.mark.parametrize("name", tables(1e4))
def test_a_right_table_is_recognised_and_a_wrong_one_reported(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.pt"
    torch.save({**WEIGHTS, name: tables(1e4)[name]}, path)
    model = mapped(path, CONFIG)
    assert (name, "rotary table, as configured") in model.ignored
    wanted = reference_logits(WEIGHTS, CONFIG, PROMPT_IDS)
    assert largest_gap(logits_of(model), wanted) < 1e-4
    torch.save({**WEIGHTS, name: tables(5e5)[name]}, path)
    with pytest.raises(BadInputError, match="contradicts the configuration") as caught:
        mapped(path, CONFIG)
    assert name in str(caught.value)
    torch.save({**WEIGHTS, name: tables(1e4)[name][..., :3]}, path)
    with pytest.raises(BadInputError, match="head_dim 16 wants"):
        mapped(path, CONFIG)


def test_a_contradiction_names_the_base_that_fits(tmp_path: Path) -> None:
    name = "model.rotary_emb.inv_freq"
    torch.save({**WEIGHTS, name: (5e5**-STEPS).float()}, tmp_path / "model.pt")
    with pytest.raises(BadInputError, match="fits rope_theta 500000"):
        mapped(tmp_path / "model.pt", CONFIG)


def test_causal_masks_pass_and_others_do_not(tmp_path: Path) -> None:
    lower = torch.tril(torch.ones(32, 32))
    for mask in (lower, lower.bool()[None, None], torch.full((32, 32), -torch.inf).triu(1)):
        torch.save({**WEIGHTS, "causal_mask": mask}, tmp_path / "model.pt")
        assert ("causal_mask", "causal mask") in mapped(tmp_path / "model.pt", CONFIG).ignored
    window = lower - torch.tril(torch.ones(32, 32), -8)
    torch.save({**WEIGHTS, "causal_mask": window}, tmp_path / "model.pt")
    with pytest.raises(BadInputError, match="a mask that is not causal"):
        mapped(tmp_path / "model.pt", CONFIG)


@pytest.mark.parametrize(
    "name",
    ["criterion.weight", "loss_fn.weight", "train_acc.total", "val_ppl.count", "metrics.x",
     "model.layers.0.self_attn._extra_state", "model.position_ids"],
)  # fmt: skip
def test_buffers_of_training_are_listed(tmp_path: Path, name: str) -> None:
    torch.save({**WEIGHTS, name: torch.ones(4)}, tmp_path / "model.pt")
    assert name in dict(mapped(tmp_path / "model.pt", CONFIG).ignored)


@pytest.mark.parametrize(
    "extra",
    [
        {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16},
        {"weight_scale": torch.float32},
        {"SCB": torch.float32},
        {"absmax": torch.uint8, "quant_map": torch.float32},
    ],
)
def test_quantized_files_are_refused_by_name(tmp_path: Path, extra: dict[str, Any]) -> None:
    module = "model.layers.0.mlp.up_proj"
    added = {f"{module}.{name}": torch.ones(4).to(dtype) for name, dtype in extra.items()}
    torch.save({**WEIGHTS, **added}, tmp_path / "model.pt")
    with pytest.raises(UnsupportedModelError, match="already quantized") as caught:
        mapped(tmp_path / "model.pt", CONFIG)
    for name in added:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (("transformer.wte.weight", "transformer.h.0.attn.c_q.weight"), "nanochat"),
        (("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"), "GPT-2"),
        (("gpt_neox.layers.0.attention.query_key_value.weight",), "GPT-NeoX"),
        (("backbone.layers.0.mixer.A_log",), "Mamba"),
        (("_fsdp_wrapped_module._flat_param",), "FSDP shards"),
        (("bert.encoder.layer.0.attention.self.query.weight",), "encoder"),
    ],
)
def test_other_architectures_are_refused_by_name(
    tmp_path: Path, names: tuple[str, ...], title: str
) -> None:
    torch.save({name: torch.ones(4, 4) for name in names}, tmp_path / "model.pt")
    with pytest.raises(UnsupportedModelError, match=title):
        mapped(tmp_path / "model.pt")


def test_unknown_names_are_shown(tmp_path: Path) -> None:
    torch.save({"my.0.wobble": torch.ones(2), "my.1.wobble": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(BadInputError, match=r"my\.\{\}\.wobble \(2\)"):
        mapped(tmp_path / "model.pt")
