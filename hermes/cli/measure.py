"""Commands that measure a finished bundle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hermes.cli.application import AsJson, BundleFile, Debug, Threads, app
from hermes.errors import UsageError

if TYPE_CHECKING:
    from hermes.runners.benchmark import Speed


@app.command()
def bench(
    bundle: BundleFile,
    against: Annotated[
        Path | None, typer.Option("--against", help="Another bundle, measured in turns.")
    ] = None,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens fed.", min=2)] = 256,
    generate: Annotated[int, typer.Option("--generate", help="Tokens generated.", min=2)] = 128,
    threads: Threads = 2,
    repeat: Annotated[int, typer.Option("--repeat", help="Runs of each bundle.", min=1)] = 5,
    profile: Annotated[
        bool, typer.Option("--profile", help="Say which operators decoding spends its time in.")
    ] = False,
    calls: Annotated[
        str | None,
        typer.Option(
            "--calls",
            metavar="SIGNATURE",
            help="Time single calls of it instead, in one process: tells graphs apart by 1 %.",
        ),
    ] = None,
    at: Annotated[
        list[int] | None,
        typer.Option("--at", help="Position of the calls' first row; repeatable.", min=0),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure speed, load time and memory in LiteRT-LM, with bundles in turns."""
    from converters.measuring import bench_facts, call_facts
    from hermes.report.bench_table import bench_lines, call_lines, profile_lines
    from hermes.runners.benchmark_calls import CallPlan
    from hermes.runners.benchmark_paired import BenchmarkPlan

    paths = [bundle] if against is None else [bundle, against]
    if calls is not None:
        timed = call_facts(paths, CallPlan(calls, tuple(at or (0,)), threads))
        print(json.dumps(timed) if as_json else "\n".join(call_lines(timed)))
        return
    if at is not None:
        raise UsageError("--at is given without --calls", todo="say which signature to call")
    plan = BenchmarkPlan(prompt, generate, threads, repeat)
    facts = bench_facts(paths, plan, profile=profile, on_run=_say)
    if as_json:
        print(json.dumps(facts))
        return
    print("\n".join(bench_lines(facts)))
    for entry in facts["bundles"] if profile else ():
        print("\n".join(["", str(entry["path"]), *profile_lines(entry["profile"])]))


def _say(path: Path, speed: Speed) -> None:
    line = f"{path.name}: prefill {speed.prefill:.0f}, decode {speed.decode:.1f} tok/s"
    print(line, file=sys.stderr, flush=True)
