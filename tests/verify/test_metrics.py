"""Metrics against textbook values and an independent implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hermes.verify.metrics import (
    compare,
    kl_divergence,
    log_softmax,
    margin,
    perplexity,
    top_tokens,
)

DRAW = np.random.default_rng(0)
FIRST = DRAW.normal(size=(40, 50)).astype(np.float32) * 3
SECOND = FIRST + DRAW.normal(size=(40, 50)).astype(np.float32) * 0.3
NEXT = [int(token) for token in DRAW.integers(0, 50, 40)]


def test_kl_of_two_coins() -> None:
    fair, bent = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    assert kl_divergence(fair, bent) == pytest.approx(0.5 * math.log(4 / 3))
    assert kl_divergence(fair, fair) == 0


def test_against_torch() -> None:
    result = compare(FIRST, SECOND, NEXT)
    first, second = (torch.tensor(rows).double().log_softmax(-1) for rows in (FIRST, SECOND))
    wanted = torch.nn.functional.kl_div(second, first, reduction="none", log_target=True).sum(-1)
    assert result.kl == pytest.approx(wanted.numpy(), rel=1e-9)
    losses = torch.nn.functional.cross_entropy(
        torch.tensor(SECOND).double(), torch.tensor(NEXT), reduction="none"
    )
    assert result.loss == pytest.approx(losses.numpy(), rel=1e-9)
    assert (result.top1 == (FIRST.argmax(1) == SECOND.argmax(1))).all()
    best = [torch.tensor(rows).topk(5).indices.tolist() for rows in (FIRST, SECOND)]
    shared = [len(set(a) & set(b)) / 5 for a, b in zip(*best, strict=True)]
    assert result.top5.tolist() == shared
    assert result.largest == pytest.approx(np.abs(FIRST - SECOND).max(1))


def test_large_logits_do_not_overflow() -> None:
    assert log_softmax(np.array([1e4, 0.0], np.float32)).tolist() == [0.0, -1e4]


def test_impossible_tokens() -> None:
    allowed = np.array([0.0, 1.0, -np.inf], np.float32)
    result = compare([allowed, FIRST[0, :3]], [allowed, allowed], [1, 0])
    assert result.kl[0] == 0
    assert result.kl[1] == np.inf


def test_nan_is_never_agreement() -> None:
    broken = FIRST.copy()
    broken[:, 7] = np.nan
    result = compare(FIRST, broken, NEXT)
    assert np.isnan(result.kl).all()
    assert not result.top1.any()
    assert np.isnan(result.largest).all()


def test_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    result = compare(np.zeros((30, 64)), np.zeros((30, 64)), [*range(29), None])
    reference, model = result.perplexities()
    assert (reference.value, reference.low, reference.high) == pytest.approx((64, 64, 64))
    assert model.value == pytest.approx(64)


def test_the_interval_is_seeded_and_covers_the_truth() -> None:
    assert perplexity(np.arange(9.0), seed=1) == perplexity(np.arange(9.0), seed=1)
    inside = 0
    for seed in range(100):
        losses = np.random.default_rng(seed).exponential(2.0, 300)
        interval = perplexity(losses, seed)
        inside += interval.low <= math.exp(2.0) <= interval.high
    assert 88 <= inside <= 100


def test_as_many_rows_on_both_sides() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare(FIRST, SECOND[:-1], NEXT)


def test_margin_and_top() -> None:
    assert margin(np.array([0.5, 3.0, 2.75])) == 0.25
    assert top_tokens(np.array([1.0, 5.0, 3.0]), 2) == {1, 2}
    assert top_tokens(np.array([1.0, 5.0]), 5) == {0, 1}
