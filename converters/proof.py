"""Climb the verification ladder with a finished bundle: every real runner, in order."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from converters.bundle import Bundle, extract_section, read_bundle
from converters.float_models import FloatModels, open_float_models
from converters.inspection import read_signatures
from converters.integrity import hash_file
from converters.other_processor import Files, arm64_rung
from converters.rebind import rebind_floats
from converters.source import Source, read_text
from hermes.assets import assets_folder
from hermes.errors import HermesError
from hermes.progress import OnProgress, Progress, silent
from hermes.recipe import Recipe
from hermes.report.check import Check
from hermes.rewrite import RewritableModel
from hermes.runners.choice import RuntimeChoice
from hermes.runners.flatbuffer import LITERT, FlatbufferRunner, Interpreter
from hermes.runners.interpreters import interpreter_for
from hermes.runners.kept import Kept
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.signatures import build_signatures
from hermes.verify.golden import read_golden
from hermes.verify.ladder import Climb, LadderInput, Repeated, climb
from hermes.verify.limits import describe_limits
from hermes.verify.prompt import check_prompt
from hermes.verify.quantized import windows
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
    original = RewritableModel(source.mapped.config, source.mapped.weights)
    on_progress(Progress("reading the float models"))
    models = open_float_models(original, rewritten, recipe.export.prefill, options.memory)
    opened, unpacked = _unpack(bundle, work / "unpacked.tflite")
    floating = work / "float32.tflite" if ours and models.module is not None else None
    if floating is not None and models.module is not None:
        on_progress(Progress("writing the float form"))
        state = models.module.state_dict()
        rebind_floats(unpacked, rewritten.config, recipe.graph, state, floating)
    opener = _Opener(options.threads)
    with (
        Kept(lambda: LiteRtLmRunner(bundle, threads=options.threads)) as runtime,
        Kept(lambda: opener.flatbuffer(unpacked)) as flatbuffer,
    ):
        given = _float_rungs(source, rewritten, recipe, models, floating, opened, options, opener)
        given = replace(
            given,
            flatbuffer=flatbuffer.open,
            repeated=_repeated(interpreter, floating, unpacked, opener),
            runtime=runtime.open,
            runtime_data=_runtime_data(source),
            tokenizer_rung=lambda: _check_prompt(runtime, source, opened, recipe),
            reasons=_reasons(models, ours),
        )
        if options.runtime is RuntimeChoice.ARM64:
            files = Files(bundle, runtime.open, unpacked, flatbuffer.open, floating)
            ids, data = given.text_ids, _runtime_data(source)
            given = replace(given, device=arm64_rung(files, recipe, ids, data, options.threads))
        if models.module is not None:
            _begin_scoring(flatbuffer, given, ours)
        outcome = climb(given, lambda rung, name: on_progress(Progress(f"rung {rung}: {name}")))
    outcome.report.facts.update(
        text=_describe_text(text_file(options.text), len(given.text_ids)),
        limits=describe_limits(recipe.export.context, recipe.export.prefill),
    )
    return outcome


def _unpack(bundle: Path, target: Path) -> tuple[Bundle, Path]:
    opened = read_bundle(bundle)
    extract_section(opened, opened.section("TFLiteModel"), target)
    return opened, target


def _describe_text(path: Path, tokens: int) -> dict[str, str | int]:
    return {"file": path.name, "sha256": hash_file(path), "tokens": tokens}


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
        text_ids=text_ids(source, options.text, max(shapes.context, recipe.limits.positions)),
        mapped=source.mapped,
        source_keys=list(source.checkpoint.tensors),
        golden=None if options.golden is None else read_golden(options.golden),
        reference=models.reference,
        rewritten=models.rewritten,
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


def _begin_scoring(flatbuffer: Kept[FlatbufferRunner], given: LadderInput, ours: bool) -> None:
    """Let the child step through the text of rung 5 while this process computes rungs 1 to 3.

    The one waits for memory and the other for arithmetic. An error comes back in rung 5.
    """
    with suppress(HermesError), flatbuffer.open() as runner:
        positions = given.limits.positions if ours else len(given.text_ids)
        capacity = min(runner.capacity, given.reference.capacity if given.reference else 0)
        runner.score_ahead(windows(given.text_ids, positions, capacity)[0])


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
