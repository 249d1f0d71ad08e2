"""Everything that is known about a model before any work: weights, tokenizer, prompt, recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hermes.assets import assets_folder
from hermes.checkpoint import Checkpoint, open_checkpoint
from hermes.errors import BadInputError, UsageError
from hermes.layouts import MappedModel, map_checkpoint
from hermes.layouts.registry import layout_named
from hermes.recipe import Recipe
from hermes.recipe_file import load_recipe
from hermes.rewrite import RewritableModel, rewrite_model
from hermes.tokenizer import (
    PromptContract,
    Tokenizer,
    open_tokenizer,
    prompt_contract,
    suppressed_tokens,
    tokenizer_files,
    tokenizer_from_gguf,
)


@dataclass(frozen=True)
class SourceOptions:
    """Where the model comes from.

    Attributes:
        checkpoint: file or folder.
        config: JSON file whose fields complete or override the checkpoint's own configuration.
        tokenizer: file or folder; what lies beside the checkpoint if None.
        layout: name of a layout, or `auto`.
        weights: which of several weight sets in one file, or None.
        calibration: text that recipes with calibration look at; the shipped one if None.
    """

    checkpoint: Path
    config: Path | None = None
    tokenizer: Path | None = None
    layout: str = "auto"
    weights: str | None = None
    calibration: Path | None = None


@dataclass(frozen=True)
class Source:
    """An opened model: nothing big is loaded yet."""

    checkpoint: Checkpoint
    mapped: MappedModel
    tokenizer: Tokenizer
    contract: PromptContract
    suppressed: tuple[int, ...]
    calibration: Path


def open_source(options: SourceOptions) -> Source:
    """Open, map and cross-check; raises before anything is built."""
    checkpoint, mapped = open_mapped(options)
    if options.tokenizer is not None:
        files = tokenizer_files(options.tokenizer)
        checkpoint = replace(checkpoint, tokenizer_files=files, gguf_metadata=None)
        tokenizer = open_tokenizer(files)
    elif checkpoint.gguf_metadata is not None:
        tokenizer = tokenizer_from_gguf(checkpoint.gguf_metadata)
    else:
        tokenizer = _tokenizer_beside(checkpoint)
    return Source(
        checkpoint,
        mapped,
        tokenizer,
        prompt_contract(tokenizer, checkpoint, mapped.config),
        suppressed_tokens(tokenizer, mapped.config),
        options.calibration or assets_folder() / "calibration.txt",
    )


def open_mapped(options: SourceOptions) -> tuple[Checkpoint, MappedModel]:
    """The weights alone, named as Hermes names them."""
    config = _read_config(options.config) if options.config is not None else None
    checkpoint = open_checkpoint(options.checkpoint, weights=options.weights)
    return checkpoint, map_checkpoint(checkpoint, layout=options.layout, config=config)


def choose_recipe(
    name: str, source: Source, context: int | None, prefill: tuple[int, ...]
) -> Recipe:
    """`recipe_for` the source's model."""
    return recipe_for(name, source.mapped, context, prefill)


def recipe_for(
    name: str, mapped: MappedModel, context: int | None, prefill: tuple[int, ...]
) -> Recipe:
    """The recipe with the shapes asked for.

    A recipe's own context is shortened to what the model was trained for; one that the user asks
    for beyond that is refused.
    """
    recipe = load_recipe(name)
    trained = mapped.config.max_seq_len
    if context is not None and context > trained:
        reason = layout_named(mapped.layout).past_training
        raise UsageError(
            f"--context {context} is longer than the {trained} positions the model was trained for",
            problems=[reason] if reason else [],
            expected=f"at most {trained}",
            todo="choose a shorter context",
        )
    if context is None:
        context = min(recipe.export.context, trained)
    return recipe.with_shapes(context, prefill)


def rewrite_source(source: Source, recipe: Recipe) -> RewritableModel:
    """The mapped model after the recipe's rewrites; still lazy."""
    sequences = calibration_sequences(source, recipe)
    model = rewrite_model(
        source.mapped.config, source.mapped.weights, recipe.rewrites, calibration=sequences
    )
    if not sequences:
        return model
    count = sum(len(ids) for ids in sequences)
    note = f"calibrated on {count} tokens of {source.calibration.name}"
    return replace(model, notes=(*model.notes, note))


def calibration_sequences(source: Source, recipe: Recipe) -> tuple[tuple[int, ...], ...]:
    """Pieces of the calibration text, each with the start token in front as training fed it."""
    wanted = recipe.calibration
    if not wanted.sequences:
        return ()
    start = source.contract.start_token_id
    front = () if start is None else (start,)
    length = min(wanted.tokens, source.mapped.config.max_seq_len)
    ids = read_text(source.calibration, source.tokenizer, wanted.sequences * length)
    pieces = (ids[at : at + length] for at in range(0, wanted.sequences * length, length))
    return tuple((*front, *piece)[:length] for piece in pieces)


def read_text(path: Path, tokenizer: Tokenizer, count: int) -> list[int]:
    """At least `count` tokens of a text, which is repeated if it is too short.

    Raises:
        BadInputError: not readable, not UTF-8, or empty.
    """
    try:
        ids = tokenizer.encode(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: not readable as UTF-8 text: {error}") from error
    if not ids:
        raise BadInputError(f"{path}: an empty text", expected="some real text")
    return ids * -(-count // len(ids))


def _tokenizer_beside(checkpoint: Checkpoint) -> Tokenizer:
    if not checkpoint.tokenizer_files:
        raise BadInputError(
            f"no tokenizer beside {checkpoint.path}",
            expected="tokenizer.json or tokenizer.model (SentencePiece) in the same folder",
            todo="pass it with --tokenizer FILE_OR_FOLDER",
        )
    return open_tokenizer(checkpoint.tokenizer_files)


def _read_config(path: Path) -> Mapping[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadInputError(f"{path}: holds a {type(values).__name__}", expected="a JSON object")
    return values
