"""What LiteRT-LM does at the end of the context: a clean stop, and a refusal that is no crash."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from table_model import successor_table, write_table_model
from tiny_bundle import write_bundle

from hermes.errors import NativeToolError
from hermes.runners.litert_lm import LiteRtLmRunner

CONTEXT = 64


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiteRtLmRunner]:
    """Says one token after the other and never stops by itself: 0 is its only stop token."""
    folder = tmp_path_factory.mktemp("context")
    table = successor_table(128)
    table[127] = table[2]  # the last one goes back to 3, so that 0 never comes
    model = write_table_model(folder / "table.tflite", table, context=CONTEXT)
    bundle = write_bundle(model, folder / "table.litertlm", stop_ids=[0], template=None)
    with LiteRtLmRunner(bundle) as opened:
        yield opened


def prompt_of(runner: LiteRtLmRunner, count: int) -> str:
    """A text of exactly that many tokens."""
    text = "the cat sat on the mat and the dog sat on the cat " * 10
    return next(
        text[:end] for end in range(1, len(text)) if len(runner.tokenize(text[:end])) == count
    )


def test_decoding_stops_without_an_error_when_the_context_is_full(runner: LiteRtLmRunner) -> None:
    for count in (10, 40):
        answer = runner.generate(prompt_of(runner, count), 200)
        assert answer.prompt_tokens == count
        assert CONTEXT - 1 <= answer.prompt_tokens + answer.new_tokens <= CONTEXT + 1
        assert answer.text


def test_a_prompt_longer_than_the_context_is_refused_and_the_next_one_works(
    runner: LiteRtLmRunner,
) -> None:
    with pytest.raises(NativeToolError):
        runner.generate(prompt_of(runner, CONTEXT + 6), 4)
    assert runner.generate(prompt_of(runner, 10), 4).new_tokens == 4
