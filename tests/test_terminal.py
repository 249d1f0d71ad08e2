"""Progress on a terminal and where there is none."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from hermes.progress import Progress, silent
from hermes.terminal import ProgressDisplay, resident_bytes

STEPS = [
    Progress("opening the checkpoint"),
    Progress("writing the weights", 1, 3, "tensors", "embed_tokens"),
    Progress("writing the weights", 2, 3, "tensors", "norm"),
    Progress("writing the weights", 3, 3, "tensors", "lm_head"),
    Progress("rung 1: exportable"),
]


def test_one_line_per_stage_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        for step in STEPS:
            display(step)
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert [re.sub(r"^\[ *\d+\.\d s\] ", "", line) for line in lines] == [
        "opening the checkpoint",
        "writing the weights",
        "rung 1: exportable",
    ]
    assert all(line.startswith("[") for line in lines)


def test_nothing_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(quiet=True) as display:
        for step in STEPS:
            display(step)
            silent(step)
    assert capsys.readouterr() == ("", "")


def show_until_interrupted() -> None:
    with ProgressDisplay() as display:
        for step in STEPS:
            display(step)
        raise KeyboardInterrupt


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_live_bar_with_memory_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(KeyboardInterrupt):
        show_until_interrupted()
    shown = terminal.getvalue()
    for stage in ("opening the checkpoint", "writing the weights", "rung 1: exportable"):
        assert stage in shown
    assert re.search(r"\d+\.\d\d GB, peak \d+\.\d\d GB", shown)
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_memory_counts_children() -> None:
    alone = resident_bytes()
    assert alone > 10 * 2**20
    code = "data = b'x' * 80_000_000; print('ready', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert resident_bytes() - alone > 60_000_000
    finally:
        child.communicate("\n")
