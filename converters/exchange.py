"""A model in another form, with everything that its conversion needs: `import`, `export-hf`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from converters.publish import publish
from converters.publish_folder import publish_folder, staging_folder
from converters.source import Source, SourceOptions, open_mapped, open_source
from hermes.checkpoint import Checkpoint
from hermes.checkpoint.directory import TOKENIZER_FILES
from hermes.errors import HermesError, TargetError, UsageError, VerificationError
from hermes.layouts import MappedModel
from hermes.layouts.exchange import (
    extend_vocabulary,
    write_hermes_checkpoint,
    write_huggingface_model,
)
from hermes.parameters import EMBEDDING, HEAD, parameter_shapes
from hermes.tokenizer import tokenizer_files
from hermes.tokenizer.saving import copied_files, rebuilt_files
from hermes.tokenizer.template import special_tokens

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class NewRows:
    """A larger vocabulary.

    Attributes:
        vocab_size: rows of embedding and head afterwards; None keeps them.
        init_std: standard deviation of the new rows, drawn from a normal distribution.
        seed: of the draws.
    """

    vocab_size: int | None = None
    init_std: float = 0.02
    seed: int = 0


@dataclass(frozen=True)
class Exchanged:
    """What was written.

    Attributes:
        model: as mapped, with its new rows.
        files: names of the written files, the weights first.
        notes: what a careful reader should know.
    """

    model: MappedModel
    files: tuple[str, ...]
    notes: tuple[str, ...]

    def facts(self, folder: Path) -> dict[str, object]:
        """For printing: what was read, how large it is, what was written where."""
        shapes = parameter_shapes(self.model.config)
        total = sum(math.prod(shape) for shape in shapes.values())
        tables = sum(math.prod(shapes[name]) for name in (EMBEDDING, HEAD) if name in shapes)
        return {
            "layout": self.model.layout,
            "vocabulary": self.model.config.vocab_size,
            "parameters": total,
            "parameters_without_embeddings": total - tables,
            "written": [str(folder / name) for name in self.files],
            "ignored": [f"{name}: {reason}" for name, reason in self.model.ignored],
            "note": list(self.notes),
        }


def import_checkpoint(
    options: SourceOptions, target: Path, rows: NewRows | None = None, *, force: bool = False
) -> Exchanged:
    """Write a Hermes checkpoint and, beside it, its tokenizer and generation settings.

    The copy is opened again before anything is put in place: it must start, stop and render a
    conversation as the original does.

    Raises:
        TargetError: the target, or another file by the name of one beside it, exists.
        UsageError: a vocabulary smaller than the model's, or not the name of a safetensors file.
    """
    if target.suffix != SUFFIX:
        raise UsageError(
            f"the output is called {target.name}",
            expected=f"a name that ends in {SUFFIX}",
            todo=f"write to {target.with_suffix(SUFFIX).name}",
        )
    rows = rows or NewRows()
    place = Path(os.path.realpath(target))
    with (
        _files_placed(place.parent) as move,
        publish(target, force) as part,
        staging_folder(place) as stage,
    ):
        checkpoint, model = open_mapped(options)
        if rows.vocab_size is not None:
            model = extend_vocabulary(model, rows.vocab_size, rows.init_std, rows.seed)
        beside, original, notes = _prompt_files(options, checkpoint, model)
        _refuse_others(place.parent, beside, force)
        write_hermes_checkpoint(model, part)
        for name, data in beside.items():
            (stage / name).write_bytes(data)
        (stage / target.name).symlink_to(part)
        _compare(original, stage / target.name)
        move(
            stage, [name for name in beside if not _same_content(place.parent / name, beside[name])]
        )
    return Exchanged(model, (target.name, *beside), tuple(notes))


def export_huggingface(options: SourceOptions, target: Path, *, force: bool = False) -> Exchanged:
    """Write a folder that transformers opens, with tokenizer and generation settings.

    Raises:
        TargetError: the target exists.
        UnsupportedModelError: no transformers model computes this configuration.
    """
    with publish_folder(target, force) as folder:
        checkpoint, model = open_mapped(options)
        beside, original, notes = _prompt_files(options, checkpoint, model)
        write_huggingface_model(model, folder)
        for name, data in beside.items():
            (folder / name).write_bytes(data)
        _compare(original, folder)
    return Exchanged(model, ("model.safetensors", "config.json", *beside), tuple(notes))


def _prompt_files(
    options: SourceOptions, checkpoint: Checkpoint, model: MappedModel
) -> tuple[dict[str, bytes], Source | None, list[str]]:
    """Files to write beside the weights, the source as a conversion sees it, and notes."""
    notes = [*checkpoint.notes, *model.warnings]
    if options.tokenizer is not None:
        files = tokenizer_files(options.tokenizer)
        checkpoint = replace(checkpoint, tokenizer_files=files, gguf_metadata=None)
    if not checkpoint.tokenizer_files and checkpoint.gguf_metadata is None:
        notes.append("no tokenizer lies beside the source: none was written")
        return copied_files(checkpoint, model.config, None), None, notes
    try:
        source = open_source(options)
    except HermesError as error:
        notes.append(f"the tokenizer cannot be converted as it is: {error.found}")
        return copied_files(checkpoint, model.config, None), None, notes
    metadata = checkpoint.gguf_metadata
    if metadata is None:
        return copied_files(checkpoint, model.config, source.contract), source, notes
    texts = special_tokens({}, metadata, source.tokenizer)
    built = rebuilt_files(metadata, source.tokenizer, texts, model.config, source.contract)
    return built, source, notes


def _compare(original: Source | None, copy: Path) -> None:
    """The copy must mean the same to a conversion."""
    if original is None:
        return
    again = open_source(SourceOptions(copy))
    pairs = {
        "start token": (original.contract.start_token_id, again.contract.start_token_id),
        "stop tokens": (original.contract.stop_token_ids, again.contract.stop_token_ids),
        "chat template": (original.contract.chat_template, again.contract.chat_template),
        "tokenizer": (original.tokenizer.data, again.tokenizer.data),
    }
    wrong = [
        f"{name}: {str(first)[:60]!r} became {str(second)[:60]!r}"
        for name, (first, second) in pairs.items()
        if first != second
    ]
    if wrong:
        raise VerificationError(
            "the written files would start, stop or render prompts differently",
            problems=wrong,
            todo="this is a defect of Hermes: please report it; nothing was written",
        )


def _refuse_others(folder: Path, files: Mapping[str, bytes], force: bool) -> None:
    """Files of another model beside the target are not replaced unasked, and never mixed in."""
    known = (*TOKENIZER_FILES, "generation_config.json")
    surplus = [name for name in known if name not in files and (folder / name).exists()]
    others = [
        name
        for name, data in files.items()
        if (folder / name).exists() and not _same_content(folder / name, data)
    ]
    if surplus or (others and not force):
        raise TargetError(
            f"{folder}: holds the files of another model",
            problems=[*others, *(f"{name}, which this model does not have" for name in surplus)],
            expected="a folder without them, or with the same content",
            todo="choose a folder of its own"
            + ("" if surplus else ", or replace them with --force"),
        )


def _same_content(path: Path, data: bytes) -> bool:
    """Equal bytes, or JSON that says the same in another format; such a file is left alone."""
    if not path.is_file():
        return False
    found = path.read_bytes()
    if found == data or path.suffix != ".json":
        return found == data
    try:
        return bool(json.loads(found) == json.loads(data))
    except (ValueError, RecursionError):
        return False


@contextmanager
def _files_placed(folder: Path) -> Iterator[Callable[[Path, Iterable[str]], None]]:
    """Gives a function that moves staged files into the folder; a failure brings the old back."""
    before: dict[str, bytes | None] = {}

    def place(stage: Path, names: Iterable[str]) -> None:
        for name in names:
            target = folder / name
            before[name] = target.read_bytes() if target.exists() else None
            try:
                os.replace(stage / name, target)
            except OSError as error:
                raise TargetError(f"{target}: cannot be replaced: {error.strerror}") from error

    try:
        yield place
    except BaseException:
        for name, old in before.items():
            if old is None:
                (folder / name).unlink(missing_ok=True)
            else:
                (folder / name).write_bytes(old)
        raise
