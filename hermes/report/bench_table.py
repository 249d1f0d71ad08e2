"""What `hermes bench` measured, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hermes.report.wording import size

Row = tuple[str, str, Callable[[float], str]]


def _rate(value: float) -> str:
    return f"{value:.0f} tok/s" if value >= 200 else f"{value:.1f} tok/s"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


ROWS: tuple[Row, ...] = (
    ("prefill", "prefill", _rate),
    ("decode", "decode", _rate),
    ("time to first token", "first_token_seconds", _seconds),
    ("first load, packs the weights", "first_load_seconds", _seconds),
    ("later load, weight cache", "load_seconds", _seconds),
    ("peak memory, first start", "first_peak_memory", size),
    ("peak memory, later", "peak_memory", size),
)
"""Label, name in the facts, spelling."""


def bench_lines(facts: Mapping[str, Any]) -> list[str]:
    """The plan, then one line per quantity with one column per bundle."""
    plan, bundles = facts["plan"], facts["bundles"]
    lines = [
        f"{plan['prompt']} tokens fed, {plan['generate']} generated, {plan['threads']} threads; "
        f"median of {plan['repeat']} runs (smallest to largest)"
    ]
    header = ["", *(f"{chr(65 + index)}" for index in range(len(bundles)))]
    rows = [header]
    if "ratios" in facts:
        header.append("A / B, run by run")
    for label, name, spell in ROWS:
        row = [label, *(_spread(bundle[name], spell) for bundle in bundles)]
        rows.append(row + _ratio(facts, name))
    rows.append(["read per token", *(_traffic(bundle) for bundle in bundles)])
    rows.append(["operators per token", *(str(b["operators"]) for b in bundles)])
    bandwidth = facts.get("bandwidth")
    if bandwidth:
        rows.append(["bandwidth bound", *(_rate(b["bound"]) for b in bundles)])
        rows.append(["share of the bound", *(f"{b['share_of_bound']:.0%}" for b in bundles)])
    lines += _aligned(rows)
    if bandwidth:
        lines.append(
            f"bound: {size(bandwidth)} per second read by numpy on {plan['threads']} threads, "
            "divided by the bytes per token"
        )
    lines += [f"{chr(65 + index)}: {b['path']}" for index, b in enumerate(bundles)]
    return lines


def profile_lines(profile: Mapping[str, Any]) -> list[str]:
    """Operators by their share of one call, largest first."""
    total = sum(row["milliseconds"] for row in profile["operators"])
    head = (
        f"one call of {profile['signature']}: {profile['milliseconds']:.2f} ms, of which operators "
        f"{total:.2f} ms; {profile['profiled_milliseconds']:.2f} ms while profiled"
    )
    rows = [["operator", "calls", "ms", "share"]]
    rows += [
        [
            row["operator"],
            f"{row['calls']:.0f}",
            f"{row['milliseconds']:.3f}",
            f"{row['milliseconds'] / total:.1%}" if total else "",
        ]
        for row in profile["operators"]
    ]
    return [head, *_aligned(rows)]


def call_lines(facts: Mapping[str, Any]) -> list[str]:
    """Milliseconds of a call at every position: mean of the copies, and their range."""
    plan = facts["plan"]
    head = (
        f"calls of {plan['signature']}, {plan['threads']} threads, {plan['copies']} copies of each "
        f"bundle, {plan['rounds']} rounds: median milliseconds"
    )
    rows = [["position", "bundle", "wall (copies)", "processor", "time / A's"]]
    for row in facts["calls"]:
        for index, times in enumerate(row):
            wall, cpu = times["wall_ms"], times["cpu_ms"]
            rows.append(
                [
                    "" if index else str(times["position"]),
                    chr(65 + index),
                    f"{sum(wall) / len(wall):.2f} ({min(wall):.2f} to {max(wall):.2f})",
                    f"{sum(cpu) / len(cpu):.2f}",
                    f"{times['ratio']:.3f}" if index else "",
                ]
            )
    names = [f"{chr(65 + index)}: {path}" for index, path in enumerate(facts["bundles"])]
    return [head, *_aligned(rows), *names]


def _spread(values: Mapping[str, float], spell: Callable[[float], str]) -> str:
    low, high = spell(values["low"]), spell(values["high"])
    return f"{spell(values['median'])} ({low.split()[0]} to {high})"


def _traffic(bundle: Mapping[str, Any]) -> str:
    weights, cache = bundle["weight_bytes"], bundle["cache_bytes"]
    return f"{size(weights)} of weights, {size(cache)} of cache"


def _ratio(facts: Mapping[str, Any], name: str) -> list[str]:
    ratio = facts.get("ratios", {}).get(name)
    if ratio is None:
        return []
    return [f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    columns = max(len(row) for row in rows)
    widths = [max(len(row[c]) for row in rows if c < len(row)) for c in range(columns)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
