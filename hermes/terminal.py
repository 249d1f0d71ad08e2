"""Progress and results on a terminal, or as plain lines where there is none."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from hermes.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class ProgressDisplay:
    """Shows stages with elapsed time and memory on standard error.

    On a terminal a live line with a bar; elsewhere one line when a stage begins. Memory is the
    resident size of this process and its children.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._started = time.monotonic()
        self._stage = ""
        self._peak = 0
        self._bars: Bars | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressDisplay:
        if not self._quiet and sys.stderr.isatty():
            self._bars = _make_bars()
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, step: Progress) -> None:
        """Show one step."""
        if self._quiet:
            return
        new_stage = step.stage != self._stage
        self._stage = step.stage
        if self._bars is not None:
            self._show(self._bars, step, new_stage)
        elif new_stage:
            elapsed = time.monotonic() - self._started
            print(f"[{elapsed:6.1f} s] {step.stage}", file=sys.stderr, flush=True)

    def _show(self, bars: Bars, step: Progress, new_stage: bool) -> None:
        if new_stage or self._task is None:
            if self._task is not None:
                bars.update(self._task, total=1, completed=1)
            self._task = bars.add_task(step.stage, total=step.total or None, memory="")
        now = resident_bytes()
        self._peak = max(self._peak, now)
        memory = f"{now / 1e9:.2f} GB, peak {self._peak / 1e9:.2f} GB"
        bars.update(self._task, completed=step.done, total=step.total or None, memory=memory)


def _make_bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
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
