"""How values of a report are spelt, the same in every form of it."""

from __future__ import annotations

import json

from hermes.report.check import RUNG_NAMES, Check, Report

_SYMBOLS = {"<=": "≤", ">=": "≥", "=": "="}


def number(value: float | str) -> str:
    """Whole numbers in full, others with three significant digits, words as they are."""
    if isinstance(value, str):
        return value
    if abs(value) < 1e15 and value == int(value):
        return str(int(value))
    return f"{value:.3g}"


def inline(value: object) -> str:
    """A fact on one line: words as they are, structures as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return number(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def limit(check: Check) -> str:
    """The bar with its direction, empty where there is none."""
    return "" if check.limit is None else f"{_SYMBOLS[check.relation]} {number(check.limit)}"


def mark(check: Check) -> str:
    """ok, RED, or empty for a value without a limit."""
    if not check.passed:
        return "RED"
    return "" if check.limit is None and not isinstance(check.value, str) else "ok"


def rung(number_: int) -> str:
    """Number and name."""
    return f"{number_} {RUNG_NAMES[number_]}"


def heading(report: Report, number_: int) -> str:
    """Number and name, with the time it took if that is known."""
    spent = report.seconds.get(number_)
    return f"Rung {rung(number_)}" + ("" if spent is None else f", {spent:.1f} s")


def skipped(report: Report) -> list[str]:
    """One line per rung that was not run."""
    return [f"rung {rung(n)}: not run, {why}" for n, why in sorted(report.skipped.items())]


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
