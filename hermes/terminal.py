"""Progress and results on a terminal, or as plain lines where there is none."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from hermes.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


SAMPLE_SECONDS = 0.5
LINE_SECONDS = 5.0
"""How often a long stage prints a line where there is no terminal."""


class ProgressDisplay:
    """Shows stages with elapsed time and memory on standard error.

    On a terminal a live line with a bar; elsewhere one line when a stage begins and one now and
    then while it lasts. Memory is the resident size of this process and its children; a thread
    looks at it, so that its peak is seen in stages that report nothing themselves.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._started = self._begun = self._printed = time.monotonic()
        self._step = Progress("")
        self._now = self._peak = 0
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> ProgressDisplay:
        if not self._quiet:
            if sys.stderr.isatty():
                self._bars = _make_bars()
                self._bars.start()
            self._sampler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._sampler.is_alive():
            self._sampler.join()
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, step: Progress) -> None:
        """Show one step."""
        if self._quiet:
            return
        new_stage = step.stage != self._step.stage
        self._step = step
        if new_stage:
            self._begun = self._printed = time.monotonic()
        if self._bars is not None:
            self._show(self._bars, step, new_stage)
        elif new_stage:
            self._print(step.stage)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._look()
            if self._bars is None and time.monotonic() - self._printed >= LINE_SECONDS:
                self._printed = time.monotonic()
                parts = (self._counted(), self._memory())
                self._print(f"{self._step.stage}: {', '.join(part for part in parts if part)}")
            elif self._bars is not None and self._task is not None:
                self._bars.update(self._task, memory=self._memory())

    def _show(self, bars: Bars, step: Progress, new_stage: bool) -> None:
        if new_stage or self._task is None:
            if self._task is not None:
                bars.update(self._task, total=1, completed=1)
            self._task = bars.add_task(step.stage, total=step.total or None, memory="", counted="")
            self._look()
        bars.update(
            self._task,
            completed=step.done,
            total=step.total or None,
            counted=self._counted(),
            memory=self._memory(),
        )

    def _look(self) -> None:
        self._now = resident_bytes()
        self._peak = max(self._peak, self._now)

    def _counted(self) -> str:
        return self._step.counted(time.monotonic() - self._begun)

    def _memory(self) -> str:
        return f"{self._now / 1e9:.2f} GB, peak {self._peak / 1e9:.2f} GB"

    def _print(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        print(f"[{elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)


def _make_bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[counted]}"),
        TextColumn("{task.fields[memory]}"),
        console=Console(stderr=True),
    )


def resident_bytes() -> int:
    """Resident memory of this process and its children."""
    total = 0
    process = psutil.Process()
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_info().rss
        except psutil.Error:
            continue
    return total
