"""Checks, verdicts and the three written forms."""

from __future__ import annotations

import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hermes.errors import BadInputError
from hermes.report.check import Report, at_least, at_most, equals, holds, measured
from hermes.report.html import to_html
from hermes.report.svg import histogram, position_plot
from hermes.report.tables import print_inspection, print_report
from hermes.report.writers import to_markdown, write_report

HOSTILE = '<script>alert(1)</script> | `x` \n& "quotes"'


@pytest.fixture
def report() -> Report:
    return Report(
        checks=[
            at_most("largest difference", 4, 2.5e-5, 1e-3, "at position 7"),
            at_least("top-1 agreement", 5, 0.81, 0.85, "256 positions"),
            measured("largest KL", 5, math.inf),
            equals("parameters missing", 0, 0, 0),
            holds("template", 7, False, HOSTILE, HOSTILE),
        ],
        skipped={1: "no golden logits"},
        facts={
            "config": {"vocab_size": {"value": 128, "source": "shape of embed_tokens"}},
            "seconds": {"open": 0.25, "verify": 3.0},
            "checkpoint": f"/x/{HOSTILE}",
        },
        series={"KL by position": [0.1, 0.0, math.nan, 3e-4], "largest": [1.0, 2.0]},
        seconds={4: 12.345, 5: 0.5},
    )


def test_limits_and_nan() -> None:
    assert at_most("a", 0, 1.0, 1.0).passed
    assert not at_most("a", 0, math.nan, 1.0).passed
    assert not at_most("a", 0, math.inf, 1.0).passed
    assert at_least("a", 0, 1.0, 1.0).passed
    assert not at_least("a", 0, math.nan, 0.0).passed
    assert not equals("a", 0, 1.0, 2.0).passed
    assert measured("a", 0, math.nan).passed


def test_the_lowest_red_rung_is_named(report: Report) -> None:
    assert not report.passed
    assert report.first_red is not None
    assert report.first_red.rung == 5
    assert report.verdict.startswith("FAILED: first red rung 5 (quantized flatbuffer")
    assert "2 of 5 checks red" in report.verdict


def test_no_checks_is_no_pass() -> None:
    assert not Report().passed
    assert Report().verdict.startswith("NOT VERIFIED")
    assert Report([measured("a", 0, 1)]).verdict == "PASSED: 1 checks on rungs 0"


def test_json_round_trip(report: Report, tmp_path: Path) -> None:
    write_report(report, tmp_path / "out")
    path = tmp_path / "out" / "report.json"
    values = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert values["schema"] == 1
    assert values["passed"] is False
    assert values["first_red_rung"] == 5
    again = Report.read(path)
    assert again.checks == report.checks
    assert again.skipped == report.skipped
    assert again.to_json() == report.to_json()
    assert {item.name for item in path.parent.iterdir()} == {
        "report.json",
        "report.md",
        "report.html",
    }


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "checks": [{}]}']
)
def test_what_is_not_a_report(content: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(BadInputError):
        Report.read(path)


def test_terminal_table(report: Report) -> None:
    stream = io.StringIO()
    print_report(report, stream)
    text = stream.getvalue()
    assert text.splitlines()[0].startswith("FAILED: first red rung 5")
    for piece in (
        "Rung 4 float flatbuffer = exportable module, 12.3 s",
        "2.5e-05",
        "≤ 0.001",
        "≥ 0.85",
        "RED",
        "inf",
    ):
        assert piece in text
    assert "rung 1 reference = training code: not run, no golden logits" in text
    assert "<script>" in text


def test_many_green_cases_share_a_line_and_red_ones_do_not() -> None:
    green = [at_most(f"a = b, case {i}", 3, i / 10, 1.0) for i in range(6)]
    stream = io.StringIO()
    print_report(Report(green), stream)
    assert "a = b, worst of 6: case 5" in stream.getvalue()
    assert "case 4" not in stream.getvalue()
    stream = io.StringIO()
    print_report(Report([*green, at_most("a = b, case 6", 3, 2.0, 1.0)]), stream)
    assert "a = b, case 4" in stream.getvalue()


def test_markdown_keeps_one_line_per_check(report: Report) -> None:
    text = to_markdown(report)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len([row for row in rows if " largest difference " in row]) == 1
    (hostile,) = [row for row in rows if "template" in row]
    assert hostile.count("|") - hostile.count("\\|") == 6
    assert "<script>" not in text.replace("\\<", "")
    assert "| vocab\\_size | 128 | shape of embed\\_tokens |" in text


class Balanced(HTMLParser):
    """Collects tags and insists that they close."""

    empty = ("meta", "br", "col")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.seen.append(tag)
        if tag not in self.empty:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: object) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_page_without_network(report: Report) -> None:
    page = to_html(report)
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert "script" not in parser.seen
    assert parser.seen.count("svg") == 3  # two series, and the distribution of KL
    links = re.findall(r"(?:src|href|url)\s*[=(]\s*\S+", page)
    assert links == []
    assert page.count("http") == page.count('xmlns="http://www.w3.org/2000/svg"')
    assert "first red rung 5" in page


@pytest.mark.parametrize(
    "values", [[], [0.0], [math.nan, math.inf], [1e-9, 5.0], [1.0] * 3, [1e300, 1e-300]]
)
def test_plots_of_any_values_are_well_formed(values: list[float]) -> None:
    for picture in (position_plot(values, HOSTILE), histogram(values, HOSTILE)):
        root = ElementTree.fromstring(picture)
        for name in ("x", "y", "width", "height", "x1", "y1"):
            for element in root.iter():
                assert math.isfinite(float(element.get(name, "0")))


def test_points_of_the_plot_follow_the_values() -> None:
    root = ElementTree.fromstring(position_plot([1.0, 10.0, math.nan, 100.0], "x"))
    lines = [e.get("points", "") for e in root.iter() if e.tag.endswith("polyline")]
    heights = [float(point.split(",")[1]) for line in lines for point in line.split()]
    assert len(lines) == 2
    assert heights[0] > heights[1] > heights[2]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


def test_inspection_table() -> None:
    cache = [{"name": f"kv_cache_k_{i}", "type": "float32", "shape": [1]} for i in range(3)]
    token = {"name": "tokens", "type": "int32", "shape": [1, 8]}
    facts = {
        "path": "m.litertlm",
        "bytes": 140_000_000,
        "version": "1.4.0",
        "metadata": {"Authors": "x"},
        "sections": [{"kind": "TFLiteModel", "offset": 16384, "bytes": 9, "sha256": "ab" * 32}],
        "prompt": {"start_token": None, "stop_tokens": [2, 7], "chat_template": "{% for %}"},
        "models": [
            {
                "signatures": [{"name": "prefill_8", "inputs": [token, *cache], "outputs": cache}],
                "constants": {"int8 per channel": {"tensors": 4, "bytes": 1234}},
            }
        ],
    }
    stream = io.StringIO()
    print_inspection(facts, stream)
    text = stream.getvalue()
    for piece in (
        "140.0 MB",
        "TFLiteModel",
        "2, 7",
        "none",
        "{% for %}",
        "in kv_cache_k_0 and 2 more",
        "int8 per channel",
        "1.2 kB",
    ):
        assert piece in text
