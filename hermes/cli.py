"""The command line: parses, calls the converters, prints; exit codes are those of `errors`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes.errors import HermesError, UsageError

if TYPE_CHECKING:
    from converters.exchange import Exchanged
    from hermes.report.check import Report

app = typer.Typer(
    name="hermes",
    help="Training checkpoint in, checked LiteRT-LM bundle out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130
_given: ContextVar[tuple[str, ...]] = ContextVar("given", default=())
"""The command line, for the report: it names the command that repeats it."""

Checkpoint = Annotated[
    Path, typer.Argument(help="Checkpoint: .pt .pth .bin .ckpt .safetensors .gguf, or a folder.")
]
BundleFile = Annotated[Path, typer.Argument(help="A .litertlm file.")]
Config = Annotated[
    Path | None, typer.Option("--config", help="JSON with the model's configuration.")
]
TokenizerPath = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="tokenizer.json, tokenizer.model, or their folder."),
]
LayoutName = Annotated[str, typer.Option("--layout", help="Layout of the checkpoint, or auto.")]
Weights = Annotated[
    str | None, typer.Option("--weights", help="Which weight set of the file: ema, raw, or a key.")
]
RecipeName = Annotated[str, typer.Option("--recipe", help="int8, float32, or a .toml file.")]
Context = Annotated[int | None, typer.Option("--context", help="Slots of the KV cache.")]
Prefill = Annotated[
    list[int] | None, typer.Option("--prefill", help="Prefill length; repeat for a ladder.")
]
Golden = Annotated[
    Path | None,
    typer.Option("--golden", help="input_ids and logits of your training code (.npz .pt)."),
]
Text = Annotated[Path | None, typer.Option("--text", help="UTF-8 text for the logit rungs.")]
ReportFolder = Annotated[
    Path | None, typer.Option("--report", help="Folder for report.json and report.md.")
]
Threads = Annotated[int, typer.Option("--threads", help="Threads of the native kernels.", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


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
        source=SourceOptions(checkpoint, config, tokenizer, layout, weights),
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
        _show_report(error.report, report, as_json)
        raise
    _show_report(result, report, as_json)
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
    golden: Golden = None,
    text: Text = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="Folder to write to, or a report.json to compare with."),
    ] = None,
    localise: Annotated[
        bool, typer.Option("--localise", help="Compare every layer's cache over the context.")
    ] = False,
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

    source = SourceOptions(against, config, tokenizer, layout, weights)
    earlier = None
    if report is not None and report.suffix == ".json":
        earlier, report = Report.read(report), None
    proof = ProofOptions(text, golden, threads, localise)
    with ProgressDisplay(quiet=as_json) as progress:
        result, died = verify_bundle(bundle, source, recipe, proof, progress)
    _show_report(result, report, as_json)
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


@app.command("import")
def import_(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option("-o", "--output", help="The .safetensors to write.")],
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", help="Rows of the token tables afterwards.")
    ] = None,
    init_std: Annotated[
        float, typer.Option("--init-std", help="Standard deviation of new rows.", min=0.0)
    ] = 0.02,
    seed: Annotated[int, typer.Option("--seed", help="Of the new rows.", min=0)] = 0,
    config: Config = None,
    tokenizer: TokenizerPath = None,
    layout: LayoutName = "auto",
    weights: Weights = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Turn any checkpoint into a Hermes training checkpoint."""
    from converters.exchange import NewRows, import_checkpoint
    from converters.source import SourceOptions

    source = SourceOptions(checkpoint, config, tokenizer, layout, weights)
    rows = NewRows(vocab_size, init_std, seed)
    _show_exchange(import_checkpoint(source, output, rows, force=force), output.parent, as_json)


@app.command("export-hf")
def export_hf(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write.")],
    config: Config = None,
    tokenizer: TokenizerPath = None,
    layout: LayoutName = "auto",
    weights: Weights = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Turn any checkpoint into a folder that transformers opens."""
    from converters.exchange import export_huggingface
    from converters.source import SourceOptions

    source = SourceOptions(checkpoint, config, tokenizer, layout, weights)
    _show_exchange(export_huggingface(source, output, force=force), output, as_json)


def _show_exchange(done: Exchanged, folder: Path, as_json: bool) -> None:
    facts = done.facts(folder)
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        for line in value if isinstance(value, list) else [value]:
            print(f"{name.replace('_', ' ')}: {line}")


def _show_report(result: Report, folder: Path | None, as_json: bool) -> None:
    from hermes.report.tables import print_report
    from hermes.report.writers import write_report

    result.facts["command"] = shlex.join(["hermes", *_given.get()])
    if folder is not None:
        write_report(result, folder)
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    else:
        print_report(result)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `hermes` command."""
    # Threads that wait by spinning starve the child processes on a machine with few cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(run_command(app, arguments))


def run_command(command: Callable[..., Any], arguments: list[str] | None = None) -> int:
    """Run the typer app and turn every failure into one message and its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    _given.set(tuple(given))
    debug = "--debug" in given
    try:
        code = command(args=given, prog_name="hermes", standalone_mode=False)
        return int(code or 0)
    except HermesError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing was published", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if debug or not hasattr(error, "format_message"):
            raise
        # click's own usage errors carry a message and an exit code.
        print(f"error: {error.format_message()}", file=sys.stderr)
        return UsageError.exit_code


if __name__ == "__main__":
    main()
