"""Rung 7 on the real runtime: green on a right bundle, red on each wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cached_llama import CachedLlama
from tiny_bundle import write_bundle
from tiny_llama import tiny_config, tiny_weights

from hermes.report.check import Check
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.verify.runtime import RuntimeData, check_runtime

NEAR_TIE = 1e-3
UNTIED = tiny_config(tie_word_embeddings=False)
STARTING_TEMPLATE = "<s>{{ messages[0].content[0].text }}"
PROMPTS = ("the cat sat", "a quick brown fox jumps over the lazy dog", "e")

Bundle = Callable[..., Path]


@pytest.fixture(scope="module")
def flatbuffer(tiny_flatbuffer: Path) -> Iterator[FlatbufferRunner]:
    with FlatbufferRunner(tiny_flatbuffer) as opened:
        yield opened


@pytest.fixture
def bundle(tiny_flatbuffer: Path, tmp_path: Path) -> Bundle:
    def write(**options: object) -> Path:
        return write_bundle(tiny_flatbuffer, tmp_path / "model.litertlm", **options)  # type: ignore[arg-type]

    return write


def data(start: int | None = None, message: str | None = "hi") -> RuntimeData:
    return RuntimeData(PROMPTS, message, 20, start, (2,))


def rung(path: Path, runner: FlatbufferRunner | CachedLlama, wanted: RuntimeData) -> list[Check]:
    with LiteRtLmRunner(path) as runtime:
        return check_runtime(runtime, runner, wanted, NEAR_TIE).checks


def red(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def test_a_right_bundle_is_green(tiny_bundle: Path, flatbuffer: FlatbufferRunner) -> None:
    checks = rung(tiny_bundle, flatbuffer, data())
    assert red(checks) == []
    assert {check.rung for check in checks} == {7}
    agreeing = [check for check in checks if check.name.startswith("greedy tokens")]
    assert len(agreeing) == 4
    assert all(check.value == check.limit for check in agreeing)


def test_an_independent_model_agrees_too(tiny_bundle: Path) -> None:
    runner = CachedLlama(tiny_weights(UNTIED), UNTIED, prefill=(8,))
    assert red(rung(tiny_bundle, runner, data())) == []


def test_an_answer_that_ends_with_the_context(bundle: Bundle, flatbuffer: FlatbufferRunner) -> None:
    wanted = RuntimeData(PROMPTS, None, 200, None, (127,))
    checks = rung(bundle(stop_ids=[127]), flatbuffer, wanted)
    assert red(checks) == []
    spoken = [check.value for check in checks if check.name.startswith("greedy tokens")]
    assert max(float(value) for value in spoken) > 40


def test_a_start_token_where_the_contract_has_one(
    bundle: Bundle, flatbuffer: FlatbufferRunner
) -> None:
    path = bundle(start_id=1, template="{{ messages[0].content[0].text }}")
    assert red(rung(path, flatbuffer, data(start=1))) == []


def test_a_doubled_start_token_is_red(bundle: Bundle, flatbuffer: FlatbufferRunner) -> None:
    path = bundle(start_id=1, template=STARTING_TEMPLATE)
    names = red(rung(path, flatbuffer, data(start=None)))
    assert "start tokens in front of the first message" in names
    assert "tokens fed for 'the cat sat'" in names


def test_a_missing_start_token_is_red(bundle: Bundle, flatbuffer: FlatbufferRunner) -> None:
    names = red(rung(bundle(), flatbuffer, data(start=1)))
    # The runtime says what the flatbuffer says to what was fed; what was fed is wrong.
    assert len(names) == 4
    assert all(name.startswith("tokens fed for") for name in names)


def test_a_missing_or_surplus_stop_token_is_red(
    bundle: Bundle, flatbuffer: FlatbufferRunner
) -> None:
    with LiteRtLmRunner(bundle(stop_ids=[127])) as runtime:
        third = runtime.tokenize(runtime.generate(PROMPTS[0], 20).text)[2]
    lacking = RuntimeData(PROMPTS[:1], None, 20, None, (third,))
    assert red(rung(bundle(stop_ids=[127]), flatbuffer, lacking))
    surplus = RuntimeData(PROMPTS[:1], None, 20, None, (127,))
    assert red(rung(bundle(stop_ids=[third]), flatbuffer, surplus))


def test_a_template_that_cannot_render_is_red(bundle: Bundle, flatbuffer: FlatbufferRunner) -> None:
    path = bundle(template="{{ '<s>' + messages[0].content }}")
    assert red(rung(path, flatbuffer, data())) == ["the chat template renders"]


@pytest.mark.parametrize("fault", ["cache position off by one", "rotary pairs interleaved"])
def test_another_model_is_red(tiny_bundle: Path, fault: str) -> None:
    runner = CachedLlama(tiny_weights(UNTIED), UNTIED, prefill=(8,), fault=fault)  # type: ignore[arg-type]
    assert red(rung(tiny_bundle, runner, data(message=None)))
