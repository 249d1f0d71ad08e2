"""Reports and inspections on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from hermes.report.check import Check, Report
from hermes.report.wording import heading, limit, mark, number, size, skipped

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 150
_DETAIL_LENGTH = 110
_MANY = 5
_MOST_KEYS = 12


def print_report(report: Report, stream: TextIO | None = None) -> None:
    """Verdict, then every rung with its values and limits, then what was not run."""
    from rich.table import Table
    from rich.text import Text

    console = _console(stream)
    colour = "green" if report.passed else "red" if report.checks else "yellow"
    console.print(Text(report.verdict, style=f"bold {colour}"))
    table = Table(box=None, pad_edge=False)
    for title in ("", "check", "value", "limit", "detail"):
        right = title in ("value", "limit")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for index, checks in report.rungs():
        table.add_row("", Text(heading(report, index), style="bold"))
        for check in _condensed(checks):
            red = not check.passed
            detail = check.detail if red else _shortened(check.detail)
            cells = [mark(check), f"  {check.name}", number(check.value), limit(check), detail]
            table.add_row(*(Text(cell, style="red" if red else "") for cell in cells))
    if report.checks:
        console.print(table)
    for line in skipped(report):
        console.print(Text(line, style="yellow"))
    for line in _key_lines(report.facts.get("keys", {})):
        console.print(Text(line, style="yellow" if line.startswith("warning") else ""))


def _key_lines(keys: Mapping[str, Any]) -> list[str]:
    """What became of the checkpoint's keys: nothing is left out without a line."""
    ignored = [f"ignored {name}: {reason}" for name, reason in keys.get("ignored", [])]
    if len(ignored) > _MOST_KEYS:
        more = len(ignored) - _MOST_KEYS
        ignored = [*ignored[:_MOST_KEYS], f"ignored {more} more keys; --report lists them"]
    warnings = [f"warning: {text}" for text in keys.get("warnings", [])]
    return [*ignored, *warnings, *(f"note: {text}" for text in keys.get("notes", []))]


def print_inspection(facts: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """What `hermes inspect` found in a bundle."""
    console = _console(stream)
    line = f"{facts['path']}: {size(facts['bytes'])}, format {facts['version']}"
    console.print(line, markup=False, highlight=False)
    _print_table(
        console,
        ("section", "offset", "bytes", "sha256"),
        [(s["kind"], s["offset"], s["bytes"], s["sha256"]) for s in facts["sections"]],
    )
    _print_table(console, ("metadata", "value"), list(facts["metadata"].items()))
    prompt = [(name.replace("_", " "), value) for name, value in facts["prompt"].items()]
    _print_table(console, ("prompt", "value"), prompt)
    for model in facts["models"]:
        _print_table(
            console,
            ("signature", "tensor", "type", "shape"),
            [row for entry in model["signatures"] for row in _signature_rows(entry)],
        )
        constants = [
            (form, group["tensors"], size(group["bytes"]))
            for form, group in model["constants"].items()
        ]
        _print_table(console, ("constants", "tensors", "size"), constants)


def _condensed(checks: Sequence[Check]) -> list[Check]:
    """Of many green checks of one kind, `kind, case`, only the one nearest to its limit."""
    kinds: dict[str, list[Check]] = {}
    for check in checks:
        kinds.setdefault(check.name.split(", ")[0], []).append(check)
    shown: list[Check] = []
    for kind, group in kinds.items():
        numbers = [check for check in group if isinstance(check.value, float)]
        if len(group) < _MANY or len(numbers) < len(group) or not all(c.passed for c in group):
            shown.extend(group)
            continue
        worst = max(group, key=lambda check: float(check.value))
        case = worst.name.removeprefix(f"{kind}, ")
        shown.append(replace(worst, name=f"{kind}, worst of {len(group)}: {case}"))
    return shown


def _signature_rows(entry: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Inputs and outputs; of the cache only the first tensor, since all are alike."""
    rows: list[tuple[str, str, str, str]] = []
    name = str(entry["name"])
    for direction, tensors in (("in", entry["inputs"]), ("out", entry["outputs"])):
        cache = [tensor for tensor in tensors if tensor["name"].startswith("kv_cache_")]
        others = [tensor for tensor in tensors if tensor not in cache]
        for tensor in [*others, *cache[:1]]:
            more = f" and {len(cache) - 1} more" if tensor in cache and len(cache) > 1 else ""
            label = f"{direction} {tensor['name']}{more}"
            rows.append((name, label, tensor["type"], str(tensor["shape"])))
            name = ""
    return rows


def _print_table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(box=None, pad_edge=False)
    for title in headings:
        right = title in ("offset", "bytes", "tensors", "size")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console.print()
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _shortened(detail: str) -> str:
    detail = " ".join(detail.split())
    return detail if len(detail) <= _DETAIL_LENGTH else detail[: _DETAIL_LENGTH - 3] + "..."


def _console(stream: TextIO | None) -> Console:
    from rich.console import Console

    target = stream or sys.stdout
    return Console(file=target, width=None if target.isatty() else _PLAIN_WIDTH)
