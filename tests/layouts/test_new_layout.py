"""The worked example of CONTRIBUTING.md: a codebase we never saw, in one table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from mapped_logits import logits_of, mapped
from tiny_llama import (
    PROMPT_IDS,
    Weights,
    largest_gap,
    reference_logits,
    tiny_config,
    tiny_weights,
)

from hermes.layouts import LAYOUTS
from hermes.layouts.saving import foreign_weights
from hermes.layouts.table import Layout

ROOT = Path(__file__).resolve().parents[2]


def worked_example() -> Layout:
    """The table that CONTRIBUTING.md prints, run as it stands there."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(blocks[0], names)
    table = names["MINE"]
    assert isinstance(table, Layout)
    return table


MINE = worked_example()


def stored(weights: Weights) -> Weights:
    """The reference's weights as this codebase would save them."""
    result = {
        "tok.weight": weights["model.embed_tokens.weight"],
        "out_norm.weight": weights["model.norm.weight"],
        "out.weight": weights["lm_head.weight"],
    }
    for layer in range(2):
        old, new = f"model.layers.{layer}", f"blocks.{layer}"
        parts = [weights[f"{old}.self_attn.{part}_proj.weight"] for part in "qkv"]
        result[f"{new}.attn.qkv.weight"] = torch.cat(parts)
        result[f"{new}.ff.d.weight"] = weights[f"{old}.mlp.down_proj.weight"].T.contiguous()
        for theirs, ours in (
            ("self_attn.o_proj", "attn.proj"),
            ("input_layernorm", "n1"),
            ("post_attention_layernorm", "n2"),
            ("mlp.gate_proj", "ff.g"),
            ("mlp.up_proj", "ff.u"),
        ):
            result[f"{new}.{ours}.weight"] = weights[f"{old}.{theirs}.weight"]
    return result


def test_one_table_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes.layouts.mapping.LAYOUTS", (*LAYOUTS, MINE))
    monkeypatch.setattr("hermes.layouts.saving.layout_named", {"mine": MINE}.__getitem__)
    config = tiny_config(tie_word_embeddings=False)
    weights = tiny_weights(config)
    torch.save({"net": stored(weights), "config": config}, tmp_path / "model.pt")
    model = mapped(tmp_path / "model.pt")
    assert model.layout == "mine"
    wanted = reference_logits(weights, config, PROMPT_IDS, style="interleaved")
    assert largest_gap(logits_of(model), wanted) < 1e-4
    again = foreign_weights(model.weights, model.config, "mine")
    for name, value in stored(weights).items():
        assert torch.equal(again[name].read(), value)


def test_every_layout_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "layouts.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (halves|interleaved)", text, re.MULTILINE)
    assert rows == [(layout.name, layout.pairing) for layout in LAYOUTS]
