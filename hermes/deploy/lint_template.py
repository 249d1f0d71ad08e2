"""Rules about the chat template, tried as the runtime's engine would render it."""

from __future__ import annotations

from collections.abc import Iterator

from hermes.deploy.lint import RuleBook
from hermes.deploy.lint_facts import BundleFacts
from hermes.deploy.lint_tokenizer import opened
from hermes.deploy.template_probe import TemplateProbe, probe_template

BOOK = RuleBook()


def _probe(facts: BundleFacts) -> TemplateProbe:
    """What the template does; an empty probe without one, or with one that is broken."""
    template = None if facts.prompt is None else facts.prompt.chat_template
    found = probe_template(template) if template else TemplateProbe()
    return TemplateProbe() if found.problem else found


def _start_text(facts: BundleFacts) -> str:
    rule = None if facts.prompt is None else facts.prompt.start_token
    if isinstance(rule, str):
        return rule
    tokenizer = opened(facts)
    if not rule or tokenizer is None or not 0 <= rule[0] < tokenizer.vocab_size:
        return ""
    return tokenizer.piece(rule[0])


@BOOK.rule(
    "template-broken",
    "error",
    "A template that does not parse, refuses a plain message or never ends fails every message.",
    "correct the template",
)
def template_broken(facts: BundleFacts) -> Iterator[str]:
    template = None if facts.prompt is None else facts.prompt.chat_template
    if not template:
        return
    found = probe_template(template)
    if found.problem:
        yield found.problem
    elif found.parts_problem and not found.as_text:
        yield f"a plain user message is not printed: {found.parts_problem}"


@BOOK.rule(
    "content-parts",
    "error",
    "The runtime passes every message's content as a list of parts. A template that joins it to "
    "text fails at the first message, or prints the list.",
    "print the text of each part (hermes convert rewrites the template so)",
)
def content_parts(facts: BundleFacts) -> Iterator[str]:
    found = _probe(facts)
    if found.parts_problem and found.as_text:
        yield f"with a content in parts: {found.parts_problem}"


@BOOK.rule(
    "template-engine",
    "error",
    "The runtime renders with minijinja, which lacks these; the prompt becomes empty and the "
    "message fails.",
    "write them as filters or conditions (hermes convert rewrites what it can)",
)
def template_engine(facts: BundleFacts) -> Iterator[str]:
    yield from _probe(facts).unsupported


@BOOK.rule(
    "empty-token-names",
    "error",
    "The runtime defines bos_token and eos_token as empty texts, so what the template prints with "
    "them is missing from the prompt.",
    "put the tokens' text into the template, or use start_token",
)
def empty_token_names(facts: BundleFacts) -> Iterator[str]:
    fed = facts.prompt is not None and facts.prompt.start_token is not None
    for name in _probe(facts).empty_names:
        # A start token of the metadata takes the place of the empty text.
        if name != "bos_token" or not fed:
            yield f"the template prints {name}"


@BOOK.rule(
    "start-doubled",
    "error",
    "The runtime feeds start_token and the template prints it again. Models were trained with one; "
    "with two SmolLM2 answered in garbage.",
    "leave start_token out of the metadata, or the token out of the template",
)
def start_doubled(facts: BundleFacts) -> Iterator[str]:
    text = _start_text(facts)
    if text and _probe(facts).prompt.startswith(text):
        yield f"start_token is {text!r} and the template's prompt begins with it"


@BOOK.rule(
    "start-missing",
    "warning",
    "The tokenizer's own file puts this token before every text, and the runtime never applies "
    "that. Training saw it, the phone does not.",
    "write it into start_token, or print it in the template",
)
def start_missing(facts: BundleFacts) -> Iterator[str]:
    tokenizer = opened(facts)
    leading = [] if tokenizer is None else tokenizer.leading_ids()
    if tokenizer is None or facts.prompt is None or len(leading) != 1:
        return
    piece = tokenizer.piece(leading[0])
    if facts.prompt.start_token is None and not _probe(facts).prompt.startswith(piece):
        yield f"{piece!r} (id {leading[0]}) is put first by the tokenizer and by nothing else"


@BOOK.rule(
    "unmatched-specials",
    "error",
    "SentencePiece never recognises control symbols in text: these become several ordinary pieces, "
    "which training never saw.",
    "make them user-defined symbols, or bundle a tokenizer.json",
)
def unmatched_specials(facts: BundleFacts) -> Iterator[str]:
    tokenizer = opened(facts)
    found = _probe(facts)
    if tokenizer is None or tokenizer.kind != "sentencepiece":
        return
    printed = found.prompt + found.after_answer
    ids = set(tokenizer.encode(printed))
    for piece, token in tokenizer.special_pieces.items():
        if piece.strip() and piece in printed and token not in ids:
            yield f"the template prints {piece!r} (id {token})"


@BOOK.rule(
    "turn-end",
    "warning",
    "After an assistant's answer the template prints a text in which no stop token occurs. A model "
    "trained with it ends its answers so, and the runtime would not notice.",
    "add the token that ends a turn to stop_tokens",
)
def turn_end(facts: BundleFacts) -> Iterator[str]:
    tokenizer, end = opened(facts), _probe(facts).after_answer
    if tokenizer is None or facts.prompt is None or not end.strip():
        return
    ids = tokenizer.encode(end)
    for rule in facts.prompt.stop_tokens:
        wanted = tokenizer.encode(rule) if isinstance(rule, str) else list(rule)
        starts = range(len(ids) - len(wanted) + 1)
        if (isinstance(rule, str) and rule in end) or any(
            ids[start : start + len(wanted)] == wanted for start in starts
        ):
            return
    yield f"it prints {end!r}"
