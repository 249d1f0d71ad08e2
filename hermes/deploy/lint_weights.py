"""Rules about how the matrices are stored."""

from __future__ import annotations

from collections.abc import Iterator

from hermes.deploy.lint import RuleBook
from hermes.deploy.lint_facts import BundleFacts
from hermes.report.wording import size

BOOK = RuleBook()
_INTEGERS = ("int8", "int4", "int2", "uint8")
_SMALL_SHARE = 0.05
"""Of all matrices' bytes; below, float ones cost nothing, such as the matrix that mixes a block."""


@BOOK.rule(
    "rotary-integers",
    "warning",
    "A rotary table looked up by position was quantized along with the embeddings, as the official "
    "int8 recipe does: every rotation is rounded to 8 bits.",
    "keep tables that are looked up by position in float",
)
def rotary_integers(facts: BundleFacts) -> Iterator[str]:
    for constant in facts.constants:
        if constant.by_position and constant.dtype in _INTEGERS:
            yield f"{constant.name} {list(constant.shape)} is {constant.dtype}"


@BOOK.rule(
    "float-weights",
    "warning",
    "Most matrices are integers and some are not: they take four times the memory and time.",
    "add them to the recipe's rules, unless they were left out on purpose",
)
def float_weights(facts: BundleFacts) -> Iterator[str]:
    matrices = [constant for constant in facts.constants if not constant.by_position]
    floats = [constant for constant in matrices if constant.dtype not in _INTEGERS]
    total = sum(constant.size for constant in floats)
    few = 2 * len(floats) < len(matrices)
    if few and total > _SMALL_SHARE * sum(c.size for c in matrices):
        names = ", ".join(constant.name for constant in floats[:3])
        yield f"{len(floats)} of {len(matrices)} matrices are float ({size(total)}): {names}"


@BOOK.rule(
    "one-scale",
    "warning",
    "With one scale for a whole matrix the rows with small weights lose most of their bits; a "
    "scale per output channel costs nothing.",
    'quantize with granularity = "channel"',
)
def one_scale(facts: BundleFacts) -> Iterator[str]:
    found = [
        constant
        for constant in facts.constants
        if constant.dtype in _INTEGERS and constant.scales == 1 and constant.shape[0] > 1
    ]
    if found:
        names = ", ".join(constant.name for constant in found[:3])
        yield f"{len(found)} integer matrices have one scale each: {names}"


@BOOK.rule(
    "vocabulary",
    "error",
    "Ids beyond the logits can be read and never be said; feeding one reads outside the table.",
    "bundle the tokenizer that the model was trained with",
)
def vocabulary(facts: BundleFacts) -> Iterator[str]:
    from hermes.deploy.lint_tokenizer import opened

    tokenizer = opened(facts)
    if tokenizer is not None and facts.vocab_size and tokenizer.vocab_size > facts.vocab_size:
        yield f"the tokenizer has {tokenizer.vocab_size} ids, the logits {facts.vocab_size}"


@BOOK.rule(
    "padded-vocabulary",
    "warning",
    "The model's table has rows that no token stands for. Their untrained logits can win, and the "
    "answer then holds ids without text.",
    "list these ids in suppress_tokens of the metadata",
)
def padded_vocabulary(facts: BundleFacts) -> Iterator[str]:
    from hermes.deploy.lint_tokenizer import opened

    tokenizer = opened(facts)
    if tokenizer is None or facts.prompt is None or not facts.vocab_size:
        return
    rows = set(range(tokenizer.vocab_size, facts.vocab_size))
    free = sorted(rows - set(facts.prompt.suppress_tokens))
    if free:
        yield f"{len(free)} rows without a token may be sampled, {free[0]} the first"
