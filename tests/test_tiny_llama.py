"""The fixture is the one of the failure reports: their stated answers come out."""

from __future__ import annotations

import pytest
import torch
from tiny_llama import (
    GREEDY_UNTIED,
    PROMPT_IDS,
    hermes_config,
    hermes_scaling,
    hermes_weights,
    largest_gap,
    reference_greedy,
    reference_logits,
    tiny_config,
    tiny_weights,
)

from hermes.model import HermesForCausalLM

UNTIED = tiny_config(tie_word_embeddings=False)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_answers_stated_in_the_failure_reports() -> None:
    weights = tiny_weights(UNTIED)
    assert reference_greedy(weights, UNTIED, PROMPT_IDS, 8) == GREEDY_UNTIED
    interleaved = reference_greedy(weights, UNTIED, PROMPT_IDS, 8, style="interleaved")
    assert interleaved == [15, 123, 94, 10, 44, 34, 42, 13]
    tied = tiny_config()
    assert int(reference_logits(tiny_weights(tied), tied, PROMPT_IDS)[-1].argmax()) == 31
    biased = tiny_weights(UNTIED, bias=True)
    assert int(reference_logits(biased, UNTIED, PROMPT_IDS)[-1].argmax()) == 24
    assert reference_greedy(weights, UNTIED, PROMPT_IDS[:5], 8) == [
        42, 123, 54, 94, 94, 88, 86, 36,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "argmax"),
    [
        (
            {
                "hidden_size": 56,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "head_dim": 16,
            },
            127,
        ),
        ({"head_dim": 24}, 61),
    ],
)
def test_explicit_head_size(changes: dict[str, int], argmax: int) -> None:
    config = tiny_config(tie_word_embeddings=False, **changes)
    assert int(reference_logits(tiny_weights(config), config, PROMPT_IDS)[-1].argmax()) == argmax


@pytest.mark.parametrize("variant", ["plain", "bias", "llama3", "nope", "amplitude", "qk_norm"])
def test_hermes_model_agrees_with_the_reference(variant: str) -> None:
    weights = tiny_weights(UNTIED, bias=variant == "bias")
    options: dict[str, object] = {}
    changes: dict[str, object] = {}
    if variant == "bias":
        changes = {"attention_bias": True, "output_bias": True}
    elif variant == "llama3":
        options, changes = {"scaling": LLAMA3}, {"rope_scaling": hermes_scaling(LLAMA3)}
    elif variant == "nope":
        options, changes = {"no_rope_layers": (1,)}, {"no_rope_layers": (1,)}
    elif variant == "amplitude":
        options = changes = {"rope_amplitude": 1.25}
    elif variant == "qk_norm":
        changes = {"qk_norm": True}
        draw = torch.Generator().manual_seed(5)
        for layer in range(2):
            for part in ("q_norm", "k_norm"):
                name = f"model.layers.{layer}.self_attn.{part}.weight"
                weights[name] = 0.5 + torch.rand(16, generator=draw)
    model = HermesForCausalLM(hermes_config(UNTIED, **changes))
    model.load_state_dict(hermes_weights(weights), strict=True)
    logits = model(torch.tensor([PROMPT_IDS]))["logits"][0].detach()
    assert largest_gap(logits, reference_logits(weights, UNTIED, PROMPT_IDS, **options)) < 1e-4
