"""Measure what exports cost: beside the official exporter, and over random models of growing size.

Every export is a process of its own, measured from outside: wall time, CPU time of it and its
children, the largest single process, and the largest sum over all its processes at one moment.
Prints a table and the slopes; `--json` writes everything. See docs/export-cost.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hermes.checkpoint.directory import TOKENIZER_FILES
from hermes.checkpoint.safetensors_write import write_safetensors
from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import HermesError
from hermes.parameters import parameter_count, parameter_shapes
from hermes.runners.litert_lm import LiteRtLmRunner

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SHAPES = {
    "135M": HermesConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, max_seq_len=8192, tie_embeddings=True,
    ),
    "360M": HermesConfig(
        vocab_size=49152, hidden_size=960, intermediate_size=2560, num_layers=32, num_heads=15,
        num_kv_heads=5, head_dim=64, max_seq_len=8192, tie_embeddings=True,
    ),
    "1B": HermesConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
        num_kv_heads=8, head_dim=64, max_seq_len=131072, rope_theta=5e5, tie_embeddings=True,
    ),
    "3B": HermesConfig(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_layers=28, num_heads=24,
        num_kv_heads=8, head_dim=128, max_seq_len=131072, rope_theta=5e5, tie_embeddings=True,
    ),
}  # fmt: skip
"""SmolLM2-135M and -360M, Llama-3.2-1B and -3B."""

SAMPLE_SECONDS = 0.2


@dataclass(frozen=True)
class Measured:
    """One process: seconds, and bytes."""

    name: str
    wall: float
    cpu: float
    peak_process: int
    peak_tree: int
    output_bytes: int
    load_before: float


def measure(name: str, command: Sequence[str], output: Path, cache: Path) -> Measured:
    """Run the command; raises if it fails."""
    load = os.getloadavg()[0]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with tempfile.TemporaryFile() as log:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        sampled: list[int] = [0]
        sampler = threading.Thread(target=_sample, args=(process.pid, sampled), daemon=True)
        sampler.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        sampler.join()
        if process.returncode != 0:
            log.seek(0)
            raise SystemExit(f"{name} failed:\n{log.read().decode(errors='replace')[-3000:]}")
    # The official exporter names its own file in the folder.
    files = [output] if output.is_file() else [f for f in output.rglob("*") if f.is_file()]
    measured = Measured(
        name,
        round(wall, 2),
        round(usage.ru_utime + usage.ru_stime, 2),
        usage.ru_maxrss * 1024,
        sampled[0],
        max((file.stat().st_size for file in files), default=0),
        round(load, 2),
    )
    print(json.dumps(asdict(measured)), file=sys.stderr, flush=True)
    return measured


def _sample(pid: int, peak: list[int]) -> None:
    """The sum over the tree; pages that processes share count once for each."""
    try:
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for one in (process, *process.children(recursive=True)):
                try:
                    total += one.memory_info().rss
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], total)
            time.sleep(SAMPLE_SECONDS)
    except psutil.Error:
        return


def hermes_export(name: str, checkpoint: Path, work: Path, recipe: str, *, cold: bool) -> Measured:
    """`hermes convert --no-verify`; cold without any kept graph or work folder."""
    cache, target = work / "cache", work / "hermes.litertlm"
    if cold:
        shutil.rmtree(cache, ignore_errors=True)
    command = [
        sys.executable, "-m", "hermes.cli", "convert", str(checkpoint), "-o", str(target),
        "--force", "--no-verify", "--context", "1280", "--recipe", recipe,
    ]  # fmt: skip
    return measure(name, command, target, cache)


def official_export(python: Path, checkpoint: Path, work: Path) -> Measured:
    """litert-torch's export_hf in its own environment, with the same context."""
    output = work / "official"
    shutil.rmtree(output, ignore_errors=True)
    command = [
        str(python), "-m", "litert_torch.generative.export_hf", str(checkpoint), str(output),
        "--cache_length=1280",
    ]  # fmt: skip
    return measure("official exporter", command, output, work / "cache")


def write_random(folder: Path, config: HermesConfig, tokenizer: Path) -> Path:
    """A bf16 checkpoint of these shapes; its tokenizer may be smaller than its vocabulary."""
    import numpy as np

    # A prime number of values repeats at another place in every row.
    values = np.random.default_rng(1).standard_normal(4_194_301, dtype=np.float32) * 0.02
    block = (values.view(np.uint32) >> 16).astype(np.uint16)
    one = np.float32(1).view(np.uint32) >> 16

    def tensor(name: str, shape: tuple[int, ...]) -> LazyTensor:
        columns = math.prod(shape[1:])

        def read(start: int, stop: int) -> NDArray[np.uint16]:
            count = (stop - start) * columns
            if len(shape) == 1:
                return np.full(count, one, dtype=np.uint16)
            offset = start * columns % len(block)
            repeated = np.resize(np.roll(block, -offset), count)
            return repeated.reshape(stop - start, *shape[1:])

        return LazyTensor(name, shape, "bfloat16", name, read)

    folder.mkdir(parents=True, exist_ok=True)
    shapes = parameter_shapes(config)
    write_safetensors(folder / "model.safetensors", {n: tensor(n, s) for n, s in shapes.items()})
    (folder / "hermes_config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    # An export must not wait for the disk to take in its own checkpoint.
    os.sync()
    return folder


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Least-squares slope of log cost over log size."""
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    middle = statistics.fmean(xs)
    return sum((x - middle) * y for x, y in zip(xs, ys, strict=True)) / sum(
        (x - middle) ** 2 for x in xs
    )


def median(runs: Sequence[Measured]) -> Measured:
    """Field by field."""
    fields = [field for field in asdict(runs[0]) if field != "name"]
    values = {field: statistics.median(getattr(run, field) for run in runs) for field in fields}
    return Measured(runs[0].name, **values)


def compare(
    checkpoint: Path, official: Path | None, repeats: int, work: Path, recipe: str
) -> list[Measured]:
    """Paired runs: official, cold, kept, and again; the medians."""
    runs: dict[str, list[Measured]] = {}
    for _ in range(repeats):
        if official is not None:
            runs.setdefault("official", []).append(official_export(official, checkpoint, work))
        for name, cold in (("hermes, cold", True), ("hermes, graph kept", False)):
            runs.setdefault(name, []).append(
                hermes_export(name, checkpoint, work, recipe, cold=cold)
            )
    return [median(group) for group in runs.values()]


def grow(
    names: Sequence[str], tokenizer: Path, work: Path, recipe: str, *, speak: bool
) -> tuple[list[Measured], dict[str, dict[str, object]]]:
    """Random checkpoints of growing size, each removed before the next; and what they said."""
    rows: list[Measured] = []
    spoken: dict[str, dict[str, object]] = {}
    for name in names:
        folder = write_random(work / "random", SHAPES[name], tokenizer)
        rows.append(hermes_export(f"random bf16 {name}", folder, work, recipe, cold=True))
        shutil.rmtree(folder)
        if speak:
            spoken[name] = generate(work / "hermes.litertlm")
            print(json.dumps({name: spoken[name]}), file=sys.stderr, flush=True)
    return rows, spoken


def generate(bundle: Path) -> dict[str, object]:
    """Load the bundle into LiteRT-LM and decode a few tokens; its death is a result too."""
    started = time.monotonic()
    try:
        with LiteRtLmRunner(bundle, threads=2) as runtime:
            loaded = time.monotonic() - started
            answer = runtime.generate("The quick brown fox", 4)
            return {
                "load_seconds": round(loaded, 2),
                "prompt_tokens": answer.prompt_tokens,
                "text": answer.text,
                "seconds": round(time.monotonic() - started, 2),
                "peak_memory": runtime.peak_memory,
            }
    except HermesError as error:
        return {"error": str(error)}


def show(rows: Sequence[Measured]) -> None:
    """The table."""
    head = ("", "wall s", "CPU s", "largest process", "all processes", "file", "load")
    print(
        f"{head[0]:<22}{head[1]:>8}{head[2]:>8}{head[3]:>17}{head[4]:>15}{head[5]:>10}{head[6]:>6}"
    )
    for row in rows:
        print(
            f"{row.name:<22}{row.wall:>8.1f}{row.cpu:>8.1f}{row.peak_process / 1e9:>14.2f} GB"
            f"{row.peak_tree / 1e9:>12.2f} GB{row.output_bytes / 1e9:>7.2f} GB"
            f"{row.load_before:>6.1f}"
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkpoint", type=Path, help="Hugging Face folder with its tokenizer")
    parser.add_argument(
        "--official-python", type=Path, default=os.environ.get("HERMES_OFFICIAL_PYTHON"),
        help="python of an environment with litert-torch, tensorflow and transformers",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="paired runs of the comparison")
    parser.add_argument("--sizes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--recipe", default="int8", help="of Hermes's exports")
    parser.add_argument(
        "--speak", action="store_true", help="decode a few tokens with each random bundle"
    )
    parser.add_argument("--work", type=Path, help="folder for temporary files (20 GB for 3B)")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    given = parser.parse_args()
    official = Path(given.official_python) if given.official_python else None
    with tempfile.TemporaryDirectory(prefix="bench-export-", dir=given.work) as folder:
        compared = (
            compare(given.checkpoint, official, given.repeats, Path(folder), given.recipe)
            if given.repeats
            else []
        )
        grown, spoken = grow(
            given.sizes, given.checkpoint, Path(folder), given.recipe, speak=given.speak
        )
    show([*compared, *grown])
    facts: dict[str, object] = {
        "rows": [asdict(row) for row in (*compared, *grown)],
        "spoken": spoken,
    }
    if official is not None and compared:
        first = compared[0]
        facts["ratios"] = {
            row.name: {
                field: round(getattr(row, field) / getattr(first, field), 3)
                for field in ("wall", "cpu", "peak_process", "peak_tree")
            }
            for row in compared[1:]
        }
        print("of the official exporter's:", json.dumps(facts["ratios"]))
    if len(grown) > 1:
        sizes = [parameter_count(SHAPES[name]) for name in given.sizes]
        facts["slopes"] = {
            field: round(slope(sizes, [getattr(row, field) for row in grown]), 3)
            for field in ("wall", "cpu", "peak_process")
        }
        print("log-log slopes over parameters:", json.dumps(facts["slopes"]))
    if given.json:
        given.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
