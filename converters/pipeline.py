"""From a checkpoint to a published bundle: the arrows of the design, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import hermes
from converters.bind import BoundWeight, bind_weights
from converters.bundle import (
    Bundle,
    BundleSpec,
    Section,
    begin_bundle,
    disk_errors,
    finish_bundle,
    write_bundle,
)
from converters.graph import Graph, graph_folder, obtain_graph
from converters.inputs import HashedFiles, hashed_files
from converters.machine import describe_machine
from converters.planning import Plan, make_plan
from converters.proof import ProofOptions, prove
from converters.publish import publish
from converters.seal import REPORT_KEY, hash_file, input_hashes, seal
from converters.source import (
    Source,
    SourceOptions,
    choose_recipe,
    open_source,
    rewrite_source,
)
from converters.work import FinishedModel, WorkFolder, clean, work_folder, work_key
from hermes.config import HermesConfig
from hermes.deploy.card import BLANK_CARD, CARD_KEY, card_path, write_card
from hermes.errors import UsageError, VerificationError
from hermes.progress import OnProgress, Progress, silent
from hermes.recipe import Recipe
from hermes.recipe_file import recipe_text
from hermes.report.check import RUNG_NAMES, Report
from hermes.report.comparison import UNVERIFIED
from hermes.rewrite import RewritableModel
from hermes.runners.worker import peak_memory
from hermes.signatures import graph_weights

RECIPE_KEY = "hermes_recipe"
RECIPE_TEXT_KEY = "hermes_recipe_toml"
"""The whole recipe: a later Hermes verifies the bundle with the rewrites that it was made with."""
SUFFIX = ".litertlm"


@dataclass(frozen=True)
class ConvertOptions:
    """One conversion.

    Attributes:
        source: where the model comes from.
        target: the bundle to write.
        recipe: name or TOML file.
        context: slots of the cache; the recipe's if None.
        prefill: prefill lengths; the recipe's if empty.
        force: replace an existing bundle.
        verify: climb the ladder before publishing.
        keep_graph: use and fill the cache of graphs.
        resume: take over what an earlier run of the same conversion has finished.
        proof: texts and threads of the ladder.
    """

    source: SourceOptions
    target: Path
    recipe: str = "int8"
    context: int | None = None
    prefill: tuple[int, ...] = ()
    force: bool = False
    verify: bool = True
    keep_graph: bool = True
    resume: bool = False
    proof: ProofOptions = field(default_factory=ProofOptions)


@dataclass
class Stages:
    """Wall time of each stage, seconds."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to the stage's."""
        started = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - started
            self.seconds[name] = round(self.seconds.get(name, 0.0) + spent, 3)


def convert(options: ConvertOptions, on_progress: OnProgress = silent) -> Report:
    """Build, prove and publish the bundle.

    Returns:
        The report of a published bundle.

    Raises:
        VerificationError: a rung is red; nothing is published. The report is its `report`.
        HermesError: anything else that stops the conversion; nothing is published.
    """
    _check_name(options.target)
    stages = Stages()
    with publish(options.target, options.force) as part, ExitStack() as held:
        with stages.timed("open"):
            on_progress(Progress("opening the checkpoint"))
            files = held.enter_context(hashed_files(options.source.checkpoint))
            source = open_source(options.source)
            recipe = choose_recipe(options.recipe, source, options.context, options.prefill)
            plan = _plan(source, recipe, options)
            rewritten = rewrite_source(source, recipe)
            if not options.resume:
                # While files are hashed and the graph is made there is a core to spare.
                rewritten.begin_inputs()
            key = work_key(options.source, source, rewritten, recipe, files)
            clean(keep=key)
            work = held.enter_context(work_folder(key))
        place = _Place(part, work, files, stages, on_progress)
        graph, model, bundle = _build(source, rewritten, recipe, options, place)
        report = Report()
        if options.verify:
            with stages.timed("verify"):
                outcome = prove(
                    source, rewritten, recipe, part, work.path, options.proof, on_progress
                )
            report = outcome.report
        peak = max(peak_memory(), graph.peak_memory)
        report.facts.update(
            describe_source(source, files.digest),
            recipe=recipe.to_dict(),
            graph=_describe_graph(graph),
            rewrites={"done": list(rewritten.done), "notes": list(rewritten.notes)},
            weights=_summary(model.weights),
            bundle=_describe_bundle(bundle, options.target),
            seconds=stages.seconds,
            peak_memory=peak,
            cost=_cost(plan, part, stages, peak),
            machine=describe_machine(),
        )
        if options.verify:
            if outcome.died is not None:
                raise outcome.died
            raise_if_red(report)
        else:
            report.facts["unverified"] = True
        card = seal(part, report)
        # Until the new card is written there is none: an old one would speak of another file.
        card_path(options.target).unlink(missing_ok=True)
    write_card(options.target, card)
    return report


def _describe_graph(graph: Graph) -> dict[str, Any]:
    return {
        "made": graph.made,
        "reason": graph.reason,
        "tracer": graph.tracer,
        "lengths": graph.lengths,
        "seconds": round(graph.seconds, 3),
    }


def _check_name(target: Path) -> None:
    if target.suffix != SUFFIX:
        raise UsageError(
            f"the output is called {target.name}",
            expected=f"a name that ends in {SUFFIX}: LiteRT-LM recognises the file by it",
            todo=f"write to {target.with_suffix(SUFFIX).name}",
        )


def raise_if_red(report: Report) -> None:
    """End with exit code 6 if a check is red."""
    if not report.passed:
        raise RedReportError(report)


class RedReportError(VerificationError):
    """A red rung, with the whole report."""

    def __init__(self, report: Report) -> None:
        self.report = report
        red = [check for check in report.checks if not check.passed]
        super().__init__(
            report.verdict,
            problems=[
                f"rung {c.rung}: {c.name}: {c.value} (limit {c.limit}) {c.detail}" for c in red[:10]
            ],
            todo=f"{_cause(report)}; nothing was published",
        )


@dataclass
class _Place:
    """Where a conversion works: the bundle on its way, its folder, its inputs, who is told."""

    part: Path
    work: WorkFolder
    files: HashedFiles
    stages: Stages
    on_progress: OnProgress


def _cause(report: Report) -> str:
    """The last line of a red ladder."""
    red = report.first_red
    if red is None:
        return "no check was made"
    return f"look at rung {red.rung} ({RUNG_NAMES[red.rung]}): the lowest red one is the cause"


def _build(
    source: Source,
    rewritten: RewritableModel,
    recipe: Recipe,
    options: ConvertOptions,
    place: _Place,
) -> tuple[Graph, FinishedModel, Bundle]:
    """Graph, weights, bundle."""
    config, work = rewritten.config, place.work
    with place.stages.timed("graph"):
        place.on_progress(Progress("making the graph"))
        graph = obtain_graph(
            config, recipe.export, recipe.graph, work.path, keep=options.keep_graph
        )
    spec = BundleSpec(
        model=work.model,
        tokenizer=source.tokenizer,
        contract=source.contract,
        max_num_tokens=recipe.export.context,
        metadata={
            "hermes_version": hermes.__version__,
            RECIPE_KEY: recipe.name,
            RECIPE_TEXT_KEY: recipe_text(recipe),
            REPORT_KEY: UNVERIFIED,
            CARD_KEY: BLANK_CARD,
        },
        suppress_tokens=source.suppressed,
    )
    model = work.finished_model() if options.resume else None
    if model is not None:
        with place.stages.timed("bundle"):
            place.on_progress(Progress("writing the bundle"))
            return graph, model, write_bundle(_with_model(spec, model), place.part)
    with place.stages.timed("weights"):
        work.forget_model()
        # The weights go to where the bundle has them.
        offset = begin_bundle(spec, place.part)
        with disk_errors(place.part):
            bound = bind_weights(
                graph.path,
                config,
                recipe,
                rewritten.weights,
                place.part,
                _watch_weights(config, recipe, place.on_progress),
                inputs=rewritten.inputs,
                headers=graph_folder() if options.keep_graph else None,
                offset=offset,
            )
        place.files.demand_unchanged()
    with place.stages.timed("bundle"):
        place.on_progress(Progress("writing the bundle"))
        model = work.finish_model(bound, place.part, offset)
        return graph, model, finish_bundle(_with_model(spec, model), place.part)


def _with_model(spec: BundleSpec, model: FinishedModel) -> BundleSpec:
    return replace(spec, model_sha256=model.sha256, model_offset=model.offset)


def _watch_weights(
    config: HermesConfig, recipe: Recipe, on_progress: OnProgress
) -> Callable[[str, int], None]:
    """Counts tensors and stored bytes as they are written."""
    total = sum(w.kind != "bias" for w in graph_weights(config, recipe.graph))
    done = size = 0

    def on_weight(name: str, stored: int) -> None:
        nonlocal done, size
        done, size = done + 1, size + stored
        on_progress(Progress("writing the weights", done, total, "tensors", name, size))

    return on_weight


def _plan(source: Source, recipe: Recipe, options: ConvertOptions) -> Plan:
    """The prediction; raises before any work where the machine cannot do it."""
    mapped = source.mapped
    plan = make_plan(
        mapped.config,
        mapped.weights,
        recipe,
        verify=options.verify,
        keep_graph=options.keep_graph,
    )
    plan.require(options.target.parent)
    return plan


def _cost(plan: Plan, part: Path, stages: Stages, peak: int) -> dict[str, dict[str, float]]:
    """Prediction beside measurement; what only a phone can measure has a prediction alone."""
    predicted = plan.cost.to_dict()
    measured = {
        "peak_memory": peak,
        "seconds": round(sum(stages.seconds.values()), 1),
        "bundle_bytes": part.stat().st_size,
    }
    return {
        name: {"predicted": value, **({"measured": measured[name]} if name in measured else {})}
        for name, value in predicted.items()
    }


def describe_source(source: Source, digest: Callable[[Path], str] = hash_file) -> dict[str, Any]:
    """Facts about the checkpoint for the report; `digest` gives a file's SHA-256."""
    mapped, contract = source.mapped, source.contract
    return {
        "checkpoint": str(source.checkpoint.path),
        "inputs": input_hashes(source, digest),
        "layout": {"name": mapped.layout, "evidence": mapped.evidence},
        "config": {
            name: {"value": value, "source": mapped.config_sources.get(name, "")}
            for name, value in mapped.config.to_dict().items()
        },
        "keys": {
            "used": len(mapped.used),
            "ignored": [list(entry) for entry in mapped.ignored],
            "warnings": mapped.warnings,
            "notes": source.checkpoint.notes,
        },
        "prompt": {
            "tokenizer": source.tokenizer.kind,
            "start_token": contract.start_token_id,
            "stop_tokens": {str(token): names for token, names in contract.stop_sources.items()},
            "suppressed": len(source.suppressed),
            "notes": contract.notes,
        },
    }


def _summary(bound: tuple[BoundWeight, ...]) -> dict[str, dict[str, int]]:
    """Stored form -> number of weights and bytes."""
    groups: dict[str, dict[str, int]] = {}
    for weight in bound:
        whole = weight.stored == "float32"
        stored = weight.stored if whole else f"{weight.stored} per {weight.granularity}"
        group = groups.setdefault(stored, {"weights": 0, "bytes": 0})
        group["weights"] += 1
        group["bytes"] += weight.size
    return groups


def _describe_bundle(bundle: Bundle, target: Path) -> dict[str, Any]:
    """As published; the hash of the whole file follows when the report is sealed into it."""
    return {
        "path": str(target),
        "bytes": bundle.size,
        "sha256": "",
        "sections": [_section(section) for section in bundle.sections],
    }


def _section(section: Section) -> dict[str, Any]:
    return {k: v for k, v in asdict(section).items() if k != "entries"}
