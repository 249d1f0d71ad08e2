"""Commands for devices: the emulated one and real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hermes.cli.application import (
    AsJson,
    BundleFile,
    Debug,
    ReportFolder,
    Threads,
    app,
    show_report,
)

arm64 = typer.Typer(help="The emulated Arm64 device.", no_args_is_help=True)
app.add_typer(arm64, name="arm64")


@arm64.command()
def setup(
    mirror: Annotated[
        str | None, typer.Option("--mirror", help="Debian mirror; else the machine's own.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build it anew.")] = False,
    debug: Debug = False,
) -> None:
    """Fetch an emulator and an Arm64 LiteRT-LM into the user's cache, and test them."""
    from hermes.deploy.sysroot import build_sysroot
    from hermes.terminal import ProgressDisplay

    with ProgressDisplay() as progress:
        built = build_sysroot(mirror, force=force, on_progress=progress)
    print(f"{built.path}: emulates a {built.manifest['core']}")


@arm64.command()
def runner(
    output: Annotated[Path, typer.Option("-o", "--output", help="The script to write.")],
    debug: Debug = False,
) -> None:
    """Write the program that `hermes push --runner` takes for the emulated device."""
    from hermes.deploy.emulated_runner import write_runner
    from hermes.deploy.sysroot import require_sysroot

    print(write_runner(require_sysroot(), output))


@app.command()
def push(
    bundle: BundleFile,
    serial: Annotated[
        str | None, typer.Option("--serial", help="Which device, if several are connected.")
    ] = None,
    folder: Annotated[str, typer.Option("--dir", help="Folder on the device.")] = "/data/local/tmp",
    runner: Annotated[
        Path | None,
        typer.Option("--runner", help="LiteRT-LM command-line build for the device."),
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Ask this there and here.")] = None,
    bench: Annotated[bool, typer.Option("--bench", help="Measure the device's speed.")] = False,
    report: ReportFolder = None,
    threads: Threads = 2,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Carry a bundle to a phone over adb: hashed there, renamed into place, tried out."""
    from converters.pushing import PushOptions, push_bundle
    from hermes.errors import VerificationError
    from hermes.terminal import ProgressDisplay

    options = PushOptions(bundle, serial, folder, runner, prompt, bench, threads)
    with ProgressDisplay(quiet=as_json) as progress:
        result = push_bundle(options, progress)
    show_report(result, report, as_json)
    if not result.passed:
        raise VerificationError(result.verdict, todo="see the red check in the report")
