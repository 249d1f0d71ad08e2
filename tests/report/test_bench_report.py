"""The benchmark's plot and table, from values alone."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

from hermes.report.bench_table import bench_lines, profile_lines
from hermes.report.svg import line_plot


def test_lines_are_well_formed_and_higher_is_faster() -> None:
    series = {"a <1280>": [(64.0, 100.0), (1024.0, 80.0)], "b": [(64.0, 50.0)]}
    root = ElementTree.fromstring(line_plot(series, "tokens & seconds", "position"))
    lines = [e.get("points", "") for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2
    first = [tuple(map(float, point.split(","))) for point in lines[0].split()]
    assert first[0][0] < first[1][0]
    assert first[0][1] < first[1][1] < float(lines[1].split(",")[1])
    assert "a <1280>" in [element.text for element in root.iter()]
    for empty in ({}, {"x": []}, {"x": [(0.0, 0.0)]}):
        for element in ElementTree.fromstring(line_plot(empty, "", "")).iter():
            assert math.isfinite(float(element.get("y", "0")))


def test_table_of_one_bundle() -> None:
    spread = {"median": 80.0, "low": 70.0, "high": 90.0}
    metrics = ("prefill", "decode", "first_token_seconds", "load_seconds", "peak_memory")
    bundle: dict[str, Any] = dict.fromkeys((*metrics, "first_load_seconds"), spread)
    bundle |= {"first_peak_memory": spread, "path": "x.litertlm", "operators": 1304}
    bundle |= {"weight_bytes": 134_000_000, "cache_bytes": 59_000_000, "bound": 100.0}
    bundle |= {"share_of_bound": 0.8}
    plan = {"prompt": 256, "generate": 128, "threads": 2, "repeat": 5}
    lines = bench_lines({"plan": plan, "bundles": [bundle], "bandwidth": 2.0e10})
    text = "\n".join(lines)
    assert "80.0 tok/s (70.0 to 90.0 tok/s)" in text
    assert "134.0 MB of weights, 59.0 MB of cache" in text
    assert "80%" in text
    assert "A / B" not in text


def test_profile_shares_add_up() -> None:
    rows = [{"operator": f"o{i}", "calls": 30.0, "milliseconds": 2.5} for i in range(4)]
    profile = {"signature": "decode", "milliseconds": 9.0, "profiled_milliseconds": 11.0}
    lines = profile_lines(profile | {"operators": rows})
    assert "operators 10.00 ms" in lines[0]
    assert [line.split()[-1] for line in lines[2:]] == ["25.0%"] * 4
