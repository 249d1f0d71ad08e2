"""The command line: parses, calls the converters, prints; exit codes are those of `errors`.

One file per group of commands; importing it registers them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hermes.cli import bundle_tools, conversion, device, exchange, measure, quality
from hermes.cli.application import app, given
from hermes.errors import HermesError, UsageError

__all__ = [
    "app",
    "bundle_tools",
    "conversion",
    "device",
    "exchange",
    "main",
    "measure",
    "quality",
    "run_command",
]
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `hermes` command."""
    # Threads that wait by spinning starve the child processes on a machine with few cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # numpy gets its two threads from the work itself.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    code = run_command(app, arguments)
    if "torch" in sys.modules:
        # Python needs a second to take its modules apart, and everything else is closed by now.
        with suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command(command: Callable[..., Any], arguments: list[str] | None = None) -> int:
    """Run the typer app and turn every failure into one message and its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    given.set(tuple(words))
    debug = "--debug" in words
    try:
        code = command(args=words, prog_name="hermes", standalone_mode=False)
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
