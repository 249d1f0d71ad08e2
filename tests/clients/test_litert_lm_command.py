"""A client that we did not write: the `litert-lm` command, in an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hermes.cli import app, run_command

COMMAND = os.environ.get("LITERT_LM")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    COMMAND is None or shutil.which(COMMAND) is None,
    reason="LITERT_LM names no litert-lm command; `make test` installs one",
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("client") / "tiny.litertlm"
    checkpoint = str(ROOT / "assets" / "tiny")
    assert run_command(app, ["convert", checkpoint, "-o", str(target), "--no-verify"]) == 0
    return target


def litert_lm(home: Path, *arguments: str) -> str:
    """What the command prints; it keeps its settings below `home`."""
    assert COMMAND is not None
    done = subprocess.run(
        [COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HOME": str(home)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_describe(bundle: Path, tmp_path: Path) -> None:
    described = litert_lm(tmp_path, "describe", str(bundle))
    assert re.search(r"Max Context Tokens:\s+512\b", described), described
    assert re.search(r"Input Modalities:\s+Text\b", described), described


def test_run_answers_in_the_words_of_the_play(bundle: Path, tmp_path: Path) -> None:
    prompt = ["--prompt", "MACBETH.", "--no-template", "--backend", "cpu"]
    answer = litert_lm(tmp_path, "run", str(bundle), *prompt)
    assert len(re.findall(r"[A-Za-z]{2,}", answer)) >= 3, answer


def test_benchmark_counts_tokens(bundle: Path, tmp_path: Path) -> None:
    figures = litert_lm(tmp_path, "benchmark", str(bundle), "--backend", "cpu")
    speeds = [float(number) for number in re.findall(r"([\d.]+)\s*tokens?/s", figures)]
    assert len(speeds) >= 2, figures
    assert min(speeds) > 0
