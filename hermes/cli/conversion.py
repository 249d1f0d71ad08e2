"""Commands that make a bundle, prove it and look into it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hermes.cli.application import (
    AsJson,
    BundleFile,
    CalibrationText,
    Checkpoint,
    Config,
    Context,
    Debug,
    Golden,
    LayoutName,
    Prefill,
    RecipeName,
    ReportFolder,
    Text,
    Threads,
    TokenizerPath,
    Weights,
    app,
    show_report,
)
from hermes.runners.choice import RuntimeChoice


@app.command()
def convert(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option("-o", "--output", help="The bundle to write.")],
    config: Config = None,
    tokenizer: TokenizerPath = None,
    layout: LayoutName = "auto",
    weights: Weights = None,
    recipe: RecipeName = "int8",
    context: Context = None,
    prefill: Prefill = None,
    calibration: CalibrationText = None,
    golden: Golden = None,
    text: Text = None,
    report: ReportFolder = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Take over what an earlier, same run has finished.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Publish without climbing the ladder.")
    ] = False,
    threads: Threads = 2,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Turn a training checkpoint into a verified .litertlm bundle."""
    from converters.pipeline import ConvertOptions, RedReportError
    from converters.pipeline import convert as run
    from converters.proof import ProofOptions
    from converters.source import SourceOptions
    from hermes.terminal import ProgressDisplay

    options = ConvertOptions(
        source=SourceOptions(checkpoint, config, tokenizer, layout, weights, calibration),
        target=output,
        recipe=recipe,
        context=context,
        prefill=tuple(prefill or ()),
        force=force,
        resume=resume,
        verify=not no_verify,
        proof=ProofOptions(text, golden, threads),
    )
    try:
        with ProgressDisplay(quiet=as_json) as progress:
            result = run(options, progress)
    except RedReportError as error:
        show_report(error.report, report, as_json)
        raise
    show_report(result, report, as_json)
    if no_verify:
        print("WARNING: this bundle was NOT VERIFIED (--no-verify)", file=sys.stderr)


@app.command()
def plan(
    checkpoint: Checkpoint,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where the bundle would go.")
    ] = Path("model.litertlm"),
    config: Config = None,
    layout: LayoutName = "auto",
    weights: Weights = None,
    recipe: RecipeName = "int8",
    context: Context = None,
    prefill: Prefill = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Plan without the ladder.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what a conversion would do and cost; exit code 5 if this machine cannot do it."""
    from converters.planning import describe_plan
    from converters.source import SourceOptions
    from hermes.report.plan_table import plan_lines

    source = SourceOptions(checkpoint, config, None, layout, weights)
    facts, planned = describe_plan(
        source, recipe, context, tuple(prefill or ()), verify=not no_verify, folder=output.parent
    )
    print(json.dumps(facts) if as_json else "\n".join(plan_lines(facts)))
    planned.require(output.parent)


@app.command()
def verify(
    bundle: BundleFile,
    against: Annotated[Path, typer.Option("--against", help="The checkpoint it was made from.")],
    config: Config = None,
    tokenizer: TokenizerPath = None,
    layout: LayoutName = "auto",
    weights: Weights = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Whose limits to hold; else the bundle's own.")
    ] = None,
    calibration: CalibrationText = None,
    golden: Golden = None,
    text: Text = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Folder to write to, or a report.json to compare with."),
    ] = None,
    localise: Annotated[
        bool, typer.Option("--localise", help="Compare every layer's cache over the context.")
    ] = False,
    runtime: Annotated[
        RuntimeChoice,
        typer.Option("--runtime", help="tensorflow repeats rungs 4 and 5, arm64 adds rung 8."),
    ] = RuntimeChoice.LITERT,
    threads: Threads = 2,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Climb the ladder with a finished bundle."""
    from converters.pipeline import raise_if_red
    from converters.proof import ProofOptions
    from converters.seal import demand_same
    from converters.source import SourceOptions
    from converters.verification import verify_bundle
    from hermes.report.check import Report
    from hermes.report.comparison import shifts
    from hermes.terminal import ProgressDisplay

    source = SourceOptions(against, config, tokenizer, layout, weights, calibration)
    earlier = None
    if report is not None and report.suffix == ".json":
        earlier, report = Report.read(report), None
    proof = ProofOptions(text, golden, threads, localise, runtime)
    with ProgressDisplay(quiet=as_json) as progress:
        result, died = verify_bundle(bundle, source, recipe, proof, progress)
    show_report(result, report, as_json)
    if died is not None:
        raise died
    if earlier is not None:
        for line in shifts(earlier, result):
            print(f"moved: {line}", file=sys.stderr)
        demand_same(bundle, earlier, result)
    raise_if_red(result)


@app.command()
def clean(debug: Debug = False) -> None:
    """Remove kept graphs and the work folders that no run uses."""
    from converters.work import clean as run
    from hermes.report.wording import size

    print(f"{size(run(graphs=True))} freed")


@app.command()
def inspect(bundle: BundleFile, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show a bundle's sections, prompt metadata, signatures and quantization."""
    from converters.inspection import inspect_bundle
    from hermes.report.tables import print_inspection

    facts = inspect_bundle(bundle)
    if as_json:
        print(json.dumps(facts))
    else:
        print_inspection(facts)
