"""Which tokens end an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from hermes.config import HermesConfig
from hermes.errors import BadInputError
from hermes.tokenizer.interface import Tokenizer
from hermes.tokenizer.template import ChatTemplate


class PromptSources(Protocol):
    """The parts of a `hermes.checkpoint.Checkpoint` that speak about prompts."""

    @property
    def config(self) -> Mapping[str, object] | None: ...
    @property
    def generation_config(self) -> Mapping[str, object] | None: ...
    @property
    def tokenizer_files(self) -> Mapping[str, Path]: ...
    @property
    def gguf_metadata(self) -> Mapping[str, object] | None: ...


def stop_sources(
    tokenizer: Tokenizer,
    checkpoint: PromptSources,
    config: HermesConfig,
    texts: Mapping[str, str],
    template: ChatTemplate | None,
) -> dict[int, list[str]]:
    """Every id that ends an answer, with everything that names it.

    The union of generation_config, config, tokenizer and GGUF metadata, and what the template
    prints after an answer: a model ends its turn with any of them.

    Args:
        texts: the special tokens of `special_tokens`.

    Raises:
        BadInputError: no ender at all, or one that the model cannot emit.
    """
    found: dict[int, list[str]] = {}
    problems = []
    for origin, value in _named_enders(tokenizer, checkpoint, config, texts, template):
        for token_id in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                problems.append(f"{origin}: {token_id!r} is not a token id")
            elif not 0 <= token_id < min(config.vocab_size, tokenizer.vocab_size):
                problems.append(f"{origin}: id {token_id}")
            elif origin not in found.setdefault(token_id, []):
                found[token_id].append(origin)
    if problems:
        raise BadInputError(
            "stop tokens that the model cannot emit",
            problems=problems,
            expected=f"ids below {min(config.vocab_size, tokenizer.vocab_size)}: the table has "
            f"{config.vocab_size} rows, the tokenizer {tokenizer.vocab_size} ids",
            todo="correct eos_token_id in these files",
        )
    if not found:
        raise BadInputError(
            "no stop token is known, and the runtime needs one",
            expected="eos_token_id in generation_config.json or config.json, or eos_token in "
            "tokenizer_config.json",
            todo="add one of them beside the checkpoint, or pass a config with eos_token_id",
        )
    return found


def _named_enders(
    tokenizer: Tokenizer,
    checkpoint: PromptSources,
    config: HermesConfig,
    texts: Mapping[str, str],
    template: ChatTemplate | None,
) -> Iterator[tuple[str, object]]:
    """Everything that names an end, None left out."""
    gguf = checkpoint.gguf_metadata or {}
    named: list[tuple[str, object]] = [
        ("generation_config.json", (checkpoint.generation_config or {}).get("eos_token_id")),
        ("config", (checkpoint.config or {}).get("eos_token_id")),
        ("config", config.eos_token_id),
        ("tokenizer", tokenizer.end_id),
    ]
    if "eos_token" in texts:
        token_id = tokenizer.token_id(texts["eos_token"])
        if token_id is None:
            raise BadInputError(
                f"the tokenizer's eos_token {texts['eos_token']!r} is not in its vocabulary",
                todo="correct eos_token in tokenizer_config.json",
            )
        named.append(("tokenizer", token_id))
    named.extend(
        (f"tokenizer.ggml.{key}_token_id", gguf.get(f"tokenizer.ggml.{key}_token_id"))
        for key in ("eos", "eot", "eom")
    )
    if template is not None:
        named.append(("chat template", _turn_end(tokenizer, template)))
    for origin, value in named:
        if value is not None:
            yield origin, value


def _turn_end(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """The special token that the template prints after an answer, if it is one."""
    tail = template.turn_end.lstrip()
    matching = [piece for piece in tokenizer.special_pieces if piece and tail.startswith(piece)]
    return tokenizer.special_pieces[max(matching, key=len)] if matching else None
