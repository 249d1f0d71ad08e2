"""The ladder runs what it can, and each planted fault turns its own rung red first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from cached_llama import CachedLlama, Fault
from tiny_llama import hermes_config, hermes_weights, reference_logits, tiny_config, tiny_weights
from torch import Tensor

from hermes.config import HermesConfig
from hermes.errors import NativeToolError, VerificationError
from hermes.model import HermesForCausalLM
from hermes.parameters import parameter_shapes
from hermes.recipe import Limits
from hermes.report.check import Check, holds
from hermes.runners.background import Background
from hermes.runners.interface import Generation, Message, Turn
from hermes.runners.reference import ReferenceRunner
from hermes.signatures import TensorSpec, build_signatures
from hermes.verify.golden import Golden
from hermes.verify.keys import signature_problems
from hermes.verify.ladder import climb
from hermes.verify.ladder_input import LadderInput
from hermes.verify.runtime import RuntimeData

UNTIED = tiny_config(tie_word_embeddings=False)
WEIGHTS = tiny_weights(UNTIED)
CONFIG = hermes_config(UNTIED)
TEXT = [(37 * i + 11) % 128 for i in range(64)]
SIGNATURES = build_signatures(CONFIG, 64, [1, 8, 16, 32])


@dataclass
class MappedTensors:
    """A mapping's result with shapes for weights."""

    config: HermesConfig = CONFIG
    layout: str = "test"
    weights: dict[str, SimpleNamespace] = field(default_factory=dict)
    used: dict[str, list[str]] = field(default_factory=dict)
    ignored: list[tuple[str, str]] = field(default_factory=list)


def mapped() -> MappedTensors:
    names = parameter_shapes(CONFIG)
    weights = {name: SimpleNamespace(shape=shape) for name, shape in names.items()}
    return MappedTensors(weights=weights, used={f"model.{name}": [name] for name in names})


class Runtime:
    """A TokenRunner of letters over a LogitsRunner; `start` is fed in front of everything."""

    name = "runtime"
    stop_tokens: tuple[tuple[int, ...], ...] = ()

    def __init__(self, runner: CachedLlama, start: int | None = None) -> None:
        self.runner = runner
        self.start_token = start

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids)

    def generate(self, text: str, max_new_tokens: int) -> Generation:
        ids = [*([] if self.start_token is None else [self.start_token]), *self.tokenize(text)]
        answer: list[int] = []
        self.runner.reset()
        for position in range(len(ids) + max_new_tokens - 1):
            logits = self.runner.step([*ids, *answer][position], position)
            if position >= len(ids) - 1:
                answer.append(int(logits.argmax()))
        return Generation(self.detokenize(answer), len(ids), len(answer), 0.0)

    def render(self, messages: Sequence[Message]) -> str:
        return f"<{messages[-1]['content']}>"

    def chat(
        self, turns: Sequence[str], max_new_tokens: int, preface: Sequence[Message] = ()
    ) -> tuple[Turn, ...]:
        rendered = self.render([{"content": turns[0]}])
        answer = self.generate(rendered, max_new_tokens)
        return (Turn(rendered, answer, answer.prompt_tokens + answer.new_tokens),)


def reference(**changes: Tensor) -> ReferenceRunner:
    model = HermesForCausalLM(CONFIG)
    model.load_state_dict(hermes_weights(WEIGHTS) | changes)
    return ReferenceRunner(model)


def right(fault: Fault = "none") -> CachedLlama:
    return CachedLlama(WEIGHTS, UNTIED, prefill=(1, 8, 16, 32), fault=fault)


@pytest.fixture
def given() -> LadderInput:
    golden = reference_logits(WEIGHTS, UNTIED, TEXT[:20]).numpy()
    return LadderInput(
        limits=Limits(positions=60),
        text_ids=TEXT,
        mapped=mapped(),
        source_keys=[f"model.{name}" for name in parameter_shapes(CONFIG)],
        golden=Golden((TEXT[:20],), (golden,), "float64"),
        reference=reference(),
        rewritten=reference(),
        exportable=lambda: nullcontext(right()),
        float_flatbuffer=lambda: nullcontext(right()),
        signatures=SIGNATURES,
        file_signatures=tuple(reversed(SIGNATURES)),
        flatbuffer=lambda: nullcontext(right()),
        runtime=lambda: nullcontext(Runtime(right())),
        runtime_data=RuntimeData(("ab", "c"), "hi", 6, None, ()),
        tokenizer_rung=lambda: [holds("tokenizer parity", 6, True, "equal")],
    )


def first_red(given: LadderInput) -> int | None:
    report = climb(given).report
    return None if report.first_red is None else report.first_red.rung


def test_everything_right_is_green(given: LadderInput) -> None:
    seen: list[int] = []
    result = climb(given, lambda rung, name: seen.append(rung))
    assert result.error() is None
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]
    assert result.report.passed
    assert result.report.skipped == {}
    assert len(result.report.series["KL by position"]) == 60


def test_what_runs_beside_gives_the_same_report(given: LadderInput) -> None:
    alone = climb(given).report
    with Background() as background:
        beside = climb(replace(given, background=background)).report
    assert beside.checks == alone.checks
    assert beside.facts == alone.facts
    assert list(beside.seconds) == list(alone.seconds) == list(range(8))
    assert all(spent > -0.01 for spent in beside.seconds.values())


def test_a_death_beside_is_its_own_rungs(given: LadderInput) -> None:
    @contextmanager
    def dying() -> Iterator[CachedLlama]:
        raise NativeToolError("the LiteRT interpreter died with SIGSEGV")
        yield right()

    with Background() as background:
        result = climb(replace(given, float_flatbuffer=dying, background=background))
    assert {check.rung for check in result.report.checks if not check.passed} == {4}
    assert isinstance(result.error(), NativeToolError)


def test_time_counts_for_the_rung_that_it_was_spent_on(given: LadderInput) -> None:
    def slow() -> list[Check]:
        time.sleep(2)
        return [holds("tokenizer parity", 6, True, "equal")]

    with Background() as background:
        report = climb(replace(given, tokenizer_rung=slow, background=background)).report
    assert report.seconds[6] >= 2
    assert all(report.seconds[rung] < 2 for rung in (0, 1, 2, 3, 4, 5, 7))


def test_an_unaccounted_tensor_is_rung_0(given: LadderInput) -> None:
    assert first_red(replace(given, source_keys=[*given.source_keys, "model.extra"])) == 0
    lost = mapped()
    del lost.weights["norm.weight"]
    assert first_red(replace(given, mapped=lost)) == 0
    shape = mapped()
    shape.weights["norm.weight"] = SimpleNamespace(shape=(1,))
    assert first_red(replace(given, mapped=shape)) == 0


def test_another_training_code_is_rung_1(given: LadderInput) -> None:
    logits = reference_logits(WEIGHTS, UNTIED, TEXT[:20], style="interleaved").numpy()
    assert first_red(replace(given, golden=Golden((TEXT[:20],), (logits,), "float32"))) == 1


def test_a_gain_folded_without_being_removed_is_rung_2(given: LadderInput) -> None:
    name = "layers.0.self_attn.q_proj.weight"
    gain = WEIGHTS["model.layers.0.input_layernorm.weight"]
    folded = reference(**{name: WEIGHTS[f"model.{name}"] * gain})
    assert first_red(replace(given, rewritten=folded)) == 2


@pytest.mark.parametrize(("scaled", "first"), [(False, "layer 0 values"), (True, "layer 1 keys")])
def test_rung_2_names_the_layer_and_tensor(given: LadderInput, scaled: bool, first: str) -> None:
    name = "layers.0.self_attn.v_proj.weight"
    wrong = reference(**{name: hermes_weights(WEIGHTS)[name].flip(0)})
    looked = replace(given, rewritten=wrong, localise=True, scaled_values=scaled)
    report = climb(looked).report
    (check,) = [c for c in report.checks if c.rung == 2 and c.name.startswith("cache of the")]
    assert not check.passed
    assert f"first above it: {first}" in check.detail
    assert len(report.series["difference by layer, rewritten model from reference"]) == 2
    assert climb(replace(given, localise=True, scaled_values=scaled)).report.passed


@pytest.mark.parametrize("fault", ["rotary pairs interleaved", "cache position off by one"])
def test_a_wrong_exportable_module_is_rung_3(given: LadderInput, fault: Fault) -> None:
    everything = replace(
        given,
        exportable=lambda: nullcontext(right(fault)),
        float_flatbuffer=lambda: nullcontext(right(fault)),
        flatbuffer=lambda: nullcontext(right(fault)),
        runtime=lambda: nullcontext(Runtime(right(fault))),
    )
    assert first_red(everything) == 3
    red = {check.rung for check in climb(everything).report.checks if not check.passed}
    assert 4 not in red  # the flatbuffer is what the module is


@pytest.mark.parametrize("fault", ["key heads in the wrong order", "one future slot open"])
def test_a_wrong_flatbuffer_is_rung_4(given: LadderInput, fault: Fault) -> None:
    assert first_red(replace(given, float_flatbuffer=lambda: nullcontext(right(fault)))) == 4


def test_wrong_signatures_are_rung_4(given: LadderInput) -> None:
    assert first_red(replace(given, file_signatures=SIGNATURES[1:])) == 4


def test_per_tensor_quantization_is_rung_5(given: LadderInput) -> None:
    weights = dict(WEIGHTS)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][50] *= 200
    for name, weight in weights.items():
        if weight.ndim == 2:
            scale = weight.abs().max() / 127
            weights[name] = (weight / scale).round() * scale
    crude = CachedLlama(weights, UNTIED)
    changed = replace(
        given,
        flatbuffer=lambda: nullcontext(crude),
        runtime=lambda: nullcontext(Runtime(crude)),
    )
    assert first_red(changed) == 5


def test_a_wrong_tokenizer_is_rung_6(given: LadderInput) -> None:
    broken = replace(given, tokenizer_rung=lambda: [holds("parity", 6, False, "1 of 9 differ")])
    assert first_red(broken) == 6


def test_a_start_token_too_many_is_rung_7(given: LadderInput) -> None:
    assert first_red(replace(given, runtime=lambda: nullcontext(Runtime(right(), start=1)))) == 7


def test_verdict_and_exit_code(given: LadderInput) -> None:
    wrong = replace(given, runtime=lambda: nullcontext(Runtime(right("pads visible"), start=1)))
    error = climb(wrong).error()
    assert isinstance(error, VerificationError)
    assert error.exit_code == 6
    assert "first red rung 7 (LiteRT-LM = flatbuffer)" in str(error)


def test_a_dead_runtime_is_exit_7_and_the_other_rungs_still_run(given: LadderInput) -> None:
    @contextmanager
    def dying() -> Iterator[CachedLlama]:
        raise NativeToolError("the LiteRT interpreter died with SIGSEGV")
        yield right()

    result = climb(replace(given, float_flatbuffer=dying))
    error = result.error()
    assert isinstance(error, NativeToolError)
    assert error.exit_code == 7
    assert result.report.first_red is not None
    assert result.report.first_red.rung == 4
    assert "SIGSEGV" in result.report.first_red.detail
    assert {check.rung for check in result.report.checks} == {0, 1, 2, 3, 4, 5, 6, 7}


def test_what_is_not_given_is_skipped_and_said() -> None:
    result = climb(LadderInput(limits=Limits(), mapped=mapped(), source_keys=[]))
    assert sorted(result.report.skipped) == [1, 2, 3, 4, 5, 6, 7]
    assert result.report.skipped[1] == "no golden logits"
    nothing = climb(LadderInput(limits=Limits()))
    assert not nothing.report.passed
    assert isinstance(nothing.error(), VerificationError)


def test_signature_problems_are_all_listed() -> None:
    decode = SIGNATURES[-1]
    inputs = (TensorSpec("tokens", (1, 2), "int32"), *decode.inputs[1:-1])
    changed = replace(decode, inputs=inputs, outputs=(*decode.outputs, decode.inputs[0]))
    problems = signature_problems([*SIGNATURES[1:-1], changed], SIGNATURES)
    assert problems == [
        "signature prefill_1 is missing",
        "decode input tokens is int32 [1, 2], expected int32 [1, 1]",
        "decode input kv_cache_v_1 is missing",
        "decode output tokens is surplus",
    ]
