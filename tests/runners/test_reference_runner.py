"""The reference behind the runner interface is the model itself."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_llama import PROMPT_IDS, hermes_config, hermes_weights, reference_logits, tiny_config
from tiny_llama import tiny_weights as weights_of

import hermes.runners.reference
from hermes.model import HermesForCausalLM
from hermes.runners.reference import ReferenceRunner

UNTIED = tiny_config(tie_word_embeddings=False)
WEIGHTS = weights_of(UNTIED)


@pytest.fixture
def runner() -> ReferenceRunner:
    model = HermesForCausalLM(hermes_config(UNTIED))
    model.load_state_dict(hermes_weights(WEIGHTS))
    return ReferenceRunner(model, (8,))


def test_score_gives_the_logits_after_every_token(runner: ReferenceRunner) -> None:
    want = reference_logits(WEIGHTS, UNTIED, PROMPT_IDS).numpy()
    assert np.abs(np.stack(list(runner.score(PROMPT_IDS))) - want).max() < 1e-4


def test_only_the_positions_that_are_asked_for(
    runner: ReferenceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of three tokens: the first position, both sides of an edge, a block without any."""
    monkeypatch.setattr(hermes.runners.reference, "SCORED_AT_ONCE", 3)
    want = reference_logits(WEIGHTS, UNTIED, PROMPT_IDS).numpy()
    found = runner.score_at(PROMPT_IDS, {0, 2, 3, 6})
    assert sorted(found) == [0, 2, 3, 6]
    for position, logits in found.items():
        assert np.abs(logits - want[position]).max() < 1e-4
    assert sorted(runner.score_at(PROMPT_IDS, {6})) == [6]


def test_prefill_then_step_and_going_back(runner: ReferenceRunner) -> None:
    want = reference_logits(WEIGHTS, UNTIED, PROMPT_IDS).numpy()
    runner.reset()
    runner.prefill(PROMPT_IDS[:5], 0, 8)
    assert np.abs(runner.step(PROMPT_IDS[5], 5) - want[5]).max() < 1e-4
    assert np.abs(runner.step(PROMPT_IDS[6], 6) - want[6]).max() < 1e-4
    assert np.abs(runner.step(PROMPT_IDS[5], 5) - want[5]).max() < 1e-4
    with pytest.raises(ValueError, match="gap"):
        runner.step(3, 9)
