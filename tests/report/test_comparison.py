"""Fingerprints ignore machines and see verdicts; comparisons name what changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hermes.report.check import Report, at_least, at_most, holds
from hermes.report.comparison import contradictions, fingerprint, shifts


def make(value: float = 0.02, **facts: object) -> Report:
    section = {"kind": "TFLiteModel", "size": 9, "sha256": "ab", "offset": 1}
    return Report(
        [
            at_most("mean KL", 5, value, 0.03, "over 8 positions"),
            at_least("top-1", 5, 0.95, 0.9),
            holds("layout", 0, True, "hf"),
        ],
        facts={"recipe": {"name": "int8"}, "bundle": {"sections": [section]}, **facts},
    )


def test_times_machines_and_values_do_not_matter() -> None:
    assert fingerprint(make()) == fingerprint(make(0.021, seconds={"open": 3.0}, machine="other"))


@pytest.mark.parametrize(
    "other",
    [
        make(0.5),
        make(recipe={"name": "float32"}),
        make(inputs={"model.pt": "cd"}),
        make(bundle={"sections": [{"kind": "TFLiteModel", "size": 9, "sha256": "ac"}]}),
        replace(make(), skipped={1: "no golden logits"}),
    ],
)
def test_verdicts_and_inputs_do(other: Report) -> None:
    assert fingerprint(other) != fingerprint(make())


def test_a_report_read_back_has_the_same_fingerprint() -> None:
    report = make(float("inf"), prompt={"stop_tokens": {2: ["config"]}})
    assert fingerprint(Report.from_dict(report.to_dict())) == fingerprint(report)


def test_what_changed_is_named() -> None:
    now = make(0.04)
    now.checks = now.checks[:2]
    assert contradictions(make(), now) == [
        "rung 0, layout was made and is not any more",
        "rung 5, mean KL: green, now RED (0.02 and 0.04)",
    ]
    assert contradictions(make(), make(0.0201)) == []
    assert shifts(make(), make(0.0201)) == []
    assert shifts(make(), make(0.025)) == ["rung 5, mean KL: 0.02, now 0.025"]
    moved = make()
    moved.checks[0] = replace(moved.checks[0], limit=0.05)
    assert contradictions(make(), moved) == ["rung 5, mean KL: limit 0.03, now 0.05"]
