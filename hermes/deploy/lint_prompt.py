"""Rules about the prompt metadata: where an answer begins and ends, and how it is sampled."""

from __future__ import annotations

from collections.abc import Iterator

from hermes.deploy.lint import RuleBook
from hermes.deploy.lint_facts import BundleFacts
from hermes.deploy.lint_tokenizer import opened

BOOK = RuleBook()
_TOP_K, _TOP_P, _GREEDY = 1, 2, 3
_SAMPLERS = {_TOP_K: "TOP_K", _GREEDY: "GREEDY"}


def _limit(facts: BundleFacts) -> int:
    """Ids that exist; 0 if nothing tells."""
    tokenizer = opened(facts)
    return facts.vocab_size or (0 if tokenizer is None else tokenizer.vocab_size)


def unspellable(facts: BundleFacts, text: str) -> bool:
    """Whether the tokenizer cannot say this text."""
    tokenizer = opened(facts)
    if tokenizer is None:
        return False
    return not text or tokenizer.decode(tokenizer.encode(text)).strip(" ") != text.strip(" ")


@BOOK.rule(
    "no-stop-token",
    "error",
    "At least one stop token is needed: without one the runtime refuses to decode.",
    "write the end-of-turn token's id into stop_tokens",
)
def no_stop_token(facts: BundleFacts) -> Iterator[str]:
    if facts.prompt is not None and not facts.prompt.stop_tokens:
        yield "stop_tokens is empty"


@BOOK.rule(
    "stop-token",
    "error",
    "A stop token that the model cannot say never comes, and the answer that should end there runs "
    "on; a spelling outside the vocabulary silently becomes the unknown token.",
    "use ids of the bundle's own tokenizer",
)
def stop_token(facts: BundleFacts) -> Iterator[str]:
    limit = _limit(facts)
    for rule in () if facts.prompt is None else facts.prompt.stop_tokens:
        if isinstance(rule, str):
            if unspellable(facts, rule):
                yield f"the tokenizer cannot spell {rule!r}"
        elif not rule or any(token < 0 or (limit and token >= limit) for token in rule):
            yield f"{list(rule)}, outside the {limit} ids"


@BOOK.rule(
    "start-token",
    "error",
    "The runtime feeds the start token before every conversation; with an id outside the table "
    "every message fails, an unknown spelling feeds the unknown token.",
    "use an id of the bundle's own tokenizer",
)
def start_token(facts: BundleFacts) -> Iterator[str]:
    rule = None if facts.prompt is None else facts.prompt.start_token
    limit = _limit(facts)
    if isinstance(rule, str):
        if unspellable(facts, rule):
            yield f"the tokenizer cannot spell {rule!r}"
    elif rule is not None and any(token < 0 or (limit and token >= limit) for token in rule):
        yield f"{list(rule)}, outside the {limit} ids"


@BOOK.rule(
    "start-sequence",
    "error",
    "Of a start sequence only the first id is fed.",
    "put the others into the chat template",
)
def start_sequence(facts: BundleFacts) -> Iterator[str]:
    rule = None if facts.prompt is None else facts.prompt.start_token
    tokenizer = opened(facts)
    ids = list(rule) if isinstance(rule, tuple) else []
    if isinstance(rule, str) and tokenizer is not None:
        ids = tokenizer.encode(rule)
    if len(ids) > 1:
        yield f"the start token is {len(ids)} ids long: {ids}"


@BOOK.rule(
    "stop-suppressed",
    "error",
    "A suppressed token is never sampled, so this one never ends an answer.",
    "take it out of suppress_tokens",
)
def stop_suppressed(facts: BundleFacts) -> Iterator[str]:
    if facts.prompt is None:
        return
    for rule in facts.prompt.stop_tokens:
        lost = set(rule) & set(facts.prompt.suppress_tokens) if isinstance(rule, tuple) else set()
        if lost:
            yield f"stop token {sorted(lost)[0]} is in suppress_tokens"


@BOOK.rule(
    "suppressed-range",
    "warning",
    "A suppressed id beyond the logits has nothing to suppress; the list belongs to another model.",
    "list ids below the vocabulary",
)
def suppressed_range(facts: BundleFacts) -> Iterator[str]:
    ids = () if facts.prompt is None else facts.prompt.suppress_tokens
    beyond = [token for token in ids if token < 0 or token >= (facts.vocab_size or token + 1)]
    if beyond:
        yield f"suppress_tokens holds {beyond[0]}, the logits have {facts.vocab_size}"


@BOOK.rule(
    "sampler",
    "error",
    "Only the type TOP_P with k above 0 works on the CPU: with TOP_K, GREEDY, or without k, every "
    "decoding fails. (TOP_P with k = 1 is greedy.)",
    "write TOP_P and k into sampler_params, or pass a SamplerConfig in the app",
)
def sampler(facts: BundleFacts) -> Iterator[str]:
    settings = {} if facts.prompt is None else facts.prompt.sampler
    kind = int(settings.get("type", 0))
    if kind in _SAMPLERS:
        yield f"sampler_params has the type {_SAMPLERS[kind]}"
    elif kind == _TOP_P and settings.get("k", 0) < 1:
        yield f"sampler_params has k = {settings.get('k', 0):g}"


@BOOK.rule(
    "model-type",
    "warning",
    "Without a model type in the metadata the runtime guesses one from the vocabulary and may "
    "choose another way of building prompts.",
    "write llm_model_type, generic_model for a model with a chat template of its own",
)
def model_type(facts: BundleFacts) -> Iterator[str]:
    if facts.prompt is not None and not facts.prompt.model_type:
        yield "llm_model_type is not set"
