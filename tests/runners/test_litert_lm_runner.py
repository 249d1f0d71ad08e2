"""The real runtime behind the runner interface, on a bundle made for the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
from tiny_bundle import train_sentencepiece, write_bundle
from tiny_llama import reference_greedy, tiny_config, tiny_weights

from hermes.errors import NativeToolError
from hermes.runners.litert_lm import LiteRtLmRunner

UNTIED = tiny_config(tie_word_embeddings=False)
WEIGHTS = tiny_weights(UNTIED)
PROMPT = "the cat sat"
PIECES = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece())


@pytest.fixture(scope="module")
def runner(tiny_bundle: Path) -> Iterator[LiteRtLmRunner]:
    with LiteRtLmRunner(tiny_bundle) as opened:
        yield opened


def test_the_bundle_as_the_runtime_reads_it(runner: LiteRtLmRunner) -> None:
    assert runner.start_token is None
    assert runner.stop_tokens == ((2,),)
    assert runner.tokenize(PROMPT) == PIECES.encode(PROMPT)
    assert runner.detokenize(PIECES.encode(PROMPT)) == PROMPT
    assert runner.detokenize([]) == ""
    assert runner.load_seconds > 0


def test_raw_text_is_continued_greedily(runner: LiteRtLmRunner) -> None:
    want = reference_greedy(WEIGHTS, UNTIED, PIECES.encode(PROMPT), 10)
    got = runner.generate(PROMPT, 10)
    assert got.text == PIECES.decode(want)
    assert (got.prompt_tokens, got.new_tokens) == (len(PIECES.encode(PROMPT)), 10)


def test_a_stop_token_is_counted_and_cut(tiny_flatbuffer: Path, tmp_path: Path) -> None:
    ids = PIECES.encode(PROMPT)
    greedy = reference_greedy(WEIGHTS, UNTIED, ids, 10)
    bundle = write_bundle(tiny_flatbuffer, tmp_path / "stop.litertlm", stop_ids=[greedy[4]])
    with LiteRtLmRunner(bundle) as runner:
        got = runner.generate(PROMPT, 10)
    assert got.text == PIECES.decode(greedy[:4])
    assert got.new_tokens == 5


def test_a_start_token_is_fed_and_counted(tiny_flatbuffer: Path, tmp_path: Path) -> None:
    ids = PIECES.encode(PROMPT)
    bundle = write_bundle(tiny_flatbuffer, tmp_path / "start.litertlm", start_id=1)
    with LiteRtLmRunner(bundle) as runner:
        assert runner.start_token == 1
        got = runner.generate(PROMPT, 6)
    assert got.prompt_tokens == len(ids) + 1
    assert got.text == PIECES.decode(reference_greedy(WEIGHTS, UNTIED, [1, *ids], 6))


def test_a_printed_start_token_is_doubled(tiny_flatbuffer: Path, tmp_path: Path) -> None:
    bundle = write_bundle(tiny_flatbuffer, tmp_path / "double.litertlm", start_id=1)
    with LiteRtLmRunner(bundle) as runner:
        got = runner.generate("<s>hi", 8)
    ids = [1, 1, *PIECES.encode("hi")]
    assert got.prompt_tokens == len(ids)
    assert got.text == PIECES.decode(reference_greedy(WEIGHTS, UNTIED, ids, 8))


def test_a_conversation_of_two_turns(runner: LiteRtLmRunner) -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "be"}]}
    first, second = runner.chat(["hi", "and"], 6, preface=[system])
    assert first.rendered == "<s>system:be</s><s>user:hi</s><s>"
    prompt = PIECES.encode(first.rendered)
    assert first.generation.prompt_tokens == len(prompt)
    assert first.generation.text == PIECES.decode(reference_greedy(WEIGHTS, UNTIED, prompt, 6))
    assert first.cache_tokens == len(prompt) + first.generation.new_tokens
    spent = second.generation.prompt_tokens + second.generation.new_tokens
    assert second.cache_tokens == first.cache_tokens + spent
    assert runner.render([system, {"role": "user", "content": "hi"}]) == first.rendered


def test_a_template_that_the_runtime_cannot_render(tiny_flatbuffer: Path, tmp_path: Path) -> None:
    bundle = write_bundle(
        tiny_flatbuffer, tmp_path / "bad.litertlm", template="{{ 'a' + messages[0].content }}"
    )
    with LiteRtLmRunner(bundle) as runner:
        assert runner.render([{"role": "user", "content": "hi"}]) == ""
        with pytest.raises(NativeToolError, match=r"tried to use \+ operator"):
            runner.chat(["hi"], 4)


def test_a_bundle_cut_short(tiny_bundle: Path, tmp_path: Path) -> None:
    whole = tiny_bundle.read_bytes()
    cut = tmp_path / "cut.litertlm"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NativeToolError) as caught:
        LiteRtLmRunner(cut, timeout=60)
    assert caught.value.exit_code == 7
