"""A report as files: JSON for programs, Markdown for reviews, HTML for eyes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hermes.report.check import Check, Report
from hermes.report.wording import heading, inline, limit, mark, number, skipped

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "report.json", "report.md", "report.html"


def write_report(report: Report, folder: Path) -> None:
    """Write the three forms into `folder`, each replaced as a whole."""
    from hermes.report.html import to_html

    folder.mkdir(parents=True, exist_ok=True)
    forms = {
        JSON_NAME: report.to_json() + "\n",
        MARKDOWN_NAME: to_markdown(report),
        HTML_NAME: to_html(report),
    }
    for name, content in forms.items():
        part = folder / f".{name}.part"
        part.write_text(content, encoding="utf-8")
        os.replace(part, folder / name)


def to_markdown(report: Report) -> str:
    """Verdict, ladder, skipped rungs, facts."""
    lines = ["# Hermes report", "", f"**{_escaped(report.verdict)}**", ""]
    for index, checks in report.rungs():
        lines += [f"## {heading(report, index)}", ""]
        lines += _table(("", "check", "value", "limit", "detail"), [_row(c) for c in checks])
    if report.skipped:
        lines += ["## Not run", "", *(f"- {line}" for line in skipped(report)), ""]
    for topic, value in report.facts.items():
        lines += [f"## {topic.replace('_', ' ')}", "", *_fact(value), ""]
    return "\n".join(lines).rstrip() + "\n"


def _row(check: Check) -> tuple[str, ...]:
    return mark(check), check.name, number(check.value), limit(check), check.detail


def _fact(value: object) -> list[str]:
    if not isinstance(value, Mapping):
        return [_escaped(inline(value))]
    if all(isinstance(entry, Mapping) and "source" in entry for entry in value.values()):
        rows = [(str(key), inline(e["value"]), str(e["source"])) for key, e in value.items()]
        return _table(("field", "value", "source"), rows)
    return _table(("", "value"), [(str(key), inline(entry)) for key, entry in value.items()])


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    lines += ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows]
    return [*lines, ""]


def _escaped(text: str) -> str:
    """One line that Markdown shows as it is."""
    for character in "\\`*_<>|[]#":
        text = text.replace(character, "\\" + character)
    return " ".join(text.splitlines())
