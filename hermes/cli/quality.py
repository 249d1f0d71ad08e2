"""Commands about what quantization keeps of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hermes.cli.application import (
    AsJson,
    BundleFile,
    CalibrationText,
    Checkpoint,
    Config,
    Debug,
    LayoutName,
    Threads,
    TokenizerPath,
    Weights,
    app,
)

Against = Annotated[Path, typer.Option("--against", help="The checkpoint it was made from.")]
Texts = Annotated[list[Path] | None, typer.Option("--text", help="UTF-8 text; repeat for several.")]
Positions = Annotated[int, typer.Option("--positions", help="Tokens of each text.", min=2)]


@app.command("eval")
def evaluate(
    bundle: BundleFile,
    against: Against,
    text: Texts = None,
    positions: Positions = 1024,
    config: Config = None,
    tokenizer: TokenizerPath = None,
    layout: LayoutName = "auto",
    weights: Weights = None,
    threads: Threads = 2,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare a bundle with its float model on texts: KL, top-1, perplexity; no limits."""
    from converters.evaluation import Evaluator, evaluation_texts
    from converters.source import SourceOptions, open_source
    from hermes.report.fidelity_table import fidelity_lines
    from hermes.terminal import ProgressDisplay

    source = open_source(SourceOptions(against, config, tokenizer, layout, weights))
    with ProgressDisplay(quiet=as_json) as progress:
        evaluator = Evaluator(source, evaluation_texts(text), positions, progress)
        rows = evaluator.evaluate(bundle, threads=threads, on_progress=progress)
    facts = [row.to_dict() for row in rows]
    print(json.dumps({"texts": facts}) if as_json else "\n".join(fidelity_lines(facts)))


@app.command()
def tune(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option("-o", "--output", help="The recipe to write, .toml.")],
    budget: Annotated[
        str | None, typer.Option("--budget", help="KL=X: mean KL to the float model, in nats.")
    ] = None,
    size: Annotated[
        str | None, typer.Option("--bytes", help="Bytes of all matrices: 90000000 or 90MB.")
    ] = None,
    base: Annotated[str, typer.Option("--base", help="Recipe to start from.")] = "int8",
    calibration: CalibrationText = None,
    positions: Positions = 256,
    config: Config = None,
    tokenizer: TokenizerPath = None,
    layout: LayoutName = "auto",
    weights: Weights = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing recipe.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Find the cheapest storage of every matmul within a budget; writes a recipe."""
    from converters.budget import parse_budget
    from converters.source import SourceOptions
    from converters.tuning import TuneOptions, tune_checkpoint
    from hermes.report.tuning_table import tuning_lines
    from hermes.terminal import ProgressDisplay

    source = SourceOptions(checkpoint, config, tokenizer, layout, weights, calibration)
    wanted = parse_budget(budget, size)
    options = TuneOptions(source, base, wanted, positions, output, force)
    with ProgressDisplay(quiet=as_json) as progress:
        facts = {"recipe": str(output), **tune_checkpoint(options, progress).facts()}
    print(json.dumps(facts) if as_json else "\n".join(tuning_lines(facts)))
