"""Feeds cover what static caches get wrong, and each wrong cache turns rung 3 red (case B36)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cached_llama import FAULTS, CachedLlama, Fault, greedy
from tiny_llama import (
    PROMPT_IDS,
    hermes_config,
    hermes_weights,
    reference_greedy,
    tiny_config,
    tiny_weights,
)

from converters.branches import prefill_widths
from hermes.model import HermesForCausalLM
from hermes.runners.reference import ReferenceRunner
from hermes.verify.equivalence import (
    check_against_exportable,
    check_against_reference,
    feeds_for,
    observe_all,
    wanted_rows,
)
from hermes.verify.feeding import (
    Observation,
    Prefill,
    Steps,
    equivalence_feeds,
    greedy_feed,
    runtime_plan,
)

UNTIED = tiny_config(tie_word_embeddings=False)
WEIGHTS = tiny_weights(UNTIED)
TEXT = [(37 * i + 11) % 128 for i in range(64)]
LIMIT = 1e-3
LONG_TEXT = [(53 * i + 7) % 128 for i in range(100)]
LONG_SHAPES: dict[str, Any] = {"capacity": 100, "prefill": (40,)}


@pytest.fixture(scope="module")
def reference() -> ReferenceRunner:
    model = HermesForCausalLM(hermes_config(UNTIED))
    model.load_state_dict(hermes_weights(WEIGHTS))
    return ReferenceRunner(model)


@pytest.fixture(scope="module")
def right_long() -> dict[str, Observation]:
    return observe_all(CachedLlama(WEIGHTS, UNTIED, **LONG_SHAPES), LONG_TEXT)


@pytest.mark.parametrize("bucket", [8, 16, 32])
@pytest.mark.parametrize("pad", [0, 5])
def test_b36_prompt_shorter_than_the_bucket(bucket: int, pad: int) -> None:
    runner = CachedLlama(WEIGHTS, UNTIED, prefill=(bucket,), pad=pad)
    assert greedy(runner, PROMPT_IDS[:5], 8, bucket) == [42, 123, 54, 94, 94, 88, 86, 36]
    for count in (1, 5, 8, 9):
        want = reference_greedy(WEIGHTS, UNTIED, PROMPT_IDS[:count], 8)
        assert greedy(runner, PROMPT_IDS[:count], 8, bucket) == want


def test_b36_reading_the_last_slot_of_a_padded_prompt() -> None:
    assert CachedLlama(WEIGHTS, UNTIED).last_padding_row(PROMPT_IDS[:5], 8) == 78


@pytest.mark.parametrize("fault", FAULTS)
def test_every_cache_fault_turns_rung_3_red(fault: Fault, reference: ReferenceRunner) -> None:
    wrong = CachedLlama(WEIGHTS, UNTIED, capacity=40, prefill=(1, 8), fault=fault)
    observed = observe_all(wrong, TEXT)
    checks = check_against_reference(observed, wanted_rows(reference, TEXT, observed), LIMIT)
    assert not all(check.passed for check in checks)
    red = [check for check in checks if not check.passed]
    assert all(check.rung == 3 for check in red)


def test_the_right_cache_is_green(reference: ReferenceRunner) -> None:
    observed = observe_all(CachedLlama(WEIGHTS, UNTIED), TEXT)
    checks = check_against_reference(observed, wanted_rows(reference, TEXT, observed), LIMIT)
    assert all(check.passed for check in checks)
    assert max(float(check.value) for check in checks) < 1e-4


@pytest.mark.parametrize("fault", FAULTS)
def test_long_signatures_alone_show_every_fault(
    fault: Fault, right_long: dict[str, Observation]
) -> None:
    wrong = observe_all(CachedLlama(WEIGHTS, UNTIED, fault=fault, **LONG_SHAPES), LONG_TEXT)
    assert not all(check.passed for check in check_against_exportable(wrong, right_long, LIMIT))


def test_a_single_wrong_slot_is_named(reference: ReferenceRunner) -> None:
    wrong = CachedLlama(WEIGHTS, UNTIED, fault="last slot written one early")
    observed = observe_all(wrong, TEXT)
    checks = check_against_reference(observed, wanted_rows(reference, TEXT, observed), LIMIT)
    (red,) = [check for check in checks if not check.passed]
    assert red.name.endswith("context filled")
    assert "position 63" in red.detail


def test_the_context_is_filled_to_its_last_slot() -> None:
    for capacity, lengths in ((64, (1, 8, 32)), (40, (32,)), (16, (1, 4)), (1280, (1, 8, 512))):
        for feed in equivalence_feeds(lengths, capacity):
            assert 0 < feed.size <= capacity
            position = 0
            for part in feed.parts:
                if isinstance(part, Prefill):
                    assert part.count <= part.length
                    assert position + part.length <= capacity
                    assert part.length in lengths
                position += part.count
        assert max(feed.size for feed in equivalence_feeds(lengths, capacity)) == capacity


def test_short_lengths_are_fed_in_every_way() -> None:
    runner = CachedLlama(WEIGHTS, UNTIED, capacity=64, prefill=(1, 8, 32))
    names = [feed.name for feed in feeds_for(runner)]
    for length in (8, 32):
        for kind in ("full", "one token in", "one short of", "padded, then full"):
            assert f"{kind} {length}" in names
    assert {"stepwise", "second turn", "context filled"} <= set(names)


def test_the_runtimes_plan() -> None:
    assert runtime_plan(257, (8, 32, 128), 0, 1280) == (
        Prefill(128, 128),
        Prefill(128, 128),
        Prefill(1, 8),
    )
    assert runtime_plan(3, (1, 8), 0, 64) == (Prefill(1, 1),) * 3
    assert runtime_plan(20, (16,), 40, 64) == (Prefill(16, 16),)
    assert greedy_feed("p", 5, (8,), 64).parts == (Prefill(4, 8), Steps(1))


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot fill 64 slots"):
        observe_all(CachedLlama(WEIGHTS, UNTIED), TEXT[:-1])


def test_nan_is_red(reference: ReferenceRunner) -> None:
    class Broken(CachedLlama):
        def step(self, token: int, position: int) -> np.ndarray:
            logits = super().step(token, position)
            logits[3] = np.nan
            return logits

    observed = observe_all(Broken(WEIGHTS, UNTIED), TEXT)
    checks = check_against_reference(observed, wanted_rows(reference, TEXT, observed), LIMIT)
    assert not any(check.passed for check in checks if check.limit is not None)


class Narrow(CachedLlama):
    """Just past 32 slots it still looks at the first 32 only; further on it is right again."""

    def _attend(self, h: Any, name: str, position: int, slot: int, seen: int, *cache: Any) -> Any:
        seen = min(seen, 32) if position < 36 else seen
        return super()._attend(h, name, position, slot, seen, *cache)


def test_every_signature_walks_every_path_of_a_prefill() -> None:
    lengths, widths, capacity = (1, 8, 32, 128), (*range(128, 1025, 128), 1536), 2048
    (*_, filled) = equivalence_feeds(lengths, capacity, widths)
    assert filled.name == "context filled"
    paths = [*prefill_widths(widths), capacity]
    walked, position = set(), 0
    for part in filled.parts:
        if isinstance(part, Prefill):
            assert position + part.length <= capacity
            last = position + part.length
            walked.add((part.length, next(width for width in paths if last <= width)))
        position += part.count
    assert walked == {(length, width) for length in lengths for width in paths}


def test_a_graph_that_changes_its_path_is_watched_there(reference: ReferenceRunner) -> None:
    feeds = equivalence_feeds((1, 8), 1280, (256, 512, 2048))
    (filled,) = [feed for feed in feeds if feed.name == "context filled"]
    shown, position = set(), 0
    for part in filled.parts:
        if isinstance(part, Steps):
            shown |= set(range(position, position + part.count))
        position += part.count
    assert {255, 256, 511, 512} <= shown
    assert filled.size == 1280
    wrong = Narrow(WEIGHTS, UNTIED, capacity=64, prefill=(8,))
    observed = observe_all(wrong, TEXT, (32,))
    checks = check_against_reference(observed, wanted_rows(reference, TEXT, observed), LIMIT)
    red = {check.name for check in checks if not check.passed}
    assert "exportable = reference, context filled" in red
