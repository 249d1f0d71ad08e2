"""Every rewrite, and every allowed order of them, computes the same function: 1e-9 in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from float64_llama import logits
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import UsageError
from hermes.hadamard import mixing_block
from hermes.parameters import parameter_shapes
from hermes.rewrite import RewritableModel, rewrite_model

ALL = (
    "fold_norm_gains",
    "fold_attention_scale",
    "rotate_residual",
    "balance_feed_forward",
    "balance_values",
    "mix_down_input",
)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
CALIBRATION = ((7, 8, 9, 2), (1, 2, 3, 4))


def random_weights(config: HermesConfig, seed: int) -> dict[str, np.ndarray]:
    """Normal values, gains about 1 with a sign now and then, one channel of up much larger."""
    generator = np.random.default_rng(seed)
    weights = {
        name: generator.standard_normal(shape) * (0.3 if len(shape) > 1 else 1.0)
        for name, shape in parameter_shapes(config).items()
    }
    for name, values in weights.items():
        if name.endswith("up_proj.weight"):
            values[1] *= 50
    return weights


def lazy(weights: Mapping[str, np.ndarray]) -> dict[str, LazyTensor]:
    def tensor(name: str, values: np.ndarray) -> LazyTensor:
        return LazyTensor(name, values.shape, "float64", name, lambda a, b: values[a:b])

    return {name: tensor(name, values) for name, values in weights.items()}


def rewritten(
    config: HermesConfig, weights: Mapping[str, np.ndarray], *names: str
) -> RewritableModel:
    return rewrite_model(config, lazy(weights), names, "float64", CALIBRATION)


def difference(config: HermesConfig, weights: Mapping[str, np.ndarray], *names: str) -> float:
    """Largest logit difference over the logits' spread."""
    wanted = logits(config, weights, IDS)
    model = rewritten(config, weights, *names)
    found = logits(
        model.config,
        {name: tensor.stored() for name, tensor in model.weights.items()},
        IDS,
        mixing=mixing_block(config) if "mix_down_input" in names else 1,
        scaled="fold_attention_scale" not in names,
    )
    return float(np.abs(found - wanted).max() / wanted.std())


@st.composite
def configs(draw: st.DrawFn) -> HermesConfig:
    kv_heads = draw(st.integers(1, 2))
    return HermesConfig(
        vocab_size=12,
        hidden_size=draw(st.sampled_from([6, 10, 24, 32])),
        intermediate_size=draw(st.sampled_from([7, 12, 40, 64])),
        num_layers=draw(st.integers(1, 2)),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        max_seq_len=16,
        tie_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        no_rope_layers=draw(st.sampled_from([(), (0,)])),
    )


@settings(max_examples=40, deadline=None)
@given(configs(), st.integers(0, 999))
def test_all_together(config: HermesConfig, seed: int) -> None:
    assert difference(config, random_weights(config, seed), *ALL) < 1e-9


@settings(max_examples=10, deadline=None)
@given(configs(), st.integers(0, 999))
@pytest.mark.parametrize("name", [name for name in ALL if name != "rotate_residual"])
def test_each_alone(name: str, config: HermesConfig, seed: int) -> None:
    assert difference(config, random_weights(config, seed), name) < 1e-9


CONFIG = HermesConfig(
    vocab_size=12, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, max_seq_len=16, tie_embeddings=True, attention_bias=True, output_bias=True,
    mlp_bias=True,
)  # fmt: skip


@pytest.mark.parametrize("names", list(itertools.permutations(ALL))[::7])
def test_any_order_is_exact_or_refused(names: tuple[str, ...]) -> None:
    wrong = names.index("rotate_residual") < names.index("fold_norm_gains") or names.index(
        "mix_down_input"
    ) < names.index("balance_feed_forward")
    weights = random_weights(CONFIG, 1)
    if wrong:
        with pytest.raises(UsageError, match="order the recipe's rewrites"):
            rewritten(CONFIG, weights, *names)
    else:
        assert difference(CONFIG, weights, *names) < 1e-9


@pytest.mark.parametrize("name", ALL)
def test_twice_is_refused(name: str) -> None:
    names = ("fold_norm_gains", name) if name == "rotate_residual" else (name,)
    with pytest.raises(UsageError, match="named twice"):
        rewritten(CONFIG, random_weights(CONFIG, 1), *names, name)


def test_an_order_that_is_allowed_by_mistake_would_be_seen() -> None:
    """The comparison itself can fail: a mixed model evaluated without the mixing is another one."""
    weights = random_weights(CONFIG, 1)
    model = rewritten(CONFIG, weights, "mix_down_input")
    found = logits(CONFIG, {n: t.stored() for n, t in model.weights.items()}, IDS)
    assert np.abs(found - logits(CONFIG, weights, IDS)).max() > 1e-3


def test_balance_without_calibration_is_refused() -> None:
    with pytest.raises(UsageError, match="without calibration"):
        rewrite_model(CONFIG, lazy(random_weights(CONFIG, 1)), ("balance_feed_forward",))


def test_balance_narrows_the_channels_and_moves_nothing_else() -> None:
    weights = random_weights(CONFIG, 1)
    plain = rewritten(CONFIG, weights)
    balanced = rewritten(CONFIG, weights, "balance_feed_forward")
    name = "layers.0.mlp.down_proj.weight"
    before, after = (np.abs(m.inputs[name]()).max(axis=0) for m in (plain, balanced))
    assert after.max() / np.median(after) < before.max() / np.median(before)
    made = balanced.weights["layers.0.mlp.up_proj.weight"].stored()
    ratio = made / weights["layers.0.mlp.up_proj.weight"]
    assert np.ptp(ratio, axis=1).max() < 1e-12


@settings(max_examples=25, deadline=None)
@given(configs(), st.integers(0, 999))
def test_the_recorded_inputs_are_what_the_matrices_see(config: HermesConfig, seed: int) -> None:
    """W x of the recorded inputs does not change while both are rewritten."""
    weights = random_weights(config, seed)
    before = rewritten(config, weights)
    after = rewritten(config, weights, *(name for name in ALL if name != "fold_attention_scale"))
    for layer in range(config.num_layers):
        for stem in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"):
            name = f"layers.{layer}.{stem}.weight"
            wanted = before.inputs[name]() @ before.weights[name].stored().T
            found = after.inputs[name]() @ after.weights[name].stored().T
            assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
        for stem in ("self_attn.o_proj", "mlp.down_proj"):
            name = f"layers.{layer}.{stem}.weight"
            wanted = before.inputs[name]() @ before.weights[name].stored().T
            found = after.inputs[name]() @ after.weights[name].stored().T
            # Their outputs are in the rotated basis: lengths are what stays.
            lengths = np.linalg.norm(wanted, axis=1), np.linalg.norm(found, axis=1)
            assert np.abs(lengths[1] - lengths[0]).max() < 1e-4 * lengths[0].max()


def test_the_recorded_inputs_are_those_of_an_independent_forward() -> None:
    """The head's inputs give the logits."""
    weights = random_weights(CONFIG, 5)
    model = rewritten(CONFIG, weights)
    wanted = np.concatenate([logits(CONFIG, weights, ids) for ids in CALIBRATION])
    found = model.inputs["lm_head.weight"]() @ weights["embed_tokens.weight"].T
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
