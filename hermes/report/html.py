"""The report as one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from hermes.report.check import Check, Report
from hermes.report.svg import histogram, position_plot, share_plot
from hermes.report.wording import heading, inline, limit, mark, number, skipped

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d5dae0; --good: #1a7f37;
  --bad: #b42318; --mark: #2563a8; --soft: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #15181c; --line: #343a41;
  --good: #4cc26a; --bad: #ff7b6b; --mark: #6cb0f5; --soft: #1e2329; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
.verdict { font-size: 1.25rem; font-weight: 600; padding: .75rem 1rem; border-left: 6px solid;
  background: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
td.mark { white-space: nowrap; font-weight: 600; } table.rung { table-layout: fixed; }
.rung col.mark { width: 2.6rem; } .rung col.check { width: 34%; }
.rung col.value, .rung col.limit { width: 5.5rem; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
h2 { font-size: 1.05rem; margin: 1.5rem 0 .25rem; }
figure { margin: 1rem 0; } figcaption { font-weight: 600; }
.plot { width: 100%; height: auto; } .line { fill: none; stroke: var(--mark);
  stroke-width: 1.2; stroke-linecap: round; }
.bar { fill: var(--mark); } .grid { stroke: var(--line); stroke-width: 1; }
.tick { fill: var(--ink); font-size: 11px; }
details { margin: .5rem 0; } summary { cursor: pointer; font-weight: 600; }
"""


def to_html(report: Report) -> str:
    """Verdict, ladder, plots, what was not run, facts."""
    kind = "good" if report.passed else "bad"
    parts = [
        f'<p class="verdict {kind}">{escape(report.verdict)}</p>',
        *(_rung(heading(report, index), checks) for index, checks in report.rungs()),
        *_skipped(report),
        *_plots(report.series),
        *(_fact(topic, value) for topic, value in report.facts.items()),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Hermes report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        "<h1>Hermes report</h1>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _rung(title: str, checks: Sequence[Check]) -> str:
    rows = "".join(_check(check) for check in checks)
    head = (
        '<tr><th></th><th>check</th><th class="number">value</th><th class="number">limit</th>'
        "<th>detail</th></tr>"
    )
    columns = "".join(f'<col class="{name}">' for name in ("mark", "check", "value", "limit"))
    columns = f"<colgroup>{columns}<col></colgroup>"
    title = f"<h2>{escape(title)}</h2>"
    return f'{title}\n<table class="rung">{columns}{head}{rows}</table>'


def _check(check: Check) -> str:
    kind = "good" if check.passed else "bad"
    return (
        f'<tr><td class="mark {kind}">{mark(check)}</td><td>{escape(check.name)}</td>'
        f'<td class="number">{escape(number(check.value))}</td>'
        f'<td class="number">{escape(limit(check))}</td><td>{escape(check.detail)}</td></tr>'
    )


def _skipped(report: Report) -> list[str]:
    if not report.skipped:
        return []
    items = "".join(f"<li>{escape(line)}</li>" for line in skipped(report))
    return [f"<h2>Not run</h2>\n<ul>{items}</ul>"]


def _plots(series: Mapping[str, list[float]]) -> list[str]:
    figures = []
    for name, values in series.items():
        if not values:
            continue
        figures.append(_figure(name, _plot(name, values)))
        if name.startswith("KL"):
            figures.append(_figure("Distribution of KL", histogram(values, "KL")))
    return figures


def _plot(name: str, values: Sequence[float]) -> str:
    if name.startswith("agreement"):
        return share_plot(values, name)
    return position_plot(values, name, "layer" if "by layer" in name else "position")


def _figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def _fact(topic: str, value: object) -> str:
    title = escape(topic.replace("_", " "))
    if not isinstance(value, Mapping):
        return f"<p><b>{title}</b>: {escape(inline(value))}</p>"
    rows = ""
    for key, entry in value.items():
        if isinstance(entry, Mapping) and set(entry) == {"value", "source"}:
            cells = (inline(entry["value"]), str(entry["source"]))
        else:
            cells = (inline(entry), "")
        rows += f"<tr><th>{escape(str(key))}</th><td>{escape(cells[0])}</td>"
        rows += f"<td>{escape(cells[1])}</td></tr>"
    return f"<details><summary>{title}</summary><table>{rows}</table></details>"
