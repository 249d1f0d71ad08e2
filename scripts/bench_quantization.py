"""Print what each recipe keeps of a model, its size and its speed; see docs/quantization.md.

Every bundle is converted without the ladder, compared with the float model on the two shipped
texts, and timed in turns with the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPES = ("int8", "int8-plain", "int8-weight-only", "int4", "fp16", "float32")
HERMES = (sys.executable, "-m", "hermes.cli")


def run(*arguments: str) -> dict[str, object]:
    """A Hermes command's JSON line."""
    done = subprocess.run([*HERMES, *arguments, "--json"], stdout=subprocess.PIPE, check=True)
    facts: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return facts


def measure(
    checkpoint: Path, recipes: list[str], positions: int, repeats: int, threads: int, folder: Path
) -> list[dict[str, object]]:
    """One row per recipe: facts of `hermes convert`, `eval` and `bench`."""
    rows: list[dict[str, object]] = []
    for recipe in recipes:
        name = Path(recipe).stem
        bundle = folder / f"{name}.litertlm"
        report = run(
            "convert", str(checkpoint), "-o", str(bundle), "--recipe", recipe, "--no-verify"
        )
        fidelity = run(
            "eval", str(bundle), "--against", str(checkpoint), "--positions", str(positions),
            "--threads", str(threads),
        )  # fmt: skip
        seconds = report["facts"]["seconds"]  # type: ignore[index]
        rows.append(
            {
                "recipe": name,
                "bytes": bundle.stat().st_size,
                "seconds": seconds,
                "texts": fidelity["texts"],
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if repeats:
        first = folder / f"{rows[0]['recipe']}.litertlm"
        for row in rows:
            bundle = folder / f"{row['recipe']}.litertlm"
            pair = [str(first), "--against", str(bundle)] if bundle != first else [str(first)]
            speed = run("bench", *pair, "--repeat", str(repeats), "--threads", str(threads))
            row["speed"] = speed["bundles"][-1]  # type: ignore[index]
            row["ratios"] = speed.get("ratios")
            print(json.dumps(row["speed"]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--positions", type=int, default=1024, help="tokens of each text")
    parser.add_argument("--repeats", type=int, default=5, help="paired timings; 0 for none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the bundles")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-quantization-") as temporary:
        folder = given.keep or Path(temporary)
        rows = measure(
            given.checkpoint, given.recipes, given.positions, given.repeats, given.threads, folder
        )
    show(rows)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def show(rows: list[dict[str, object]]) -> None:
    """The table, as in the documentation."""
    print(
        f"{'recipe':<18}{'MB':>7}  {'text':<16}{'KL':>9}{'top-1':>8}{'perplexity':>12}{'float':>9}"
    )
    for row in rows:
        for index, text in enumerate(row["texts"]):  # type: ignore[arg-type, var-annotated]
            name = row["recipe"] if index == 0 else ""
            size = f"{row['bytes'] / 1e6:.0f}" if index == 0 else ""  # type: ignore[operator]
            print(
                f"{name:<18}{size:>7}  {text['text']:<16}{text['kl']:>9.5f}{text['top1']:>8.1%}"
                f"{text['perplexity']:>12.3f}{text['reference_perplexity']:>9.3f}"
            )


if __name__ == "__main__":
    main()
