"""What every command shares: the application, its option types, and how reports are shown."""

from __future__ import annotations

import json
import shlex
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hermes.report.check import Report

app = typer.Typer(
    name="hermes",
    help="Training checkpoint in, checked LiteRT-LM bundle out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
given: ContextVar[tuple[str, ...]] = ContextVar("given", default=())
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
RecipeName = Annotated[
    str, typer.Option("--recipe", help="A name (see assets/recipes) or a .toml file.")
]
Context = Annotated[int | None, typer.Option("--context", help="Slots of the KV cache.")]
Prefill = Annotated[
    list[int] | None, typer.Option("--prefill", help="Prefill length; repeat for a ladder.")
]
Golden = Annotated[
    Path | None,
    typer.Option("--golden", help="input_ids and logits of your training code (.npz .pt)."),
]
Text = Annotated[Path | None, typer.Option("--text", help="UTF-8 text for the logit rungs.")]
CalibrationText = Annotated[
    Path | None,
    typer.Option("--calibration", help="UTF-8 text that a calibrated recipe looks at."),
]
ReportFolder = Annotated[
    Path | None, typer.Option("--report", help="Folder for report.json and report.md.")
]
Threads = Annotated[int, typer.Option("--threads", help="Threads of the native kernels.", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def show_report(result: Report, folder: Path | None, as_json: bool) -> None:
    from hermes.report.tables import print_report
    from hermes.report.writers import write_report

    result.facts["command"] = shlex.join(["hermes", *given.get()])
    if folder is not None:
        write_report(result, folder)
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    else:
        print_report(result)
