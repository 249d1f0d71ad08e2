"""From Hugging Face to Hermes and back, the same bytes; larger vocabularies; complete tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mapped_logits import logits_of, mapped, write_config
from safetensors.torch import load_file, save_file
from tiny_llama import PROMPT_IDS, largest_gap, reference_logits, tiny_config, tiny_weights

from converters.exchange import NewRows, export_huggingface, import_checkpoint
from converters.source import SourceOptions
from hermes.checkpoint.source import LazyTensor, stored_rows
from hermes.config import HermesConfig
from hermes.errors import BadInputError, TargetError, UnsupportedModelError, UsageError
from hermes.layouts import LAYOUTS
from hermes.layouts.operations import Context
from hermes.layouts.saving import foreign_weights, huggingface_config
from hermes.layouts.table import Layout
from hermes.parameters import parameter_shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_is_byte_equal(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    weights = {name: value.to(dtype) for name, value in tiny_weights(config).items()}
    start, end = tmp_path / "start", tmp_path / "end"
    start.mkdir()
    save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    write_config(start, config)
    (start / "tokenizer.json").write_text("{}")
    own = tmp_path / "own" / "hermes.safetensors"
    own.parent.mkdir()
    imported = import_checkpoint(SourceOptions(start), own).model
    assert mapped(own).config == imported.config
    assert mapped(own).layout == "hermes"
    exported = export_huggingface(SourceOptions(own), end).model
    assert exported.config == imported.config
    assert (end / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes()
    assert mapped(end).config == imported.config
    assert (end / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("tied", [True, False])
def test_extended_vocabulary(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    weights = tiny_weights(config)
    save_file(weights, tmp_path / "model.safetensors")
    write_config(tmp_path, config)
    targets = [tmp_path / name for name in ("a.safetensors", "b.safetensors", "c.safetensors")]
    for target, seed in zip(targets, (1, 1, 2), strict=True):
        import_checkpoint(SourceOptions(tmp_path), target, NewRows(1000, 0.5, seed))
    assert targets[0].read_bytes() == targets[1].read_bytes() != targets[2].read_bytes()
    stored = load_file(targets[0])
    tables = ["embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    for name in tables:
        assert stored[name].shape == (1000, 64)
        assert 0.48 < float(stored[name][128:].std()) < 0.52
    if not tied:
        assert not torch.equal(stored[tables[0]][128:], stored[tables[1]][128:])
    model = mapped(targets[0])
    assert torch.equal(
        model.weights["embed_tokens.weight"].read(120, 140), stored["embed_tokens.weight"][120:140]
    )
    wanted = reference_logits(weights, config, PROMPT_IDS)
    assert largest_gap(logits_of(model)[:, :128], wanted) < 1e-4


def test_refusals(tmp_path: Path) -> None:
    config = tiny_config()
    save_file(tiny_weights(config), tmp_path / "model.safetensors")
    write_config(tmp_path, config)
    target = tmp_path / "out.safetensors"
    source = SourceOptions(tmp_path)
    with pytest.raises(UsageError, match="a vocabulary of 100"):
        import_checkpoint(source, target, NewRows(100))
    assert not target.exists()
    target.write_text("mine")
    with pytest.raises(TargetError):
        import_checkpoint(source, target)
    assert target.read_text() == "mine"
    import_checkpoint(source, target, force=True)
    with pytest.raises(TargetError):
        export_huggingface(SourceOptions(target), tmp_path)


def test_models_that_transformers_lacks_are_not_exported() -> None:
    config = HermesConfig(qk_norm=True, no_rope_layers=(1,))
    with pytest.raises(UnsupportedModelError, match="no transformers model"):
        huggingface_config(config)
    with pytest.raises(UnsupportedModelError, match="no transformers model"):
        huggingface_config(HermesConfig(rope_amplitude=1.5))
    with pytest.raises(BadInputError, match="do not belong"):
        foreign_weights({}, HermesConfig(), "huggingface")


def _lazy(name: str, shape: tuple[int, ...], value: torch.Tensor) -> LazyTensor:
    return LazyTensor(name, shape, "float32", name, lambda a, b: stored_rows(value[a:b]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_table_is_complete_and_invertible(layout: Layout, data: Any) -> None:
    """Any valid configuration without biases: save, then load, gives every parameter back."""
    kv, groups, half = (data.draw(st.integers(1, 3)) for _ in range(3))
    norms = any("q_norm" in rule.targets[0] for rule in layout.rules)
    config = HermesConfig(
        vocab_size=data.draw(st.integers(3, 9)),
        hidden_size=data.draw(st.integers(1, 9)),
        intermediate_size=data.draw(st.integers(1, 9)),
        num_layers=data.draw(st.integers(1, 3)),
        num_heads=kv * groups,
        num_kv_heads=kv,
        head_dim=2 * half,
        qk_norm=norms and data.draw(st.booleans()),
        attention_bias=data.draw(st.booleans()),
        output_bias=data.draw(st.booleans()),
        mlp_bias=data.draw(st.booleans()),
        tie_embeddings=data.draw(st.booleans()),
    )
    weights = {
        name: _lazy(name, shape, torch.randn(shape))
        for name, shape in parameter_shapes(config).items()
    }
    saved = foreign_weights(weights, config, layout.name)
    context = Context(config, layout.pairing)
    sources = layout.sources()
    assert len(sources) == sum(len(rule.sources) for rule in layout.rules)
    back: dict[str, LazyTensor] = {}
    for rule in layout.rules:
        for layer in range(config.num_layers) if rule.per_layer else [0]:
            names = [source.replace("{}", str(layer)) for source in rule.sources]
            if all(name in saved for name in names):
                targets = [target.replace("{}", str(layer)) for target in rule.targets]
                shapes = [weights[name].shape for name in targets]
                loaded = rule.operation.load([saved[name] for name in names], shapes, context)
                back |= dict(zip(targets, loaded, strict=True))
    assert set(back) == set(weights)
    for name, tensor in back.items():
        assert torch.equal(tensor.read(), weights[name].read())
