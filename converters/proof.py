"""Climb the verification ladder with a finished bundle: every real runner, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from converters.bind import bind_weights
from converters.bundle import extract_section, read_bundle
from converters.graph import Graph
from converters.inspection import read_signatures
from converters.source import Source
from hermes.assets import assets_folder
from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import BadInputError
from hermes.parameters import parameter_shapes
from hermes.progress import OnProgress, Progress, silent
from hermes.recipe import QuantizationRule, Recipe
from hermes.rewrite import RewritableModel
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.runners.reference import ReferenceRunner
from hermes.signatures import build_signatures
from hermes.verify.golden import read_golden
from hermes.verify.ladder import Climb, LadderInput, climb
from hermes.verify.prompt import check_prompt
from hermes.verify.runtime import RuntimeData

if TYPE_CHECKING:
    from hermes.model import HermesForCausalLM
    from hermes.runners.exportable import ExportableRunner

FIRST_MESSAGE = "Name the capital of Italy."
NEW_TOKENS = 32


@dataclass(frozen=True)
class ProofOptions:
    """What the ladder is climbed with.

    Attributes:
        text: file of real text for the logit rungs; the shipped English text if None.
        golden: the training code's own logits, or None.
        threads: of the native kernels.
        localise: compare the caches of the float stages over the whole context.
    """

    text: Path | None = None
    golden: Path | None = None
    threads: int = 2
    localise: bool = False


def prove(
    source: Source,
    rewritten: RewritableModel,
    recipe: Recipe,
    graph: Graph,
    bundle: Path,
    work: Path,
    options: ProofOptions,
    on_progress: OnProgress = silent,
) -> Climb:
    """Compare each form of the model with the one before it.

    Args:
        source: the opened checkpoint, the ladder's foot.
        rewritten: its weights after the recipe's rewrites.
        recipe: limits and shapes of the bundle.
        graph: the weightless graph, to bind the float form from.
        bundle: the finished file.
        work: folder for the unpacked and the float model.
        options: texts and threads.
        on_progress: told which rung is running.
    """
    config = rewritten.config
    reason = too_big_for_float(config, available_memory())
    model, built = (None, None) if reason else _float_models(source, rewritten)
    opened = read_bundle(bundle)
    unpacked, floating = work / "unpacked.tflite", work / "float32.tflite"
    extract_section(opened, opened.section("TFLiteModel"), unpacked)
    if not reason:
        on_progress(Progress("binding the float form"))
        plain = replace(recipe, quantization=(QuantizationRule("*", "float32"),))
        bind_weights(graph.path, config, plain, rewritten.weights, floating)

    def exportable(form: HermesForCausalLM) -> ExportableRunner:
        from hermes.runners.exportable import ExportableRunner

        return ExportableRunner(config, recipe.export, recipe.graph, form.state_dict())

    def runtime() -> LiteRtLmRunner:
        return LiteRtLmRunner(bundle, threads=options.threads)

    given = LadderInput(
        limits=recipe.limits,
        text_ids=text_ids(
            source, options.text, max(recipe.export.context, recipe.limits.positions)
        ),
        mapped=source.mapped,
        source_keys=list(source.checkpoint.tensors),
        golden=None if options.golden is None else read_golden(options.golden),
        reference=_scorer(model, recipe),
        rewritten=_scorer(None if built is model else built, recipe),
        exportable=None if built is None else partial(exportable, built),
        float_flatbuffer=None if built is None else _opener(floating, options.threads),
        signatures=build_signatures(config, recipe.export.context, recipe.export.prefill),
        file_signatures=read_signatures(opened),
        flatbuffer=_opener(unpacked, options.threads),
        runtime=runtime,
        runtime_data=_runtime_data(source),
        tokenizer_rung=lambda: check_prompt(
            runtime,
            source.tokenizer,
            source.contract,
            source.suppressed,
            opened.prompt,
            recipe.export.context,
        ),
        localise=options.localise,
        reason=reason,
    )
    return climb(given, lambda rung, name: on_progress(Progress(f"rung {rung}: {name}")))


def _float_models(
    source: Source, rewritten: RewritableModel
) -> tuple[HermesForCausalLM, HermesForCausalLM]:
    """The reference, and the same with rewritten weights; one model twice without rewrites."""
    model = reference_model(source.mapped.config, source.mapped.weights)
    if not rewritten.done:
        return model, model
    return model, reference_model(rewritten.config, rewritten.weights)


def _scorer(model: HermesForCausalLM | None, recipe: Recipe) -> ReferenceRunner | None:
    return None if model is None else ReferenceRunner(model, recipe.export.prefill)


def _opener(path: Path, threads: int) -> Callable[[], FlatbufferRunner]:
    return lambda: FlatbufferRunner(path, threads=threads)


def available_memory() -> int:
    """Bytes that can be used without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def too_big_for_float(config: HermesConfig, available: int) -> str:
    """Why the rungs that hold a float model cannot run; empty if they can.

    The reference, its rewritten twin and the exportable module's fused copy are in memory together.
    """
    count = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    needed = 3 * 4 * count
    if needed <= available:
        return ""
    return (
        f"{count / 1e9:.2f} billion parameters need {needed / 1e9:.1f} GB in float32, "
        f"{available / 1e9:.1f} GB are free"
    )


def reference_model(config: HermesConfig, weights: Mapping[str, LazyTensor]) -> HermesForCausalLM:
    """The reference with these weights in float32, loaded strictly."""
    from hermes.model import build_model
    from hermes.parameters import EMBEDDING, HEAD

    state = {name: tensor.read().float() for name, tensor in weights.items()}
    if config.tie_embeddings:
        state[HEAD] = state[EMBEDDING]
    model = build_model(config)
    model.load_state_dict(state, strict=True)
    return model.eval()


def text_ids(source: Source, path: Path | None, count: int) -> list[int]:
    """At least `count` tokens of the text, as training fed them: with the start token in front.

    A text that is too short is repeated.
    """
    file = path or assets_folder() / "eval" / "english.txt"
    try:
        ids = source.tokenizer.encode(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file}: not readable as UTF-8 text: {error}") from error
    if not ids:
        raise BadInputError(f"{file}: an empty text", expected="some real text")
    start = source.contract.start_token_id
    ids = ids * -(-count // len(ids))
    return [*([] if start is None else [start]), *ids][:count]


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
