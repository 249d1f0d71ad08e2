"""The longest prompt that the report promises is the longest that the real runtime takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from table_model import successor_table, write_table_model
from tiny_bundle import write_bundle

from hermes.errors import NativeToolError
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.verify.limits import check_limits, describe_limits, longest_prompt

CONTEXT = 64


def test_length_one_reaches_the_end() -> None:
    assert longest_prompt(64, [1, 8, 32]) == 63
    assert longest_prompt(1280, [1, 8, 32, 128, 512]) == 1279


def bundle_with(length: int, folder: Path, template: str | None = None) -> Path:
    """A model that never stops by itself: 0 is its only stop token."""
    table = successor_table(128)
    table[127] = table[2]
    model = write_table_model(folder / "t.tflite", table, context=CONTEXT, prefill=length)
    return write_bundle(model, folder / "t.litertlm", stop_ids=[0], template=template)


@pytest.mark.parametrize(("length", "longest"), [(8, 63), (24, 48), (60, 60)])
def test_first_prompts_against_the_runtime(length: int, longest: int, tmp_path: Path) -> None:
    assert longest_prompt(CONTEXT, [length]) == longest
    with LiteRtLmRunner(bundle_with(length, tmp_path)) as runner:
        prompts = by_length(runner)
        for count in (2, 25, 47, 48, 60, 63):
            if count <= longest:
                assert runner.generate(prompts[count], 1).prompt_tokens == count
        with pytest.raises(NativeToolError):
            runner.generate(prompts[longest + 1], 1)
        assert runner.generate(prompts[longest], 1).prompt_tokens == longest


@pytest.mark.parametrize("length", [8, 32])
def test_a_later_turn_needs_room_for_the_shortest_signature(length: int, tmp_path: Path) -> None:
    """36 slots are taken, 28 are left, and the second turn needs fewer than ten."""
    template = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"
    with LiteRtLmRunner(bundle_with(length, tmp_path, template)) as runner:
        prompts = by_length(runner)
        turns = [prompts[32], "the cat"]
        if length > CONTEXT - 36:
            with pytest.raises(NativeToolError):
                runner.chat(turns, 4)
        else:
            assert runner.chat(turns, 4)[1].generation.new_tokens == 4


def by_length(runner: LiteRtLmRunner) -> dict[int, str]:
    """A text of every number of tokens."""
    text = "the cat sat on the mat and the dog sat on the cat " * 10
    found: dict[int, str] = {}
    for end in range(1, len(text)):
        found.setdefault(len(runner.tokenize(text[:end])), text[:end])
    return found


def test_a_rest_longer_than_the_room_left_is_in_the_report() -> None:
    limits = describe_limits(1280, [128])
    assert limits["longest first prompt"] == 1279
    assert limits["last slots in which no later turn can begin"] == 128
    first, later = check_limits(1280, [128])
    assert first.passed
    assert later.passed
    assert later.value == 128
    assert "room for the shortest prefill signature" in later.detail
