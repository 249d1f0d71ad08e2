"""Climb the verification ladder with a finished bundle: every real runner, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    model = reference_model(source.mapped.config, source.mapped.weights)
    config = rewritten.config
    built = reference_model(config, rewritten.weights) if rewritten.done else model
    opened = read_bundle(bundle)
    unpacked, floating = work / "unpacked.tflite", work / "float32.tflite"
    extract_section(opened, opened.section("TFLiteModel"), unpacked)
    on_progress(Progress("binding the float form"))
    plain = replace(recipe, quantization=(QuantizationRule("*", "float32"),))
    bind_weights(graph.path, config, plain, rewritten.weights, floating)

    def exportable() -> ExportableRunner:
        from hermes.runners.exportable import ExportableRunner

        return ExportableRunner(config, recipe.export, recipe.graph, built.state_dict())

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
        reference=ReferenceRunner(model, recipe.export.prefill),
        rewritten=ReferenceRunner(built, recipe.export.prefill) if rewritten.done else None,
        exportable=exportable,
        float_flatbuffer=lambda: FlatbufferRunner(floating, threads=options.threads),
        signatures=build_signatures(config, recipe.export.context, recipe.export.prefill),
        file_signatures=read_signatures(opened),
        flatbuffer=lambda: FlatbufferRunner(unpacked, threads=options.threads),
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
    )
    return climb(given, lambda rung, name: on_progress(Progress(f"rung {rung}: {name}")))


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
