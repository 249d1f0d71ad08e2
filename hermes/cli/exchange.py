"""Commands that turn a checkpoint into another kind of checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hermes.cli.application import (
    AsJson,
    Checkpoint,
    Config,
    Debug,
    LayoutName,
    TokenizerPath,
    Weights,
    app,
)

if TYPE_CHECKING:
    from converters.exchange import Exchanged


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
