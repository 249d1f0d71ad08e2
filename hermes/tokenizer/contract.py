"""The prompt contract: what starts a prompt, what wraps it, what ends the answer."""

from __future__ import annotations

from collections.abc import Mapping

from hermes.config import HermesConfig
from hermes.errors import BadInputError, UnsupportedModelError
from hermes.tokenizer.interface import PromptContract, Tokenizer
from hermes.tokenizer.opening import read_json_object
from hermes.tokenizer.stop_tokens import PromptSources, stop_sources
from hermes.tokenizer.template import (
    ChatTemplate,
    find_template,
    prepare_chat_template,
    special_tokens,
)


def prompt_contract(
    tokenizer: Tokenizer, checkpoint: PromptSources, config: HermesConfig
) -> PromptContract:
    """Start token, stop tokens and chat template from everything that lies beside the model.

    Args:
        tokenizer: the opened tokenizer.
        checkpoint: files and settings found with the weights.
        config: the model's; its table size bounds every id.

    Raises:
        BadInputError: no stop token, an id outside the table, or contradicting sources.
        UnsupportedModelError: a template that cannot be translated, or a prompt start that the
            runtime cannot feed.
    """
    suppressed_tokens(tokenizer, config)
    texts = special_tokens(checkpoint.tokenizer_files, checkpoint.gguf_metadata, tokenizer)
    found = find_template(checkpoint.tokenizer_files, checkpoint.gguf_metadata)
    template = None if found is None else prepare_chat_template(found[0], texts)
    notes = [f"chat template from {found[1]}"] if found is not None else []
    if template is not None:
        notes.extend(template.notes)
        _check_matched(tokenizer, template)
    sources = stop_sources(tokenizer, checkpoint, config, texts, template)
    start, why = _start_token(tokenizer, checkpoint, texts)
    if start is not None and template is not None and _prints_first(tokenizer, template, start):
        start, why = None, f"the chat template prints the start token {start} itself"
    return PromptContract(
        start_token_id=start,
        stop_token_ids=tuple(sorted(sources)),
        stop_sources=dict(sorted(sources.items())),
        chat_template=None if template is None else template.source,
        original_template=None if template is None else template.original,
        notes=[*notes, f"start token: {why}"],
        prompts={} if template is None else template.prompts,
    )


def suppressed_tokens(tokenizer: Tokenizer, config: HermesConfig) -> tuple[int, ...]:
    """Rows of the model's table that no token of the tokenizer stands for, ascending.

    Raises:
        BadInputError: the tokenizer has ids beyond the table.
    """
    size, rows = tokenizer.vocab_size, config.vocab_size
    if size > rows:
        beyond = [f"{i}: {tokenizer.piece(i)!r}" for i in range(rows, size) if tokenizer.piece(i)]
        raise BadInputError(
            f"{tokenizer.origin}: has ids up to {size - 1}, the model's table has {rows} rows",
            problems=beyond[:10] + ([f"and {len(beyond) - 10} more"] if len(beyond) > 10 else []),
            expected="a tokenizer no larger than the table",
            todo="use the tokenizer that the model was trained with, or remove these tokens",
        )
    return tuple(range(size, rows))


def _check_matched(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Every special token that the template prints must be recognised as one in the text."""
    prompt = template.prompts.get("three turns", template.prompts.get("user", ""))
    ids = set(tokenizer.encode(prompt))
    problems = [
        f"{piece!r} (id {token_id})"
        for piece, token_id in tokenizer.special_pieces.items()
        if piece.strip() and piece in prompt and token_id not in ids
    ]
    if problems:
        raise UnsupportedModelError(
            "the chat template prints special tokens that this tokenizer file never recognises "
            "in text",
            problems=problems,
            todo="write a tokenizer.json with save_pretrained and put it beside the checkpoint",
        )


def _flags(checkpoint: PromptSources) -> dict[str, bool]:
    files, gguf = checkpoint.tokenizer_files, checkpoint.gguf_metadata or {}
    named: dict[str, object] = {}
    if "tokenizer_config.json" in files:
        settings = read_json_object(files["tokenizer_config.json"])
        named["tokenizer_config.json"] = settings.get("add_bos_token")
    named["tokenizer.ggml.add_bos_token"] = gguf.get("tokenizer.ggml.add_bos_token")
    named["generation_config.json"] = (checkpoint.generation_config or {}).get("add_bos_token")
    named["config"] = (checkpoint.config or {}).get("add_bos_token")
    return {origin: value for origin, value in named.items() if isinstance(value, bool)}


def _start_token(
    tokenizer: Tokenizer, checkpoint: PromptSources, texts: Mapping[str, str]
) -> tuple[int | None, str]:
    """The id that training put before every text, and how that is known."""
    flags, leading = _flags(checkpoint), tokenizer.leading_ids()
    if len(set(flags.values())) > 1:
        raise _contradiction([f"{origin}: add_bos_token {flag}" for origin, flag in flags.items()])
    flag = next(iter(flags.values()), None)
    origin = " and ".join(flags)
    if len(leading) > 1:
        raise UnsupportedModelError(
            f"{tokenizer.origin}: the post-processor puts {leading} before every text",
            expected="one start token; the runtime feeds no more",
        )
    if leading and flag is False:
        raise _contradiction(
            [f"{origin}: add_bos_token false", f"{tokenizer.origin}: puts {leading[0]} first"]
        )
    named = _begin_id(tokenizer, checkpoint, texts)
    if leading:
        if flag and named not in (None, leading[0]):
            raise _contradiction(
                [f"bos token is {named}", f"{tokenizer.origin}: puts {leading[0]} first"]
            )
        return leading[0], f"{leading[0]}, put first by the tokenizer's post-processor"
    if flag is None:
        return _start_by_convention(tokenizer, checkpoint, named)
    if not flag:
        return None, f"none ({origin}: add_bos_token false)"
    if named is None:
        raise BadInputError(
            f"{origin}: add_bos_token is true, but no bos token is known",
            todo="set bos_token in tokenizer_config.json or bos_token_id in config.json",
        )
    return named, f"{named} ({origin}: add_bos_token true)"


def _start_by_convention(
    tokenizer: Tokenizer, checkpoint: PromptSources, named: int | None
) -> tuple[int | None, str]:
    gguf = checkpoint.gguf_metadata or {}
    llama = (
        gguf.get("tokenizer.ggml.model") == "llama"
        or gguf.get("tokenizer.ggml.pre") in ("llama3", "llama-v3", "llama-bpe")
        or tokenizer.begin_id is not None
    )
    if llama and named is not None:
        return named, f"{named}, by the convention of Llama tokenizers; nothing says otherwise"
    return None, "none, since nothing beside the model asks for one"


def _begin_id(
    tokenizer: Tokenizer, checkpoint: PromptSources, texts: Mapping[str, str]
) -> int | None:
    if "bos_token" in texts:
        return tokenizer.token_id(texts["bos_token"])
    if tokenizer.begin_id is not None:
        return tokenizer.begin_id
    if tokenizer.kind == "sentencepiece":
        # A SentencePiece model trained without a begin symbol was fed without one.
        return None
    for settings in (checkpoint.generation_config, checkpoint.config):
        value = (settings or {}).get("bos_token_id")
        if isinstance(value, int) and 0 <= value < tokenizer.vocab_size:
            return value
    return None


def _prints_first(tokenizer: Tokenizer, template: ChatTemplate, start: int) -> bool:
    prompts = template.prompts.values()
    return any(prompt.startswith(tokenizer.piece(start)) for prompt in prompts)


def _contradiction(problems: list[str]) -> BadInputError:
    return BadInputError(
        "the sources disagree about a start token before every text",
        problems=problems,
        todo="keep the one that training used: set add_bos_token in all of them alike, or remove "
        "it from the tokenizer's post-processor",
    )
