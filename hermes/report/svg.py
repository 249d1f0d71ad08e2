"""Small plots as inline SVG: values by position, shares, a histogram, and lines by name.

Drawn here because a plotting library would be the largest dependency of a report of a few plots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 36
_BINS = 40
_SMALLEST = 1e-12
_COLOURS = ("#1a6fb0", "#c2551f", "#3a8a3a", "#8050a0", "#707070")


def position_plot(values: Sequence[float], label: str, across: str = "position") -> str:
    """Values by index on a logarithmic axis; missing and non-finite ones leave a gap.

    Args:
        values: one per index.
        label: title of the picture.
        across: what the index counts.
    """
    scale = _LogScale(values)
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(values) - 1)
    runs: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if math.isfinite(value):
            runs[-1].append(f"{_LEFT + index * step:.1f},{scale.y(value):.1f}")
        else:
            runs.append([])
    # A lone point is drawn twice: with round ends it is a dot.
    lines = (" ".join(run if len(run) > 1 else run * 2) for run in runs if run)
    body = "".join(f'<polyline class="line" points="{line}"/>' for line in lines)
    last = str(max(0, len(values) - 1))
    return _frame(label, scale.grid() + body + _bottom_labels("0", across, last))


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


def line_plot(series: Mapping[str, Sequence[tuple[float, float]]], label: str, across: str) -> str:
    """Named lines through (x, y) points on linear axes from 0; colours stand in the file itself."""
    points = [point for line in series.values() for point in line]
    right = max((x for x, _ in points), default=1.0) or 1.0
    top = max((y for _, y in points), default=1.0) * 1.1 or 1.0
    width, room = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / right * width, _HEIGHT - _BOTTOM - y / top * room

    body = ""
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _HEIGHT - _BOTTOM - share * room
        body += f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
        body += f'stroke="#ddd"/><text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
        body += f"{share * top:.0f}</text>"
    for index, (name, line) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        spots = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        body += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        body += "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots
        )
        y = _HEIGHT - _BOTTOM - 8 - 15 * (len(series) - 1 - index)
        body += f'<text x="{_LEFT + 10}" y="{y}" fill="{colour}">{escape(name)}</text>'
    body = f'<g font-family="sans-serif" font-size="12">{body}'
    return _frame(label, body + _bottom_labels("0", across, f"{right:.0f}") + "</g>")


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
