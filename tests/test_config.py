"""HermesConfig: always valid, every bad field named, the same after JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes.config import PRESETS, HermesConfig, RopeScaling
from hermes.errors import BadInputError, UsageError
from hermes.parameters import parameter_count

LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("vocab_size", 0, "from 1 to"),
        ("vocab_size", 2.0, "an integer"),
        ("vocab_size", True, "an integer"),
        ("hidden_size", "512", "an integer"),
        ("hidden_size", -64, "from 1 to"),
        ("intermediate_size", None, "an integer"),
        ("num_layers", 0, "from 1 to 1024"),
        ("num_layers", 10**9, "from 1 to 1024"),
        ("num_heads", 0, "from 1 to 1024"),
        ("num_kv_heads", 0, "from 1 to 1024"),
        ("num_kv_heads", 3, "multiple of num_kv_heads"),
        ("head_dim", 15, "need pairs"),
        ("head_dim", -16, "from 1 to 2048"),
        ("max_seq_len", 0, "from 1 to"),
        ("rope_theta", 0.0, "a finite number above 0"),
        ("rope_theta", float("inf"), "a finite number above 0"),
        ("rope_theta", float("nan"), "a finite number above 0"),
        pytest.param("rope_theta", 10**400, "a finite number above 0", id="huge integer"),
        ("rms_norm_eps", "1e-5", "a finite number above 0"),
        ("rms_norm_eps", -1e-5, "a finite number above 0"),
        ("rope_amplitude", True, "a finite number above 0"),
        ("tie_embeddings", 1, "true or false"),
        ("attention_bias", None, "true or false"),
        ("output_bias", "false", "true or false"),
        ("mlp_bias", 0, "true or false"),
        ("qk_norm", "yes", "true or false"),
        ("no_rope_layers", 3, "layer indices"),
        ("pad_token_id", -1, "0 to 31999 or null"),
        ("bos_token_id", 32000, "0 to 31999 or null"),
        ("eos_token_id", "2", "0 to 31999 or null"),
        ("no_rope_layers", [8], "0 to 7"),
        ("no_rope_layers", [0.0], "0 to 7"),
        ("no_rope_layers", 3, "a list"),
        ("rope_scaling", "llama3", "a RopeScaling"),
        ("rope_scaling", LLAMA3 | {"kind": "yarn"}, "linear or llama3"),
        ("rope_scaling", LLAMA3 | {"factor": 0}, "a number above 0"),
        ("rope_scaling", LLAMA3 | {"low_freq_factor": 4.0}, "0 < low < high"),
        ("rope_scaling", LLAMA3 | {"high_freq_factor": "4"}, "must be numbers"),
        ("rope_scaling", LLAMA3 | {"original_max_seq_len": 0}, "above 0"),
        ("rope_scaling", LLAMA3 | {"beta": 1.0}, "fields"),
        ("rope_scaling", {"kind": "linear"}, "fields"),
    ],
)
def test_a_bad_field_is_named(field: str, value: object, expected: str) -> None:
    with pytest.raises(BadInputError) as caught:
        HermesConfig.from_dict({field: value})
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert field in message
    assert expected in message
    shown = value if not isinstance(value, (dict, list)) else ""
    assert str(shown)[:20] in message


def test_all_problems_come_at_once() -> None:
    with pytest.raises(BadInputError) as caught:
        HermesConfig(vocab_size=0, num_layers=-1, rope_theta=-5.0, qk_norm=3)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 4
    for field in ("vocab_size is 0", "num_layers is -1", "rope_theta is -5.0", "qk_norm is 3"):
        assert field in str(caught.value)


def test_head_dim_is_derived_or_explicit() -> None:
    assert HermesConfig(hidden_size=512, num_heads=8).head_dim == 64
    explicit = HermesConfig(hidden_size=100, num_heads=8, head_dim=24)
    assert explicit.head_dim == 24
    assert explicit.num_query_groups == 2
    with pytest.raises(BadInputError, match="hidden_size 100 is not a multiple of num_heads 8"):
        HermesConfig(hidden_size=100, num_heads=8)


def test_the_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        HermesConfig().vocab_size = 5  # type: ignore[misc]


CONFIGS = st.builds(
    lambda groups, kv_heads, half, scaling, layers, **rest: HermesConfig(
        num_heads=groups * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=2 * half,
        rope_scaling=scaling,
        no_rope_layers=tuple(layer for layer in layers if layer < rest["num_layers"]),
        **rest,
    ),
    groups=st.integers(1, 4),
    kv_heads=st.integers(1, 8),
    half=st.integers(1, 64),
    scaling=st.none()
    | st.builds(RopeScaling, st.just("linear"), st.floats(0.5, 64))
    | st.builds(RopeScaling, st.just("llama3"), st.floats(1, 64), st.just(0.5), st.floats(1, 9)),
    layers=st.sets(st.integers(0, 9)),
    vocab_size=st.integers(3, 10**6),
    hidden_size=st.integers(1, 4096),
    num_layers=st.integers(1, 12),
    rope_theta=st.floats(1, 1e7),
    rms_norm_eps=st.floats(1e-8, 1e-3),
    tie_embeddings=st.booleans(),
    qk_norm=st.booleans(),
    eos_token_id=st.none() | st.integers(0, 2),
)


@given(CONFIGS)
def test_json_restores_the_config(config: HermesConfig) -> None:
    assert HermesConfig.from_dict(json.loads(config.to_json())) == config


def test_a_config_file_is_read(tmp_path: Path) -> None:
    config = HermesConfig(no_rope_layers=(3, 7), rope_scaling=RopeScaling("linear", 2.0))
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    assert HermesConfig.from_json(path) == config


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", ["config.json", "not readable as JSON"]),
        (b"\xff\xfe", ["config.json", "not readable as JSON"]),
        (b'{"rope_theta": ' + b"9" * 5000 + b"}", ["config.json", "not readable as JSON"]),
        (b"[" * 100_000, ["config.json", "not readable as JSON"]),
        (b"[1]", ["config.json", "list", "an object"]),
        (b'{"vocab": 3, "dim": 4}', ["dim, vocab", "vocab_size"]),
    ],
)
def test_a_damaged_config_file_is_refused(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        HermesConfig.from_json(path)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"absent\.json"):
        HermesConfig.from_json(tmp_path / "absent.json")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name: str) -> None:
    assert HermesConfig.preset(name).num_layers > 0


def test_the_smollm2_preset_has_its_published_size() -> None:
    """134,515,008 is what the model's card and its weights count."""
    config = HermesConfig.preset("smollm2-135m")
    assert parameter_count(config) == 134_515_008
    assert config.head_dim == 64


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(UsageError, match="smollm2-135m"):
        HermesConfig.preset("gpt-5")


def test_unknown_fields_are_refused_by_name() -> None:
    values: dict[str, Any] = {"n_layer": 3, "vocab_size": 64}
    with pytest.raises(BadInputError, match="n_layer"):
        HermesConfig.from_dict(values)
