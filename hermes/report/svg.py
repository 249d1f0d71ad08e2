"""Two small plots as inline SVG: values by position, and a histogram.

Drawn here because a plotting library would be the largest dependency of a report of two plots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 36
_BINS = 40
_SMALLEST = 1e-12


def position_plot(values: Sequence[float], label: str) -> str:
    """Values by index on a logarithmic axis; missing and non-finite ones leave a gap."""
    scale = _LogScale(values)
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(values) - 1)
    runs: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if math.isfinite(value):
            runs[-1].append(f"{_LEFT + index * step:.1f},{scale.y(value):.1f}")
        else:
            runs.append([])
    body = "".join(f'<polyline class="line" points="{" ".join(run)}"/>' for run in runs if run)
    return _frame(label, body + scale.grid() + _bottom_labels("0", "position", str(len(values))))


def share_plot(values: Sequence[float], label: str) -> str:
    """Shares from 0 to 1 by index on a linear axis."""
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(values) - 1)
    room = _HEIGHT - _TOP - _BOTTOM
    points = " ".join(
        f"{_LEFT + index * step:.1f},{_TOP + (1 - min(1.0, max(0.0, value))) * room:.1f}"
        for index, value in enumerate(values)
        if math.isfinite(value)
    )
    body = f'<polyline class="line" points="{points}"/>' if points else ""
    for share in (0.0, 0.5, 1.0):
        y = _TOP + (1 - share) * room
        body += (
            f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>'
        )
        body += f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
        body += f"{share:.0%}</text>"
    return _frame(label, body + _bottom_labels("1", "token", str(len(values))))


def histogram(values: Sequence[float], label: str) -> str:
    """How many values lie in each of equal bins of the logarithm."""
    scale = _LogScale(values)
    counts = [0] * _BINS
    for value in values:
        if math.isfinite(value):
            share = (math.log10(max(value, scale.least)) - scale.low) / (scale.high - scale.low)
            counts[min(_BINS - 1, int(share * _BINS))] += 1
    width = (_WIDTH - _LEFT - _RIGHT) / _BINS
    room = _HEIGHT - _TOP - _BOTTOM
    most = max(counts) or 1
    bars = ""
    for index, count in enumerate(counts):
        height = room * count / most
        left, top = _LEFT + index * width, _HEIGHT - _BOTTOM - height
        bars += (
            f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{width - 1:.1f}" '
            f'height="{height:.1f}"/>'
        )
    ends = _bottom_labels(f"1e{scale.low}", label, f"1e{scale.high}")
    axis = f'<text class="tick" x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{most}</text>'
    return _frame(f"{label}, histogram", bars + axis + ends)


class _LogScale:
    """A vertical axis over whole decades that holds all positive finite values."""

    def __init__(self, values: Sequence[float]) -> None:
        positive = [v for v in values if math.isfinite(v) and v > _SMALLEST]
        self.low = math.floor(math.log10(min(positive))) if positive else -1
        self.high = math.ceil(math.log10(max(positive))) if positive else 0
        self.high = max(self.high, self.low + 1)
        self.least = 10.0**self.low

    def y(self, value: float) -> float:
        share = (math.log10(max(value, self.least)) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> str:
        lines = ""
        for decade in range(self.low, self.high + 1):
            y = self.y(10.0**decade)
            lines += (
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
                f"1e{decade}</text>"
            )
        return lines


def _bottom_labels(first: str, middle: str, last: str) -> str:
    y = _HEIGHT - _BOTTOM + 18
    centre = (_LEFT + _WIDTH - _RIGHT) / 2
    return (
        f'<text class="tick" x="{_LEFT}" y="{y}">{escape(first)}</text>'
        f'<text class="tick" x="{centre}" y="{y}" text-anchor="middle">{escape(middle)}</text>'
        f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{y}" text-anchor="end">{escape(last)}</text>'
    )


def _frame(label: str, body: str) -> str:
    return (
        f'<svg class="plot" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(label)}</title>{body}</svg>'
    )
