"""The program that stands for LiteRT-LM's command-line build on an emulated Arm64 device.

It runs in the sysroot's Python, takes the options of `litert_lm_advanced_main` that Hermes uses,
and prints what that prints.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from hermes.deploy.sysroot import Sysroot
from hermes.runners.litert_lm import Runtime

_THREADS = 2


def write_runner(sysroot: Sysroot, target: Path) -> Path:
    """A shell script that is the runner; it works wherever this machine's files are seen."""
    launcher = sysroot.launcher()
    code = (
        f"import sys; sys.path[:] = {list(launcher.path)!r}; "
        "from hermes.deploy.emulated_runner import main; main(sys.argv[1:])"
    )
    words = shlex.join([*launcher.command, "-c", code])
    target.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    target.chmod(0o755)
    return target


def main(arguments: list[str]) -> None:
    """Generate, or benchmark."""
    options = _parser().parse_args(arguments)
    if options.benchmark == "true":
        _benchmark(options)
    else:
        runtime = Runtime(options.model_path, _THREADS, None)
        said = runtime.generate(options.input_prompt, options.max_output_tokens)
        print(f"output: {said.text}")
    sys.stdout.flush()
    # Tearing down native engines can crash or hang, and nobody needs their last words.
    os._exit(0)


def _benchmark(options: argparse.Namespace) -> None:
    from hermes.runners.benchmark import run_benchmark
    from hermes.runners.litert_lm import NO_WEIGHT_CACHE

    prefill, decode, first, _ = run_benchmark(
        options.model_path,
        options.benchmark_prefill_tokens,
        options.benchmark_decode_tokens,
        _THREADS,
        NO_WEIGHT_CACHE,
    )
    print("BenchmarkInfo:")
    print(f"  Time to first token: {first:.2f} s")
    print(f"      Prefill Speed: {prefill:.2f} tokens/sec.")
    print(f"      Decode Speed: {decode:.2f} tokens/sec.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="litert_lm (emulated)")
    parser.add_argument("--model_path", required=True)
    parser.add_argument("--input_prompt", default="")
    parser.add_argument("--max_output_tokens", type=int, default=32)
    parser.add_argument("--benchmark", choices=("true", "false"), default="false")
    parser.add_argument("--benchmark_prefill_tokens", type=int, default=256)
    parser.add_argument("--benchmark_decode_tokens", type=int, default=128)
    for name in ("--backend", "--async", "--use_session", "--disable_cache"):
        parser.add_argument(name)
    return parser
