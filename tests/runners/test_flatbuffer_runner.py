"""The interpreter behind the runner interface, on a flatbuffer traced for the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cached_llama import greedy
from tiny_llama import (
    GREEDY_UNTIED,
    PROMPT_IDS,
    hermes_config,
    reference_greedy,
    reference_logits,
    tiny_config,
)
from tiny_llama import tiny_weights as weights_of

from hermes.errors import BadInputError, NativeToolError
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.roles import runtime_inputs
from hermes.signatures import MASK_CLOSED, build_signatures

UNTIED = tiny_config(tie_word_embeddings=False)
WANT = reference_logits(weights_of(UNTIED), UNTIED, PROMPT_IDS).numpy()


@pytest.fixture(scope="module")
def runner(tiny_flatbuffer: Path) -> Iterator[FlatbufferRunner]:
    with FlatbufferRunner(tiny_flatbuffer) as opened:
        yield opened


def test_the_file_describes_itself(runner: FlatbufferRunner) -> None:
    found = {item.name: item for item in runner.signatures}
    for want in build_signatures(hermes_config(UNTIED), 64, [8]):
        got = found.pop(want.name)
        assert got.length == want.length
        assert set(got.inputs) == set(want.inputs)
        assert set(got.outputs) == set(want.outputs)
    assert not found
    assert (runner.capacity, runner.vocab_size, runner.prefill_lengths) == (64, 128, (8,))


def test_stepwise_equals_the_reference(runner: FlatbufferRunner) -> None:
    got = np.stack(list(runner.score(PROMPT_IDS)))
    assert np.abs(got - WANT).max() < 1e-4


def test_prefill_and_a_stale_cache(runner: FlatbufferRunner) -> None:
    list(runner.score(list(range(64, 128))))  # fill every slot with another text
    for count in (1, 5, 8):
        runner.prefill(PROMPT_IDS[:count], 0, 8)
        got = runner.step(PROMPT_IDS[count], count)
        assert np.abs(got - WANT[count]).max() < 1e-4


def test_greedy_answer_of_the_failure_reports(runner: FlatbufferRunner) -> None:
    runner.reset()
    runner.prefill(PROMPT_IDS[:8], 0, 8)
    runner.prefill(PROMPT_IDS[8:-1], 8, 8)
    token, answer = PROMPT_IDS[-1], []
    for position in range(11, 11 + 8):
        token = int(runner.step(token, position).argmax())
        answer.append(token)
    assert answer == GREEDY_UNTIED


def test_prompts_shorter_than_the_bucket(runner: FlatbufferRunner) -> None:
    assert greedy(runner, PROMPT_IDS[:5], 8, 8) == [42, 123, 54, 94, 94, 88, 86, 36]
    for count in (1, 8, 9):
        want = reference_greedy(weights_of(UNTIED), UNTIED, PROMPT_IDS[:count], 8)
        assert greedy(runner, PROMPT_IDS[:count], 8, 8) == want


def test_inputs_as_the_runtime_fills_them() -> None:
    tokens, positions, mask = runtime_inputs([7, 9], 3, 4, 6)
    assert tokens.tolist() == [[7, 9, 0, 0]]
    assert positions.tolist() == [3, 4, 0, 0]
    closed = np.float32(MASK_CLOSED)
    assert mask[0, 0].tolist() == [
        [0, 0, 0, 0, closed, closed],
        [0, 0, 0, 0, 0, closed],
        [closed] * 6,
        [closed] * 6,
    ]


def test_rows_past_the_end_are_refused(runner: FlatbufferRunner) -> None:
    with pytest.raises(ValueError, match="do not fit 64 slots"):
        runner.prefill([1], 57, 8)
    with pytest.raises(ValueError, match="do not fit 64 slots"):
        runner.step(1, 64)


def test_damaged_files_do_not_end_the_process(tiny_flatbuffer: Path, tmp_path: Path) -> None:
    whole = tiny_flatbuffer.read_bytes()
    draw = np.random.default_rng(3)
    for number in range(6):
        damaged = bytearray(whole)
        for place in draw.integers(0, 4096, 40):
            damaged[place] = draw.integers(0, 256)
        path = tmp_path / f"damaged{number}.tflite"
        path.write_bytes(damaged if number else b"TFL3" * 8)
        try:
            with FlatbufferRunner(path, timeout=20) as opened:
                opened.step(1, 0)
        except (NativeToolError, BadInputError):
            pass
    with pytest.raises(BadInputError, match="no such file"):
        FlatbufferRunner(tmp_path / "absent.tflite")
