"""Rung 8: another processor computes what this one computes.

Float stages agree as tightly as on one machine. Dynamic int8 has several legitimate answers, one
for each way that a processor's kernels round activations, so two processors are compared as
distributions, and token by token only where the choice is clear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hermes.recipe import Limits
from hermes.report.check import Check, at_least, at_most, equals, measured
from hermes.runners.interface import Generation, Logits, LogitsRunner, TokenRunner
from hermes.verify.feeding import Feed, Prefill, Steps, greedy_feed, run_feed
from hermes.verify.ladder_input import OpenLogits, OpenTokens
from hermes.verify.metrics import kl_divergence, log_softmax, margin
from hermes.verify.runtime import RuntimeData, follow

RUNG = 8
POSITIONS = 48
"""Decode steps that the int8 forms are compared over."""
NEW_TOKENS = 16
"""Length of each answer: an emulated step of a model of 135 M parameters takes seconds."""
_PROMPT, _STEPS = 40, 4


@dataclass(frozen=True)
class Pair:
    """The same file on this processor and on the other."""

    here: OpenLogits
    there: OpenLogits


@dataclass(frozen=True)
class DeviceInput:
    """What there is to compare.

    Attributes:
        name: of the other processor, for the checks.
        self_test: gives the figures of its self-test; raises if it computes garbage.
        floats: the float32 bound form; None where the model is too big for it.
        bundled: the model as it is in the bundle.
        quantized: its weights are, so that it may differ from processor to processor.
        runtime: the bundle in LiteRT-LM on the other processor.
        desktop: the same here.
        data: what to say to both.
        text_ids: real text.
    """

    name: str
    self_test: Callable[[], dict[str, float]]
    floats: Pair | None
    bundled: Pair
    quantized: bool
    runtime: OpenTokens
    desktop: OpenTokens
    data: RuntimeData
    text_ids: Sequence[int]


@dataclass
class DeviceResult:
    """Checks, and series for the plots."""

    checks: list[Check] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)


def check_device(given: DeviceInput, limits: Limits) -> DeviceResult:
    """The self-test first, then float logits, bundled logits and greedy tokens.

    Raises:
        NativeToolError: the self-test failed, or something died there.
    """
    result = DeviceResult()
    tested = given.self_test()
    result.checks += [measured(f"self-test, {name}", RUNG, value) for name, value in tested.items()]
    if given.floats is not None:
        result.checks += compare_floats(given.floats, given.text_ids, given.name, limits)
    if given.quantized:
        compared = compare_distributions(given.bundled, given.text_ids, given.name, limits)
        result.checks += compared.checks
        result.series |= compared.series
    else:
        result.checks += compare_floats(given.bundled, given.text_ids, given.name, limits)
    result.checks += compare_tokens(given, limits)
    return result


def compare_floats(pair: Pair, ids: Sequence[int], name: str, limits: Limits) -> list[Check]:
    """Every logit of two prompts, one with a padded prefill."""
    checks = []
    with pair.here() as here, pair.there() as there:
        for feed in _feeds(here):
            both = [dict(run_feed(runner, ids, feed)) for runner in (here, there)]
            apart = [float(np.abs(row - both[1][at]).max()) for at, row in both[0].items()]
            largest = float(np.max(apart))
            detail = f"largest logit difference of {len(apart)} positions"
            label = f"float logits on {name} = here, {feed.name}"
            checks.append(at_most(label, RUNG, largest, limits.float_logits, detail))
    return checks


def compare_distributions(
    pair: Pair, ids: Sequence[int], name: str, limits: Limits
) -> DeviceResult:
    """KL divergence, correlation, and the choices that are clear."""
    with pair.here() as here, pair.there() as there:
        count = min(POSITIONS, here.capacity, len(ids))
        wanted, found = (_stepped(runner, ids[:count]) for runner in (here, there))
    both = list(zip(wanted, found, strict=True))
    kl = [kl_divergence(log_softmax(mine), log_softmax(other)) for mine, other in both]
    correlation = float(np.corrcoef(np.concatenate(wanted), np.concatenate(found))[0, 1])
    clear = [(mine, other) for mine, other in both if margin(mine) > limits.clear_margin]
    other_choice = sum(int(mine.argmax() != other.argmax()) for mine, other in clear)
    largest = float(np.max(np.abs(np.subtract(wanted, found))))
    over = f"{count} positions of text"
    detail = f"of {len(clear)} positions with a margin above {limits.clear_margin:g}"
    checks = [
        at_most(f"mean KL, {name} from here", RUNG, float(np.mean(kl)), limits.device_kl, over),
        at_least(f"correlation of logits, {name}", RUNG, correlation, limits.device_correlation),
        equals(f"clear choices that differ on {name}", RUNG, other_choice, 0, detail),
        measured("largest logit difference", RUNG, largest),
    ]
    return DeviceResult(checks, {f"KL by position, {name} from here": kl})


def compare_tokens(given: DeviceInput, limits: Limits) -> list[Check]:
    """What LiteRT-LM says there, followed along the logits that the bundle has here."""
    data = replace(given.data, max_new_tokens=min(NEW_TOKENS, given.data.max_new_tokens))
    with given.runtime() as there, given.desktop() as here, given.bundled.here() as logits:
        questions = [(prompt, prompt) for prompt in data.prompts]
        if data.first_message is not None:
            rendered = here.render([{"role": "user", "content": data.first_message}])
            # A template that fails is rung 7's to report.
            questions += [(data.first_message, rendered)] if rendered else []
        checks = []
        for label, prompt in questions:
            said = there.generate(prompt, data.max_new_tokens)
            wanted = here.generate(prompt, data.max_new_tokens)
            judged = judge_tokens((here, logits), prompt, said, wanted, data, limits)
            checks.append(same_tokens(label, given.name, said.text, wanted, judged))
    return checks


@dataclass(frozen=True)
class TokenVerdict:
    """How two answers to the same prompt compare.

    Attributes:
        agreed: tokens of the wanted answer that the other one has too.
        same: the answers are the same.
        margin: here, where the first difference is; infinite where there is none.
        clear: the margin above which a choice is clear.
    """

    agreed: int
    same: bool
    margin: float
    clear: float

    @property
    def passed(self) -> bool:
        """The same, or different first where the choice is not clear."""
        return self.same or self.margin <= self.clear


def judge_tokens(
    here: tuple[TokenRunner, LogitsRunner],
    prompt: str,
    said: Generation,
    wanted: Generation,
    data: RuntimeData,
    limits: Limits,
) -> TokenVerdict:
    """Walk along the bundle's own choices here as long as the other answer makes them too."""
    if said.text == wanted.text:
        return TokenVerdict(wanted.new_tokens, True, float("inf"), limits.clear_margin)
    runtime, logits = here
    ids = runtime.tokenize(prompt)
    start = [] if data.start_token is None else [data.start_token]
    found = follow(
        logits,
        [*start, *ids],
        said,
        runtime.detokenize,
        near_tie=0.0,
        stop_tokens=data.stop_tokens,
        suppressed=data.suppressed,
    )
    return TokenVerdict(found.tokens, False, found.margin, limits.clear_margin)


def same_tokens(
    label: str, name: str, said: str, wanted: Generation, verdict: TokenVerdict
) -> Check:
    """The check that a verdict makes."""
    short = label if len(label) <= 40 else label[:37] + "..."
    detail = repr(said)
    if not verdict.same:
        detail = (
            f"differs after {verdict.agreed} tokens, where the margin here is "
            f"{verdict.margin:.3g}: there {said!r}, here {wanted.text!r}"
        )
    return Check(
        f"greedy tokens of {short!r} on {name}",
        RUNG,
        float(verdict.agreed),
        float(wanted.new_tokens),
        verdict.passed,
        detail,
        "=",
    )


def _feeds(runner: LogitsRunner) -> list[Feed]:
    """A prompt as the runtime feeds it, and the shortest prefill that can be padded."""
    count = min(_PROMPT, runner.capacity - _STEPS)
    whole = greedy_feed("", count, runner.prefill_lengths, runner.capacity)
    feeds = [Feed(f"{count} tokens and {_STEPS} more", (*whole.parts, Steps(_STEPS)))]
    padded = [length for length in runner.prefill_lengths if 1 < length <= runner.capacity - _STEPS]
    if padded:
        part = Prefill(padded[0] // 2, padded[0])
        feeds.append(Feed(f"a padded prefill of {padded[0]}", (part, Steps(_STEPS))))
    return feeds


def _stepped(runner: LogitsRunner, ids: Sequence[int]) -> list[Logits]:
    runner.reset()
    return [runner.step(token, position) for position, token in enumerate(ids)]
