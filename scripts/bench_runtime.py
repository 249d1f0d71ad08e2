"""Measure decoding and prefill beside other exporters and runtimes: one table, paired runs.

Bundles of this project are made from the checkpoint at three context lengths. The official
exporter's bundle of the same weights, and llama.cpp with them as Q8_0, take part where given.
Every turn runs each of them once. Prints the table, the ratios and how decoding slows as the
context fills; `--json` writes every run, `--svg` the plot. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hermes.report.svg import line_plot
from hermes.runners.benchmark import Speed, benchmark

CONTEXTS = (512, 1280, 4096)
POSITIONS = (64, 256, 512, 1024)
POSITION_TOKENS = 32
"""Tokens decoded at each position; together with the prompt they must fit the context."""

LLAMA = """
import json, sys, time
import xllamacpp
path, context, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, context, 1, True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
started = time.monotonic()
server = xllamacpp.Server(params)
print(json.dumps({"load": time.monotonic() - started}), flush=True)
for line in sys.stdin:
    prompt, generate, turn = json.loads(line)
    tokens = [300 + (37 * turn + 13 * index) % 4000 for index in range(prompt)]
    request = {"prompt": tokens, "n_predict": generate, "ignore_eos": True, "cache_prompt": False}
    answer = server.handle_completions(request)
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    print(json.dumps(answer["timings"]), flush=True)
"""
"""llama.cpp in an environment of its own; its own timings, one line per request."""


@dataclass(frozen=True)
class Row:
    """Medians of one runtime and bundle."""

    name: str
    runs: tuple[Speed, ...]

    def median(self, metric: str) -> float:
        """Of all runs."""
        return statistics.median(float(getattr(run, metric)) for run in self.runs)

    def ratio(self, other: Row, metric: str) -> tuple[float, float, float]:
        """Median, smallest and largest of the turns' ratios."""
        values = [
            getattr(one, metric) / getattr(two, metric)
            for one, two in zip(self.runs, other.runs, strict=True)
        ]
        return statistics.median(values), min(values), max(values)


class LlamaServer:
    """llama.cpp in a process of its own, kept between turns; its first answer is not counted."""

    def __init__(self, python: Path, gguf: Path, context: int, threads: int) -> None:
        words = [str(python), "-c", LLAMA, str(gguf), str(context), str(threads)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        self._turn = 0
        self.load_seconds = float(self._answer()["load"])
        self.run(64, 8)

    def run(self, prompt: int, generate: int) -> Speed:
        """One request; memory is not measured."""
        self._turn += 1
        stdin = self._process.stdin
        if stdin is None:
            raise SystemExit("llama.cpp has no standard input")
        print(json.dumps([prompt, generate, self._turn]), file=stdin, flush=True)
        timings = self._answer()
        first = timings["prompt_ms"] / 1000 + timings["predicted_per_token_ms"] / 1000
        prefill, decode = timings["prompt_per_second"], timings["predicted_per_second"]
        return Speed(prefill, decode, first, self.load_seconds, 0)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        stdout = self._process.stdout
        for line in stdout or ():
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise SystemExit("llama.cpp ended without an answer")


Runner = Callable[[int, int], Speed]


def turns(runners: Mapping[str, Runner], prompt: int, generate: int, repeat: int) -> dict[str, Row]:
    """Each runner once per turn, every other turn backwards."""
    runs: dict[str, list[Speed]] = {name: [] for name in runners}
    for turn in range(repeat):
        names = list(runners) if turn % 2 == 0 else list(reversed(runners))
        for name in names:
            runs[name].append(runners[name](prompt, generate))
            line = f"{name}: {runs[name][-1].prefill:.0f} / {runs[name][-1].decode:.1f}"
            print(line, file=sys.stderr, flush=True)
    return {name: Row(name, tuple(values)) for name, values in runs.items()}


def bundle_runner(path: Path, threads: int, cache: Path) -> Runner:
    """A bundle in LiteRT-LM, started with a weight cache that an uncounted start has filled."""
    cache.mkdir()

    def run(prompt: int, generate: int) -> Speed:
        return benchmark(
            path,
            prefill_tokens=prompt,
            decode_tokens=generate,
            threads=threads,
            cache_folder=cache,
        )

    run(2, 2)
    return run


def make_bundles(checkpoint: Path, folder: Path, contexts: Sequence[int]) -> dict[str, Path]:
    """Bundles of this project, one per context; existing files are taken as they are."""
    made = {}
    for context in contexts:
        target = folder / f"hermes-{context}.litertlm"
        if not target.is_file():
            words = ["convert", str(checkpoint), "-o", str(target), "--context", str(context)]
            command = [sys.executable, "-m", "hermes.cli", *words, "--no-verify"]
            subprocess.run(command, check=True, stdout=sys.stderr)
        made[f"hermes {context}"] = target
    return made


def table(rows: Mapping[str, Row], base: str | None) -> list[str]:
    """A Markdown table, with decode, prefill and first token against `base`."""
    lines = [
        "| what | prefill tok/s | decode tok/s | first token | load | peak memory "
        "| prefill ratio | decode ratio | first token ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        cells = [
            name,
            f"{row.median('prefill'):.0f}",
            f"{row.median('decode'):.1f}",
            f"{1000 * row.median('first_token_seconds'):.0f} ms",
            f"{1000 * row.median('load_seconds'):.0f} ms",
            f"{row.median('peak_memory') / 1e6:.0f} MB" if row.median("peak_memory") else "",
        ]
        for metric in ("prefill", "decode", "first_token_seconds"):
            if base is None or base not in rows or name == base:
                cells.append("")
                continue
            pair = (rows[base], row) if metric == "first_token_seconds" else (row, rows[base])
            middle, low, high = pair[0].ratio(pair[1], metric)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def position_lines(found: Mapping[int, Mapping[str, Row]]) -> list[str]:
    """Decode tokens per second by position, a Markdown table."""
    names = list(dict.fromkeys(name for rows in found.values() for name in rows))
    lines = ["| position | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for position, rows in found.items():
        cells = [f"{rows[n].median('decode'):.1f}" if n in rows else "" for n in names]
        lines.append(f"| {position} | {' | '.join(cells)} |")
    return lines


def decode_plot(found: Mapping[int, Mapping[str, Row]]) -> str:
    """Decode speed by position."""
    series: dict[str, list[tuple[float, float]]] = {}
    for position, rows in found.items():
        for name, row in rows.items():
            series.setdefault(name, []).append((position, row.median("decode")))
    return line_plot(series, "decode tokens per second by position", "tokens in the context")


def room(name: str) -> int:
    """The context of a row called `<who> <context>`."""
    return int(name.rsplit(" ", 1)[1])


def main() -> None:
    """Parse, make, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="what `hermes convert` takes")
    parser.add_argument("--official", type=Path, help="official bundle at context 1280")
    parser.add_argument("--llama-python", type=Path, help="python with xllamacpp (llama.cpp)")
    parser.add_argument("--gguf", type=Path, help="Q8_0 file of the same weights")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--positions", type=int, nargs="*", default=list(POSITIONS))
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--work", type=Path, help="folder for bundles, kept for the next run")
    parser.add_argument("--json", type=Path, help="file for all runs")
    parser.add_argument("--svg", type=Path, help="file for the plot")
    given = parser.parse_args()
    servers: list[LlamaServer] = []
    with tempfile.TemporaryDirectory(prefix="bench-runtime-") as folder:
        bundles = make_bundles(given.checkpoint, given.work or Path(folder), given.contexts)
        if given.official:
            bundles["official 1280"] = given.official
        runners = {
            name: bundle_runner(path, given.threads, Path(folder) / f"cache-{index}")
            for index, (name, path) in enumerate(bundles.items())
        }
        if given.llama_python and given.gguf:
            for context in sorted({min(given.contexts), 1280}):
                server = LlamaServer(given.llama_python, given.gguf, context, given.threads)
                servers.append(server)
                runners[f"llama.cpp {context}"] = server.run
        try:
            rows = turns(runners, given.prompt, given.generate, given.repeat)
            found = {}
            for position in given.positions:
                fitting = {
                    name: run
                    for name, run in runners.items()
                    if position + POSITION_TOKENS < room(name)
                }
                found[position] = turns(fitting, position, POSITION_TOKENS, given.repeat)
        finally:
            for server in servers:
                server.close()
    print("\n".join([*table(rows, "official 1280"), "", *position_lines(found)]))
    if given.svg:
        given.svg.write_text(decode_plot(found) + "\n", encoding="utf-8")
    if given.json:
        facts = {
            "rows": {name: [asdict(run) for run in row.runs] for name, row in rows.items()},
            "positions": {
                position: {name: [asdict(run) for run in row.runs] for name, row in at.items()}
                for position, at in found.items()
            },
        }
        given.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
