"""The reference model: its names, its numbers against a float64 reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import (
    PROMPT_IDS,
    hermes_config,
    hermes_scaling,
    hermes_weights,
    largest_gap,
    reference_logits,
    tiny_config,
    tiny_weights,
)
from torch import Tensor

from hermes.config import HermesConfig, RopeScaling
from hermes.model import (
    HermesForCausalLM,
    KVCache,
    RMSNorm,
    build_model,
    build_rope_tables,
    initialize_weights,
    rotate,
)
from hermes.parameters import parameter_count, parameter_shapes

UNTIED = tiny_config(tie_word_embeddings=False)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PROMPT = torch.tensor([PROMPT_IDS])

SEED_NAMES = [
    "embed_tokens.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.1.input_layernorm.weight",
    "layers.1.self_attn.q_proj.weight",
    "layers.1.self_attn.k_proj.weight",
    "layers.1.self_attn.v_proj.weight",
    "layers.1.self_attn.o_proj.weight",
    "layers.1.post_attention_layernorm.weight",
    "layers.1.mlp.gate_proj.weight",
    "layers.1.mlp.up_proj.weight",
    "layers.1.mlp.down_proj.weight",
    "norm.weight",
    "lm_head.weight",
]
"""What training code saves for two layers, tied or not; its rotary tables are not persistent."""


def loaded(weights: dict[str, Tensor], config: dict[str, Any], **changes: Any) -> HermesForCausalLM:
    model = build_model(hermes_config(config, **changes))
    model.load_state_dict(hermes_weights(weights), strict=not config["tie_word_embeddings"])
    return model.eval()


MODEL = loaded(tiny_weights(UNTIED), UNTIED)


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_the_training_code(tied: bool) -> None:
    model = build_model(hermes_config(UNTIED, tie_embeddings=tied))
    assert list(model.state_dict()) == SEED_NAMES
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_state_dict_loads_strictly(tied: bool) -> None:
    weights = hermes_weights(tiny_weights(UNTIED))
    if tied:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    assert sorted(weights) == sorted(SEED_NAMES)
    model = build_model(hermes_config(UNTIED, tie_embeddings=tied))
    model.load_state_dict(weights, strict=True)
    for name, value in weights.items():
        assert torch.equal(model.state_dict()[name], value)
    with pytest.raises(RuntimeError, match=r"norm\.bias"):
        model.load_state_dict(weights | {"norm.bias": torch.zeros(64)}, strict=True)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name -> (changes of the foreign config, of the Hermes config, options of the reference)
    "untied": ({"tie_word_embeddings": False}, {}, {}),
    "tied": ({}, {}, {}),
    "one kv head": ({"num_key_value_heads": 1}, {}, {}),
    "as many kv heads": ({"num_key_value_heads": 4}, {}, {}),
    "wide heads": ({"head_dim": 24}, {}, {}),
    "base and eps": ({"rope_theta": 500.0, "rms_norm_eps": 0.1}, {}, {}),
    "llama3": ({}, {"rope_scaling": hermes_scaling(LLAMA3)}, {"scaling": LLAMA3}),
    "no rotation": ({}, {"no_rope_layers": (0,)}, {"no_rope_layers": (0,)}),
    "biases": ({}, {"attention_bias": True, "output_bias": True}, {}),
    "all biases": ({}, {"attention_bias": True, "output_bias": True, "mlp_bias": True}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_at_every_position_equal_the_reference(variant: str) -> None:
    foreign, changes, options = VARIANTS[variant]
    config = tiny_config(**foreign)
    weights = tiny_weights(config, bias="biases" in variant)
    if changes.get("mlp_bias"):
        draw = torch.Generator().manual_seed(7)
        for layer in range(2):
            for part, rows in (("gate", 96), ("up", 96), ("down", 64)):
                name = f"model.layers.{layer}.mlp.{part}_proj.bias"
                weights[name] = torch.randn(rows, generator=draw) * 0.5
    logits = loaded(weights, config, **changes)(PROMPT)["logits"][0].detach()
    assert largest_gap(logits, reference_logits(weights, config, PROMPT_IDS, **options)) < 1e-4


def test_a_wrong_rotary_style_would_be_seen() -> None:
    """The planted fault of the comparison above."""
    weights = tiny_weights(UNTIED)
    logits = MODEL(PROMPT)["logits"][0].detach()
    wrong = reference_logits(weights, UNTIED, PROMPT_IDS, style="interleaved")
    assert largest_gap(logits, wrong) > 1


def test_query_and_key_norms_follow_the_formula() -> None:
    """q / sqrt(mean(q^2) + eps) * gain on every head before the rotation (Qwen3)."""
    config = hermes_config(tiny_config(num_hidden_layers=1), qk_norm=True, rms_norm_eps=1e-2)
    torch.manual_seed(3)
    model = build_model(config)
    attention = model.layers[0].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(1, 5, 64)
    cos, sin = model.rope_cos[:5], model.rope_sin[:5]
    mask = torch.full((5, 5), -torch.inf).triu(1)
    out, (keys, values) = attention(x, cos, sin, mask)
    wide = {name: value.double() for name, value in attention.state_dict().items()}
    expected = []
    q, k, v = (x[0].double() @ wide[f"{n}_proj.weight"].T for n in "qkv")
    for head in range(4):
        columns = slice(16 * head, 16 * head + 16)
        kv = slice(16 * (head // 2), 16 * (head // 2) + 16)
        turned = []
        for part, gain in (
            (q[:, columns], wide["q_norm.weight"]),
            (k[:, kv], wide["k_norm.weight"]),
        ):
            normed = part / (part.pow(2).mean(1, keepdim=True) + 1e-2).sqrt() * gain
            turned.append(
                turn_pairs(normed, [p * 10000.0 ** (-i / 8) for p in range(5) for i in range(8)])
            )
        scores = turned[0] @ turned[1].T / 4 + mask
        expected.append(scores.softmax(-1) @ v[:, kv])
        assert largest_gap(keys[0, head // 2], turned[1]) < 1e-5
        assert largest_gap(values[0, head // 2], v[:, kv]) < 1e-5
    assert largest_gap(out[0].detach(), torch.cat(expected, dim=1) @ wide["o_proj.weight"].T) < 1e-5


def turn_pairs(x: Tensor, angles: list[float]) -> Tensor:
    """Rotate pairs (x[i], x[i + D/2]) of [T, D] as complex numbers by T * D/2 angles."""
    half = x.shape[1] // 2
    turns = torch.tensor(angles, dtype=torch.float64).view(len(x), half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat((turned.real, turned.imag), dim=1)


@pytest.mark.parametrize("amplitude", [1.0, 1.3])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_linear_scaling_and_amplitude_follow_the_formula(amplitude: float, factor: float) -> None:
    scaling = RopeScaling("linear", factor)
    config = HermesConfig(head_dim=8, rope_scaling=scaling, rope_amplitude=amplitude)
    cos, sin = build_rope_tables(config, 40)
    for position in range(40):
        for column in range(8):
            angle = position / factor * 10000.0 ** (-2 * (column % 4) / 8)
            assert cos[position, column] == pytest.approx(amplitude * math.cos(angle), abs=1e-5)
            assert sin[position, column] == pytest.approx(amplitude * math.sin(angle), abs=1e-5)


def test_rotation_turns_halves() -> None:
    x = torch.randn(1, 1, 6, 16, dtype=torch.float64)
    cos, sin = build_rope_tables(HermesConfig(head_dim=16), 6)
    angles = [p * 10000.0 ** (-i / 8) for p in range(6) for i in range(8)]
    assert largest_gap(rotate(x, cos, sin)[0, 0], turn_pairs(x[0, 0], angles)) < 1e-5


def test_the_norm_is_computed_in_float32() -> None:
    norm = RMSNorm(64, 1e-5).half()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = (torch.randn(3, 64) * 1000).half()  # squares overflow float16
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    out = norm(x).detach()
    assert out.dtype == torch.float16
    assert largest_gap(out, expected.half().double() * norm.weight.double()) < 2e-3


@pytest.mark.parametrize("pad", [5, None])
def test_the_loss_is_the_mean_over_labels_that_are_not_padding(pad: int | None) -> None:
    weights = tiny_weights(UNTIED)
    model = loaded(weights, UNTIED, pad_token_id=pad)
    inputs = torch.tensor([PROMPT_IDS, PROMPT_IDS[::-1]])
    labels = inputs.clone()
    labels[1, 6:] = 5 if pad is not None else -100
    losses = []
    for row in range(2):
        logits = reference_logits(weights, UNTIED, inputs[row].tolist())
        for position in range(11):
            label = int(labels[row, position + 1])
            if label not in (pad, -100):
                largest = logits[position].max()
                total = (logits[position] - largest).exp().sum().log() + largest
                losses.append(float(total - logits[position, label]))
    # The pad id also occurs inside the prompt, where it is ignored all the same.
    assert len(losses) == (14 if pad is not None else 16)
    loss = model(inputs, labels=labels)["loss"]
    assert float(loss) == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert model(inputs)["loss"] is None
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@settings(max_examples=10, deadline=None)
@given(start=st.integers(0, 52), length=st.integers(1, 12), seed=st.integers(0, 99))
def test_start_pos_shifts_the_rotary_positions_only(start: int, length: int, seed: int) -> None:
    """Scores depend on distances, so logits stay; the cached keys are turned further."""
    ids = torch.randint(0, 128, (1, length), generator=torch.Generator().manual_seed(seed))
    first: KVCache = []
    later: KVCache = []
    with torch.no_grad():
        expected = MODEL(ids, kv_cache=first)["logits"]
        logits = MODEL(ids, start_pos=start, kv_cache=later)["logits"]
    assert largest_gap(logits, expected) < 2e-3
    for (keys, values), (turned, same) in zip(first, later, strict=True):
        assert largest_gap(values, same) < 1e-3
        angles = [start * 10000.0 ** (-i / 8) for _ in range(length) for i in range(8)]
        for head in range(2):
            assert largest_gap(turned[0, head], turn_pairs(keys[0, head].double(), angles)) < 1e-3


def test_positions_beyond_the_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="positions up to 65 asked for, the model has 64"):
        MODEL(PROMPT[:, :1], start_pos=64)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 8),
    hidden=st.integers(1, 40),
    inner=st.integers(1, 40),
    layers=st.integers(1, 3),
    flags=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_parameter_shapes_are_the_model_s(
    groups: int, kv_heads: int, half: int, hidden: int, inner: int, layers: int, flags: list[bool]
) -> None:
    tied, attention, output, mlp, qk_norm = flags
    config = HermesConfig(
        vocab_size=50, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=groups * kv_heads, num_kv_heads=kv_heads, head_dim=2 * half, max_seq_len=4,
        tie_embeddings=tied, attention_bias=attention, output_bias=output, mlp_bias=mlp,
        qk_norm=qk_norm,
    )  # fmt: skip
    model = build_model(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes.pop("lm_head.weight") == (50, hidden)
    if not tied:
        shapes["lm_head.weight"] = (50, hidden)
    declared = parameter_shapes(config)
    assert declared.items() == shapes.items()
    without = sum(
        p.numel() for n, p in model.named_parameters() if "embed" not in n and "head" not in n
    )
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    assert parameter_count(config, embeddings=False) == without


def test_initial_weights_have_the_stated_spread() -> None:
    config = HermesConfig(
        vocab_size=400, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4,
        num_kv_heads=2, attention_bias=True, qk_norm=True, max_seq_len=8,
    )  # fmt: skip
    model = build_model(config)
    initialize_weights(model, std=0.05, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif parameter.ndim == 1:
            assert bool((parameter == 1).all())
        else:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.05 / math.sqrt(6) if writes else 0.05
            assert float(parameter.std()) == pytest.approx(expected, rel=0.05)
            assert abs(float(parameter.mean())) < 0.05 * expected


def test_initial_weights_follow_the_seed() -> None:
    def draw(seed: int | None) -> Tensor:
        model = build_model(hermes_config(UNTIED))
        initialize_weights(model, seed=seed)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert not torch.equal(draw(None), draw(None))
    torch.manual_seed(4)
    first = draw(None)
    torch.manual_seed(4)
    assert torch.equal(first, draw(None))
