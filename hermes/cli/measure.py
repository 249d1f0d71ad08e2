"""Commands that measure a finished bundle."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hermes.cli.application import AsJson, BundleFile, Debug, Threads, app

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
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure speed, load time and memory in LiteRT-LM, with bundles in turns."""
    from converters.measuring import bench_facts
    from hermes.report.bench_table import bench_lines, profile_lines
    from hermes.runners.benchmark_paired import BenchmarkPlan

    plan = BenchmarkPlan(prompt, generate, threads, repeat)
    paths = [bundle] if against is None else [bundle, against]
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
