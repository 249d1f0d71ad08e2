"""Commands about what quantization keeps of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hermes.cli.application import (
    AsJson,
    BundleFile,
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
        evaluator = Evaluator(source, evaluation_texts(text), positions)
        rows = evaluator.evaluate(bundle, threads=threads, on_progress=progress)
    facts = [row.to_dict() for row in rows]
    print(json.dumps({"texts": facts}) if as_json else "\n".join(fidelity_lines(facts)))
