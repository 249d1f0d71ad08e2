"""Climb the verification ladder with a finished bundle: every real runner, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from converters.bundle import Bundle, extract_section, read_bundle
from converters.bundle_reader import hash_file
from converters.float_models import (
    FloatModels,
    available_memory,
    open_float_models,
    too_big_for_float,
)
from converters.inspection import read_signatures
from converters.other_processor import Files, arm64_rung
from converters.rebind import rebind_floats
from converters.source import Source, read_text
from hermes.assets import assets_folder
from hermes.progress import OnProgress, Progress, silent
from hermes.recipe import ExportShapes, Recipe
from hermes.report.check import Check
from hermes.rewrite import RewritableModel
from hermes.rewrite.balance import VALUES
from hermes.runners.allocation import reused_memory
from hermes.runners.background import Background
from hermes.runners.choice import RuntimeChoice
from hermes.runners.cores import Cores, one_blas_thread
from hermes.runners.flatbuffer import LITERT, FlatbufferRunner, Interpreter
from hermes.runners.interpreters import interpreter_for
from hermes.runners.kept import Kept
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.signatures import build_signatures
from hermes.verify.golden import read_golden
from hermes.verify.ladder import Climb, climb
from hermes.verify.ladder_input import LadderInput, Repeated
from hermes.verify.limits import describe_limits
from hermes.verify.prompt import check_prompt
from hermes.verify.quantized import Stepped, step_through
from hermes.verify.runtime import RuntimeData

if TYPE_CHECKING:
    from hermes.runners.exportable import ExportableRunner

FIRST_MESSAGE = "Name the capital of Italy."
NEW_TOKENS = 32
FOREIGN = "another exporter made this bundle; rungs 5 to 7 judge it as a whole"


@dataclass(frozen=True)
class ProofOptions:
    """What the ladder is climbed with.

    Attributes:
        text: file of real text for the logit rungs; the shipped English text if None.
        golden: the training code's own logits, or None.
        threads: of the native kernels.
        localise: compare the caches of the float stages over the whole context.
        runtime: a second runtime that rungs are repeated with.
        memory: bytes that float models may use; what is free if None.
    """

    text: Path | None = None
    golden: Path | None = None
    threads: int = 2
    localise: bool = False
    runtime: RuntimeChoice = RuntimeChoice.LITERT
    memory: int | None = None


def prove(
    source: Source,
    rewritten: RewritableModel,
    recipe: Recipe,
    bundle: Path,
    work: Path,
    options: ProofOptions,
    on_progress: OnProgress = silent,
    *,
    ours: bool = True,
) -> Climb:
    """Compare each form of the model with the one before it.

    Args:
        source: the opened checkpoint, the ladder's foot.
        rewritten: its weights after the rewrites that went into the bundle.
        recipe: limits and shapes of the bundle.
        bundle: the finished file.
        work: folder for the unpacked and the float model.
        options: texts and threads.
        on_progress: told which rung is running.
        ours: Hermes made the bundle; the graph of another exporter's file is not taken apart.
    """
    interpreter = interpreter_for(options.runtime)
    opened, unpacked = _unpack(bundle, work / "unpacked.tflite")
    ids = text_ids(source, options.text, max(recipe.export.context, recipe.limits.positions))
    data = _runtime_data(source)
    memory = available_memory() if options.memory is None else options.memory
    whole = not too_big_for_float(rewritten.config, memory)
    cores = Cores(options.threads)
    opener = _Opener(cores.kernels if whole else options.threads)
    with (
        reused_memory(),
        one_blas_thread(),
        Kept(lambda: LiteRtLmRunner(bundle, threads=opener.threads)) as runtime,
        Kept(lambda: opener.flatbuffer(unpacked)) as flatbuffer,
        Background() as background,
    ):
        step = partial(_step, flatbuffer, ids, recipe, source, ours)
        stepped = background.begin(step) if whole else None
        models, floating = _float_forms(
            source, rewritten, recipe, unpacked if ours else None, work, memory, on_progress
        )
        given = replace(
            _float_rungs(source, rewritten, recipe, models, floating, opened, options, opener),
            text_ids=ids,
            flatbuffer=flatbuffer.open,
            repeated=_repeated(interpreter, floating, unpacked, opener),
            runtime=runtime.open,
            runtime_data=data,
            tokenizer_rung=lambda: _check_prompt(runtime, source, opened, recipe),
            reasons=_reasons(models, ours),
            stepped=stepped,
            background=background if whole else None,
        )
        files = Files(bundle, runtime.open, unpacked, flatbuffer.open, floating)
        if options.runtime is RuntimeChoice.ARM64:
            given = replace(given, device=arm64_rung(files, recipe, ids, data, options.threads))
        facts = _facts(text_file(options.text), len(ids), recipe.export)
        return _climb(given, facts, cores, background, on_progress)


def _climb(
    given: LadderInput,
    facts: Mapping[str, object],
    cores: Cores,
    background: Background,
    on_progress: OnProgress,
) -> Climb:
    """Climb with the cores that the work beside each rung leaves; the facts go into the report."""

    def announce(rung: int, name: str) -> None:
        on_progress(Progress(f"rung {rung}: {name}"))
        cores.settle(beside=background.busy)

    outcome = climb(given, announce)
    cores.settle(beside=False)
    outcome.report.facts.update(facts)
    return outcome


def _float_forms(
    source: Source,
    rewritten: RewritableModel,
    recipe: Recipe,
    unpacked: Path | None,
    work: Path,
    memory: int,
    on_progress: OnProgress,
) -> tuple[FloatModels, Path | None]:
    """The float models, and the float form of the bundle's own graph if there is one."""
    on_progress(Progress("reading the float models"))
    original = RewritableModel(source.mapped.config, source.mapped.weights)
    models = open_float_models(original, rewritten, recipe.export.prefill, memory)
    if unpacked is None or models.module is None:
        return models, None
    on_progress(Progress("writing the float form"))
    floating = work / "float32.tflite"
    state = models.module.state_dict()
    rebind_floats(unpacked, rewritten.config, recipe.graph, state, floating)
    return models, floating


def _step(
    flatbuffer: Kept[FlatbufferRunner],
    ids: Sequence[int],
    recipe: Recipe,
    source: Source,
    ours: bool,
) -> Stepped:
    """Rung 5's part that needs no float model, so that it runs while these are read."""
    capacity = source.mapped.config.max_seq_len
    positions, widths = recipe.limits.positions, recipe.graph.attention_widths
    with flatbuffer.open() as runner:
        return step_through(runner, ids, positions, capacity, prefills=not ours, widths=widths)


def _unpack(bundle: Path, target: Path) -> tuple[Bundle, Path]:
    opened = read_bundle(bundle)
    extract_section(opened, opened.section("TFLiteModel"), target)
    return opened, target


def _facts(text: Path, tokens: int, shapes: ExportShapes) -> dict[str, object]:
    """What was read, and how long a prompt may be."""
    return {
        "text": {"file": text.name, "sha256": hash_file(text), "tokens": tokens},
        "limits": describe_limits(shapes.context, shapes.prefill),
    }


@dataclass(frozen=True)
class _Opener:
    """Opens files with the threads of the run."""

    threads: int

    def flatbuffer(self, path: Path, interpreter: Interpreter = LITERT) -> FlatbufferRunner:
        return FlatbufferRunner(path, threads=self.threads, interpreter=interpreter)


def _float_rungs(
    source: Source,
    rewritten: RewritableModel,
    recipe: Recipe,
    models: FloatModels,
    floating: Path | None,
    opened: Bundle,
    options: ProofOptions,
    opener: _Opener,
) -> LadderInput:
    """Inputs of rungs 0 to 4."""
    shapes, config, module = recipe.export, rewritten.config, models.module

    def exportable() -> ExportableRunner:
        from hermes.runners.exportable import ExportableRunner

        state = {} if module is None else module.state_dict()
        return ExportableRunner(config, shapes, recipe.graph, state)

    def float_flatbuffer() -> AbstractContextManager[FlatbufferRunner]:
        return opener.flatbuffer(floating or Path())

    return LadderInput(
        limits=recipe.limits,
        mapped=source.mapped,
        source_keys=list(source.checkpoint.tensors),
        golden=None if options.golden is None else read_golden(options.golden),
        reference=models.reference,
        rewritten=models.rewritten,
        scaled_values=VALUES in rewritten.done,
        exportable=None if floating is None else exportable,
        float_flatbuffer=None if floating is None else float_flatbuffer,
        signatures=build_signatures(config, shapes.context, shapes.prefill),
        file_signatures=read_signatures(opened),
        localise=options.localise,
        widths=recipe.graph.attention_widths,
    )


def _repeated(
    interpreter: Interpreter, floating: Path | None, unpacked: Path, opener: _Opener
) -> Repeated | None:
    """Rungs 4 and 5 once more in a second interpreter, if one was asked for."""
    if interpreter is LITERT:
        return None
    return Repeated(
        interpreter.name,
        None if floating is None else lambda: opener.flatbuffer(floating, interpreter),
        lambda: opener.flatbuffer(unpacked, interpreter),
    )


def _check_prompt(
    runtime: Kept[LiteRtLmRunner], source: Source, opened: Bundle, recipe: Recipe
) -> list[Check]:
    return check_prompt(
        runtime.open,
        source.tokenizer,
        source.contract,
        source.suppressed,
        opened.prompt,
        recipe.export,
    )


def _reasons(models: FloatModels, ours: bool) -> dict[int, str]:
    """Why a rung's input is missing."""
    if not ours:
        return dict.fromkeys((2, 3, 4), FOREIGN)
    return dict.fromkeys((3, 4), models.reason) if models.reason else {}


def text_ids(source: Source, path: Path | None, count: int) -> list[int]:
    """At least `count` tokens of the text, as training fed them: with the start token in front.

    A text that is too short is repeated.
    """
    ids = read_text(text_file(path), source.tokenizer, count)
    start = source.contract.start_token_id
    return [*([] if start is None else [start]), *ids][:count]


def text_file(path: Path | None) -> Path:
    """The text of the logit rungs: the given one, or the shipped one."""
    return path or assets_folder() / "eval" / "english.txt"


def _runtime_data(source: Source) -> RuntimeData:
    prompts = (assets_folder() / "prompts.txt").read_text(encoding="utf-8").splitlines()
    contract = source.contract
    return RuntimeData(
        prompts=tuple(prompts),
        first_message=FIRST_MESSAGE if contract.chat_template else None,
        max_new_tokens=NEW_TOKENS,
        start_token=contract.start_token_id,
        stop_tokens=contract.stop_token_ids,
        suppressed=source.suppressed,
    )
