"""Rules about the exported functions: what the runtime calls, and what it carries along."""

from __future__ import annotations

from collections.abc import Iterator

from hermes.deploy.lint import RuleBook
from hermes.deploy.lint_facts import CACHE_PREFIXES, BundleFacts, SignatureFact, TensorFact
from hermes.runners.roles import MASK_NAMES, POSITION_NAMES, PREFILL, TOKEN_NAMES
from hermes.signatures import DECODE

BOOK = RuleBook()
_MASKS = ("float32", "float16", "bool")


def called(facts: BundleFacts) -> Iterator[SignatureFact]:
    """The signatures that the runtime uses."""
    for signature in facts.signatures:
        if signature.name == DECODE or signature.name.startswith(PREFILL):
            yield signature


def _pairs(signature: SignatureFact) -> Iterator[tuple[TensorFact, TensorFact]]:
    """Cache inputs with the outputs of the same name."""
    outputs = {tensor.name: tensor for tensor in signature.outputs}
    for tensor in signature.cache:
        if tensor.name in outputs:
            yield tensor, outputs[tensor.name]


@BOOK.rule(
    "no-decode",
    "error",
    "Every token after the first comes from the signature `decode`; without it the engine is not "
    "created.",
    "export a signature called decode with the logits of one token",
)
def no_decode(facts: BundleFacts) -> Iterator[str]:
    if facts.signatures and facts.decode is None:
        yield f"signatures: {', '.join(signature.name for signature in facts.signatures)}"


@BOOK.rule(
    "no-prefill",
    "error",
    "Prompts are fed through signatures whose names begin with `prefill`; without one no prompt of "
    "two tokens can be fed.",
    "export at least one signature prefill_N",
)
def no_prefill(facts: BundleFacts) -> Iterator[str]:
    if facts.signatures and not facts.prefills:
        yield f"signatures: {', '.join(signature.name for signature in facts.signatures)}"


@BOOK.rule(
    "input-names",
    "error",
    "The runtime looks for its inputs by name and refuses a signature without them.",
    f"name them {TOKEN_NAMES[0]} and {POSITION_NAMES[0]}",
)
def input_names(facts: BundleFacts) -> Iterator[str]:
    apart = any("embedder" in str(part.entries.get("model_type")) for part in facts.sections)
    for signature in called(facts):
        for names in (POSITION_NAMES,) if apart else (TOKEN_NAMES, POSITION_NAMES):
            if signature.input(names) is None:
                yield f"{signature.name} has no input {' or '.join(names)}"


@BOOK.rule(
    "no-cache",
    "error",
    "Without cache tensors the model sees one token at a time and forgets all others.",
    f"name the cache {CACHE_PREFIXES[0][0]}N and {CACHE_PREFIXES[0][1]}N",
)
def no_cache(facts: BundleFacts) -> Iterator[str]:
    for signature in called(facts):
        if not signature.cache:
            yield f"{signature.name} has no input whose name begins with {CACHE_PREFIXES[0][0]}"


@BOOK.rule(
    "cache-names",
    "error",
    "The runtime updates the cache where an output has the name of an input. With other names the "
    "model loads and runs, and its cache never changes.",
    "give every cache output the name of its input",
)
def cache_names(facts: BundleFacts) -> Iterator[str]:
    for signature in called(facts):
        names = {tensor.name for tensor in signature.outputs}
        lost = [tensor.name for tensor in signature.cache if tensor.name not in names]
        if lost:
            missing = f"{', '.join(lost[:3])} ({len(lost)} in all)"
            yield f"{signature.name}: no output is called {missing}"


@BOOK.rule(
    "cache-type",
    "error",
    "Input and output of a cache tensor share one buffer; with two element types the bytes of one "
    "are read as the other.",
    "use one element type for both",
)
def cache_type(facts: BundleFacts) -> Iterator[str]:
    for signature in called(facts):
        for before, after in _pairs(signature):
            if before.dtype != after.dtype:
                yield f"{signature.name}: {before.name} is {before.dtype} in, {after.dtype} out"


@BOOK.rule(
    "cache-shape",
    "error",
    "One buffer serves all signatures: a cache tensor has one shape everywhere.",
    "export all signatures with the same context",
)
def cache_shape(facts: BundleFacts) -> Iterator[str]:
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for signature in called(facts):
        tensors = (*signature.cache, *(after for _, after in _pairs(signature)))
        for tensor in tensors:
            shapes.setdefault(tensor.name, set()).add(tensor.shape)
    for name, found in shapes.items():
        if len(found) > 1:
            yield f"{name} has the shapes {', '.join(str(list(shape)) for shape in sorted(found))}"


@BOOK.rule(
    "open-shape",
    "warning",
    "The CPU runtime wants fixed shapes: a cache of open length was refused at the first prefill.",
    "export with a fixed context and fixed prefill lengths",
)
def open_shape(facts: BundleFacts) -> Iterator[str]:
    for signature in called(facts):
        names = [tensor.name for tensor in signature.inputs if -1 in tensor.shape]
        if names:
            yield f"{signature.name}: {', '.join(names[:3])} leave an axis open"


@BOOK.rule(
    "logits",
    "error",
    "The sampler reads `logits` of decode with three axes, [1, 1, vocabulary].",
    "export decode with an output logits of that shape",
)
def logits(facts: BundleFacts) -> Iterator[str]:
    if facts.decode is None:
        return
    found = [tensor for tensor in facts.decode.outputs if tensor.name == "logits"]
    if not found:
        yield "decode has no output logits"
    elif len(found[0].shape) != 3:
        yield f"decode's logits have the shape {list(found[0].shape)}"


@BOOK.rule(
    "mask-type",
    "error",
    "The runtime fills masks of float32, float16 and bool; one of another type is not written.",
    "export the mask as float32",
)
def mask_type(facts: BundleFacts) -> Iterator[str]:
    for signature in called(facts):
        mask = signature.input(MASK_NAMES)
        if mask is not None and mask.dtype not in _MASKS:
            yield f"{signature.name}: {mask.name} is {mask.dtype}"


@BOOK.rule(
    "scatter",
    "error",
    "The runtime pads a short prefill with position 0, so a scatter by position overwrites the "
    "first token's entry, on which attention leans most; it is also up to three times slower.",
    "write the cache as one slice that begins at the first position (dynamic update slice)",
)
def scatter(facts: BundleFacts) -> Iterator[str]:
    for signature in called(facts):
        if signature.scatters:
            yield f"{signature.name} writes {signature.scatters} cache tensors by scatter"


@BOOK.rule(
    "context-end",
    "warning",
    "A prefill signature longer than the room left is refused, and every later message with it. "
    "With no short one a conversation dies that many tokens before its end.",
    "export a prefill of length 1 (hermes convert --prefill 1 --prefill 8 ...)",
)
def context_end(facts: BundleFacts) -> Iterator[str]:
    if facts.prefills and facts.context and facts.prefills[0].length > 1:
        shortest = facts.prefills[0].length
        yield (
            f"the shortest prefill has {shortest} tokens: of {facts.context} the last {shortest} "
            "cannot take a message"
        )


@BOOK.rule(
    "prefill-too-long",
    "error",
    "A prefill longer than the context never fits.",
    "export prefill lengths up to the context",
)
def prefill_too_long(facts: BundleFacts) -> Iterator[str]:
    for signature in facts.prefills:
        if facts.context and signature.length > facts.context:
            yield f"{signature.name} in a context of {facts.context}"


@BOOK.rule(
    "max-tokens",
    "warning",
    "The context is the smaller one of the exported cache and max_num_tokens of the metadata.",
    "set max_num_tokens to the exported context, and ask for no more in EngineConfig",
)
def max_tokens(facts: BundleFacts) -> Iterator[str]:
    limit = 0 if facts.prompt is None else facts.prompt.max_num_tokens
    if facts.capacity and limit > facts.capacity:
        yield f"max_num_tokens is {limit}, the cache has {facts.capacity} slots"
    elif facts.capacity and 0 < limit < facts.capacity:
        yield f"max_num_tokens is {limit}: {facts.capacity - limit} slots are never used"


@BOOK.rule(
    "no-max-tokens",
    "warning",
    "Without max_num_tokens in the metadata the engine's own default decides how long a "
    "conversation may be.",
    "write the exported context into the metadata, or set maxNumTokens in EngineConfig",
)
def no_max_tokens(facts: BundleFacts) -> Iterator[str]:
    if facts.prompt is not None and facts.prompt.max_num_tokens <= 0:
        yield f"max_num_tokens is {facts.prompt.max_num_tokens}"
