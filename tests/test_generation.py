"""Generation: greedy, sampled, with and without cache, and when it stops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import (
    PROMPT_IDS,
    hermes_config,
    hermes_weights,
    largest_gap,
    reference_greedy,
    reference_logits,
    tiny_config,
    tiny_weights,
)
from torch import Tensor

from hermes.model import HermesForCausalLM, KVCache, build_model, sample

UNTIED = tiny_config(tie_word_embeddings=False)
WEIGHTS = tiny_weights(UNTIED)
PROMPT = torch.tensor([PROMPT_IDS])


def loaded(**changes: Any) -> HermesForCausalLM:
    model = build_model(hermes_config(UNTIED, **changes))
    model.load_state_dict(hermes_weights(WEIGHTS))
    return model.eval()


MODEL = loaded()


@settings(max_examples=8, deadline=None)
@given(cuts=st.sets(st.integers(1, 11)))
def test_a_cache_fed_in_pieces_gives_the_same_logits(cuts: set[int]) -> None:
    cache: KVCache = []
    borders = [0, *sorted(cuts), 12]
    with torch.no_grad():
        pieces = [
            MODEL(PROMPT[:, a:b], start_pos=a, kv_cache=cache)["logits"]
            for a, b in itertools.pairwise(borders)
        ]
        assert largest_gap(torch.cat(pieces, dim=1), MODEL(PROMPT)["logits"]) < 1e-4


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_generation_is_the_reference_s(use_cache: bool) -> None:
    ids = MODEL.generate(PROMPT, max_new_tokens=20, temperature=0, use_cache=use_cache)
    expected = reference_greedy(WEIGHTS, UNTIED, PROMPT_IDS, 20)
    assert ids[0].tolist() == PROMPT_IDS + expected


def test_greedy_past_the_trained_length_is_the_same_with_and_without_cache() -> None:
    short = loaded(max_seq_len=16)
    rows = torch.tensor([PROMPT_IDS, PROMPT_IDS[::-1]])
    cached = short.generate(rows, max_new_tokens=30, temperature=0)
    plain = short.generate(rows, max_new_tokens=30, temperature=0, use_cache=False)
    assert cached.shape == (2, 42)
    assert torch.equal(cached, plain)
    # And what it says is the reference over a window of the last 16 tokens.
    ids = list(PROMPT_IDS)
    for _ in range(12):
        ids.append(int(reference_logits(WEIGHTS, UNTIED, ids[-16:])[-1].argmax()))
    assert cached[0, : len(ids)].tolist() == ids
    # A prompt that is already too long.
    assert torch.equal(
        short.generate(cached, max_new_tokens=3, temperature=0),
        short.generate(cached, max_new_tokens=3, temperature=0, use_cache=False),
    )


def test_one_candidate_is_greedy() -> None:
    greedy = MODEL.generate(PROMPT, max_new_tokens=10, temperature=0)
    assert torch.equal(MODEL.generate(PROMPT, 10, temperature=5.0, top_k=1), greedy)
    assert torch.equal(MODEL.generate(PROMPT, 10, temperature=5.0, top_k=0, top_p=0.0), greedy)


def test_generation_stops_when_every_row_says_eos() -> None:
    greedy = MODEL.generate(PROMPT, max_new_tokens=8, temperature=0)[0].tolist()
    eos = greedy[14]
    assert eos not in greedy[12:14]
    assert MODEL.generate(PROMPT, 8, temperature=0, eos_token_id=eos)[0].tolist() == greedy[:15]
    twice = MODEL.generate(PROMPT.repeat(2, 1), 8, temperature=0, eos_token_id=eos)
    assert twice.shape == (2, 15)
    other = torch.tensor([PROMPT_IDS, PROMPT_IDS[::-1]])
    assert eos != int(MODEL.generate(other, 3, temperature=0)[1, 14])
    both = MODEL.generate(other, 8, temperature=0, eos_token_id=eos)
    assert both.shape == (2, 20)
    assert both[0].tolist() == greedy
    named = loaded(eos_token_id=eos)
    assert named.generate(PROMPT, 8, temperature=0)[0].tolist() == greedy[:15]


PROBABILITIES = torch.tensor([0.15, 0.5, 0.05, 0.3])


def draws(**options: Any) -> Tensor:
    """Shares of 20,000 draws from PROBABILITIES."""
    torch.manual_seed(11)
    ids = sample(PROBABILITIES.log().repeat(20_000, 1), **options)
    return torch.bincount(ids[:, 0], minlength=4) / 20_000


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.7}, [1, 3]),  # the token that crosses 0.7 stays
        ({"top_p": 0.9}, [0, 1, 3]),
        ({"top_k": 2, "top_p": 0.6}, [1]),  # of the two that are left, 0.625 is the first's
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 1e-9])
def test_sampling_draws_from_the_candidates(
    options: dict[str, Any], kept: list[int], temperature: float
) -> None:
    expected = torch.zeros(4)
    expected[kept] = PROBABILITIES[kept]
    if temperature < 1:
        expected = torch.tensor([0.0, 1.0, 0.0, 0.0])
    shares = draws(temperature=temperature, **options)
    assert torch.equal(shares > 0, expected > 0)
    assert largest_gap(shares, expected / expected.sum()) < 0.015


def test_temperature_flattens() -> None:
    expected = PROBABILITIES.sqrt() / PROBABILITIES.sqrt().sum()
    assert largest_gap(draws(temperature=2.0), expected) < 0.015
