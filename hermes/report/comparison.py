"""A report's fingerprint, and what changed between two reports of one bundle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hermes.report.check import Check, Report
from hermes.report.wording import number

UNVERIFIED = "0" * 64
"""What stands in a bundle that no ladder was climbed with."""

_SECTION_FIELDS = ("kind", "size", "sha256")
_FACTS = ("inputs", "recipe")
_NOTABLE = 0.05


def fingerprint(report: Report) -> str:
    """SHA-256 over what the same inputs always give: inputs, sections, and every verdict.

    Measured values, times and machines are left out, so that the same conversion on the
    same kind of processor writes the same bytes.
    """
    content = report.to_dict()
    facts = content["facts"]
    stable = {
        "checks": [
            {field: check[field] for field in ("rung", "name", "limit", "relation", "passed")}
            for check in content["checks"]
            if check["limit"] is not None
        ],
        "skipped": content["skipped"],
        "config": _values(facts.get("config")),
        "facts": {name: facts.get(name) for name in _FACTS},
        "sections": [
            {field: section.get(field) for field in _SECTION_FIELDS} for section in _sections(facts)
        ],
    }
    text = json.dumps(stable, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def contradictions(earlier: Report, now: Report) -> list[str]:
    """Checks whose verdict, limit or words differ, and checks that only one report has."""
    before, after = _by_name(earlier), _by_name(now)
    found = [f"{_label(check)} was made and is not any more" for check in _only(before, after)]
    found += [f"{_label(check)} was not made before" for check in _only(after, before)]
    for key, old in before.items():
        new = after.get(key)
        if new is None:
            continue
        if old.passed != new.passed:
            words = {True: "green", False: "RED"}
            values = f"{number(old.value)} and {number(new.value)}"
            found.append(f"{_label(old)}: {words[old.passed]}, now {words[new.passed]} ({values})")
        elif old.limit != new.limit:
            found.append(f"{_label(old)}: limit {old.limit}, now {new.limit}")
    return found


def shifts(earlier: Report, now: Report) -> list[str]:
    """Values that moved by more than 5 %, without changing a verdict; another machine's do."""
    after = _by_name(now)
    found = []
    for key, old in _by_name(earlier).items():
        new = after.get(key)
        if new is None or old.value == new.value or old.passed != new.passed:
            continue
        numbers = isinstance(old.value, float) and isinstance(new.value, float)
        if numbers and abs(float(new.value) - float(old.value)) <= _NOTABLE * abs(float(old.value)):
            continue
        found.append(f"{_label(old)}: {number(old.value)}, now {number(new.value)}")
    return found


def _values(config: object) -> dict[str, Any]:
    """The configuration without its sources, which name folders."""
    fields = config if isinstance(config, Mapping) else {}
    return {name: entry.get("value") for name, entry in fields.items()}


def _sections(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    bundle = facts.get("bundle")
    sections = bundle.get("sections", []) if isinstance(bundle, Mapping) else []
    return [section for section in sections if isinstance(section, Mapping)]


def _by_name(report: Report) -> dict[tuple[int, str], Check]:
    return {(check.rung, check.name): check for check in report.checks}


def _only(
    one: Mapping[tuple[int, str], Check], other: Mapping[tuple[int, str], Check]
) -> list[Check]:
    return [check for key, check in one.items() if key not in other]


def _label(check: Check) -> str:
    return f"rung {check.rung}, {check.name}"
