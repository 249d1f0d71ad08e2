"""Rung 7: LiteRT-LM says, token by token, what the flatbuffer itself would say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from hermes.report.check import Check, at_most, equals, holds, measured
from hermes.runners.interface import Generation, Logits, LogitsRunner, TokenRunner
from hermes.verify.feeding import Prefill, greedy_feed
from hermes.verify.metrics import margin

_REPLACEMENT = "�"


@dataclass(frozen=True)
class RuntimeData:
    """What the runtime rung runs on.

    Attributes:
        prompts: raw texts to continue.
        first_message: user message for the conversation call; None for a model without a template.
        max_new_tokens: length of each continuation.
        start_token: what the model's input begins with by its prompt contract, None for nothing.
        stop_tokens: ids that end an answer.
        suppressed: ids that the bundle forbids.
    """

    prompts: tuple[str, ...]
    first_message: str | None
    max_new_tokens: int
    start_token: int | None
    stop_tokens: tuple[int, ...]
    suppressed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Agreement:
    """How far a text follows a runner's greedy choices.

    Attributes:
        tokens: choices that the text followed.
        ties: of these, second choices taken because the runner's own margin was below the limit.
        difference: tokens before the first that cannot be explained; None if the text follows to
            its end.
        margin: the runner's own margin there.
        smallest_margin: of all choices made.
        chosen: the choices that the text followed, a stop token included.
    """

    tokens: int
    ties: int
    difference: int | None
    margin: float
    smallest_margin: float
    chosen: tuple[int, ...] = field(default=(), compare=False)


def follow(
    runner: LogitsRunner,
    prompt: Sequence[int],
    answer: Generation,
    detokenize: Callable[[Sequence[int]], str],
    *,
    near_tie: float,
    stop_tokens: Collection[int] = (),
    suppressed: Collection[int] = (),
) -> Agreement:
    """Walk along the runner's greedy continuation as long as `answer` follows it.

    At each token the text must go on with the runner's first choice. Its second choice is accepted
    only where the runner itself has both within `near_tie` logits of each other; the walk then goes
    on from the token that the text has.
    """
    logits = _feed_prompt(runner, prompt)
    chosen: list[int] = []
    ties, smallest = 0, float("inf")
    while len(chosen) < answer.new_tokens:
        _forbid(logits, suppressed)
        gap = margin(logits)
        smallest = min(smallest, gap)
        token = _matching_choice(logits, gap < near_tie, chosen, answer, detokenize, stop_tokens)
        if token is None:
            return Agreement(len(chosen), ties, len(chosen), gap, smallest, tuple(chosen))
        ties += token != int(logits.argmax())
        chosen.append(token)
        position = len(prompt) + len(chosen) - 1
        if token in stop_tokens or position >= runner.capacity:
            break
        if len(chosen) < answer.new_tokens:
            logits = runner.step(token, position)
    said = [token for token in chosen if token not in stop_tokens]
    complete = detokenize(said) == answer.text and len(chosen) == answer.new_tokens
    difference = None if complete else len(chosen)
    return Agreement(len(chosen), ties, difference, 0.0, smallest, tuple(chosen))


@dataclass(frozen=True)
class Spoken:
    """One entry of the transcript.

    Attributes:
        prompt: what was asked, as the user would type it.
        fed: the text that the runtime fed for it.
        ids: the tokens of it, a start token included.
        answer: what the runtime said.
        agreement: how far the flatbuffer says the same.
    """

    prompt: str
    fed: str
    ids: tuple[int, ...]
    answer: Generation
    agreement: Agreement


@dataclass
class RuntimeResult:
    """Checks, and what was said on the way."""

    checks: list[Check] = field(default_factory=list)
    transcript: list[Spoken] = field(default_factory=list)

    def agreement_along(self) -> list[float]:
        """Share of the answers that still agree after 1, 2, ... tokens."""
        longest = max((entry.answer.new_tokens for entry in self.transcript), default=0)
        shares = []
        for count in range(1, longest + 1):
            going = [entry for entry in self.transcript if entry.answer.new_tokens >= count]
            shares.append(float(np.mean([entry.agreement.tokens >= count for entry in going])))
        return shares


def check_runtime(
    runtime: TokenRunner, flatbuffer: LogitsRunner, data: RuntimeData, near_tie: float
) -> RuntimeResult:
    """Every prompt as raw text, then the first chat message."""
    result = RuntimeResult()
    for prompt in data.prompts:
        answer = runtime.generate(prompt, data.max_new_tokens)
        body = runtime.tokenize(prompt)
        _compare(runtime, flatbuffer, data, near_tie, (prompt, prompt), body, answer, result)
    if data.first_message is not None:
        _check_chat(runtime, flatbuffer, data, near_tie, data.first_message, result)
    return result


def _check_chat(
    runtime: TokenRunner,
    flatbuffer: LogitsRunner,
    data: RuntimeData,
    near_tie: float,
    message: str,
    result: RuntimeResult,
) -> None:
    rendered = runtime.render([{"role": "user", "content": message}])
    renders = holds("the chat template renders", 7, bool(rendered), _yes(rendered), rendered)
    checks = result.checks
    checks.append(renders)
    if not rendered:
        return
    (turn,) = runtime.chat([message], data.max_new_tokens)
    body = runtime.tokenize(rendered)
    start = data.start_token if data.start_token is not None else runtime.start_token
    if start is not None:
        # SentencePiece puts its space piece between a fed and a printed start token.
        opening = _with_start(runtime.start_token, body)[:3]
        detail = "the template and start_token must not both print it"
        count = opening.count(start)
        checks.append(at_most("start tokens in front of the first message", 7, count, 1, detail))
    texts = (message, rendered)
    _compare(runtime, flatbuffer, data, near_tie, texts, body, turn.generation, result)
    reply, said = turn.generation.text, result.transcript[-1].agreement.chosen
    checks.append(holds("the first message is answered", 7, bool(reply), _yes(reply), reply))
    ended = bool(said) and said[-1] in data.stop_tokens
    # Not red by itself: where the model wants to go on, so does a right bundle.
    detail = f"{turn.generation.new_tokens} of at most {data.max_new_tokens} tokens"
    checks.append(holds("its answer ends by itself", 7, True, "yes" if ended else "no", detail))


def _compare(
    runtime: TokenRunner,
    flatbuffer: LogitsRunner,
    data: RuntimeData,
    near_tie: float,
    texts: tuple[str, str],
    body: Sequence[int],
    answer: Generation,
    result: RuntimeResult,
) -> None:
    """One prompt: as many tokens fed as in training, and the flatbuffer's own answer to them.

    The flatbuffer gets what the runtime says that it feeds, so that a start token too many is red
    where it is counted and does not accuse the model.
    """
    ids = _with_start(runtime.start_token, body)
    found = follow(
        flatbuffer,
        ids,
        answer,
        runtime.detokenize,
        near_tie=near_tie,
        stop_tokens=data.stop_tokens,
        suppressed=data.suppressed,
    )
    label = texts[0]
    result.transcript.append(Spoken(*texts, tuple(ids), answer, found))
    name = label if len(label) <= 40 else label[:37] + "..."
    same = found.difference is None
    detail = f"{answer.text!r}; smallest margin {found.smallest_margin:.3g}"
    if not same:
        detail = (
            f"differs after {found.difference} tokens, where the flatbuffer's own margin is "
            f"{found.margin:.3g}; the runtime said {answer.text!r}"
        )
    followed, spoken = float(found.tokens), float(answer.new_tokens)
    wanted = len(_with_start(data.start_token, body))
    result.checks += [
        equals(f"tokens fed for {name!r}", 7, answer.prompt_tokens, wanted),
        Check(f"greedy tokens of {name!r} that agree", 7, followed, spoken, same, detail, "="),
        measured(f"near ties in {name!r}", 7, found.ties, f"margin below {near_tie:g}"),
    ]


def _matching_choice(
    logits: Logits,
    tied: bool,
    chosen: Sequence[int],
    answer: Generation,
    detokenize: Callable[[Sequence[int]], str],
    stop_tokens: Collection[int],
) -> int | None:
    """The runner's choice that the text goes on with, None if there is no such."""
    order = np.argsort(-logits, kind="stable")
    for token in (int(choice) for choice in order[: 2 if tied else 1]):
        if token in stop_tokens:
            ended = len(chosen) + 1 == answer.new_tokens and detokenize(chosen) == answer.text
            if ended:
                return token
        elif answer.text.startswith(_settled(detokenize([*chosen, token]))):
            return token
    return None


def _settled(text: str) -> str:
    """Without the incomplete character at the end: its bytes may still become another one."""
    return text.rstrip(_REPLACEMENT)


def _feed_prompt(runner: LogitsRunner, prompt: Sequence[int]) -> Logits:
    runner.reset()
    position = 0
    feed = greedy_feed("prompt", len(prompt), runner.prefill_lengths, runner.capacity)
    for part in feed.parts:
        if isinstance(part, Prefill):
            runner.prefill(prompt[position : position + part.count], position, part.length)
            position += part.count
    while position < len(prompt):
        logits = runner.step(prompt[position], position)
        position += 1
    return logits


def _forbid(logits: Logits, suppressed: Collection[int]) -> None:
    if suppressed:
        logits[list(suppressed)] = -np.inf


def _yes(text: str) -> str:
    return "yes" if text else "no"


def _with_start(start: int | None, ids: Sequence[int]) -> list[int]:
    return list(ids) if start is None else [start, *ids]
