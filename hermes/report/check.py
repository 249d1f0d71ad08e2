"""Check and Report: what was measured, against which limit, with what outcome."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from hermes.errors import BadInputError

SCHEMA_VERSION = 1

RUNG_NAMES = {
    0: "keys and shapes",
    1: "reference = training code",
    2: "rewrites = reference",
    3: "exportable module = reference",
    4: "float flatbuffer = exportable module",
    5: "quantized flatbuffer against the reference",
    6: "tokenizer and prompt contract",
    7: "LiteRT-LM = flatbuffer",
    8: "device = LiteRT-LM",
}


@dataclass(frozen=True)
class Check:
    """One measured value and its verdict.

    Attributes:
        name: what was measured.
        rung: index into `RUNG_NAMES`.
        value: the number, or a few words where there is none.
        limit: the bar it had to meet; None for a value that is only reported.
        passed: the verdict.
        detail: where, over what, and what it means when it failed.
        relation: how `value` had to compare to `limit`.
    """

    name: str
    rung: int
    value: float | str
    limit: float | None
    passed: bool
    detail: str = ""
    relation: Literal["<=", ">=", "="] = "<="


def at_most(name: str, rung: int, value: float, limit: float, detail: str = "") -> Check:
    """Passed if value <= limit; NaN never passes."""
    return Check(name, rung, float(value), limit, bool(value <= limit), detail, "<=")


def at_least(name: str, rung: int, value: float, limit: float, detail: str = "") -> Check:
    """Passed if value >= limit; NaN never passes."""
    return Check(name, rung, float(value), limit, bool(value >= limit), detail, ">=")


def equals(name: str, rung: int, value: float, wanted: float, detail: str = "") -> Check:
    """Passed if value == wanted."""
    return Check(name, rung, float(value), wanted, bool(value == wanted), detail, "=")


def holds(name: str, rung: int, passed: bool, value: str, detail: str = "") -> Check:
    """A statement without a number."""
    return Check(name, rung, value, None, passed, detail)


def measured(name: str, rung: int, value: float, detail: str = "") -> Check:
    """A number without a limit: reported, never red."""
    return Check(name, rung, float(value), None, True, detail)


@dataclass
class Report:
    """All checks of one run, with what they were made on.

    Attributes:
        checks: in the order they were made.
        skipped: rung -> why it was not run.
        facts: JSON values by topic: config with the source of each value, key report, versions,
            hashes, timings, memory.
        series: named lists of numbers for the plots.
        seconds: rung -> what its own work took; rungs that ran beside others count in full.
    """

    checks: list[Check] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Something was checked and nothing is red."""
        return bool(self.checks) and self.first_red is None

    @property
    def first_red(self) -> Check | None:
        """The red check of the lowest rung: each rung compares neighbours, so it is the cause."""
        red = [check for check in self.checks if not check.passed]
        return min(red, key=lambda check: check.rung) if red else None

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.checks:
            return "NOT VERIFIED: no check was run"
        red = self.first_red
        if red is None:
            rungs = sorted({check.rung for check in self.checks})
            names = ", ".join(str(rung) for rung in rungs)
            return f"PASSED: {len(self.checks)} checks on rungs {names}"
        count = sum(not check.passed for check in self.checks)
        return (
            f"FAILED: first red rung {red.rung} ({RUNG_NAMES[red.rung]}): {red.name}; "
            f"{count} of {len(self.checks)} checks red"
        )

    def rungs(self) -> list[tuple[int, Sequence[Check]]]:
        """Checks grouped by rung, lowest first."""
        numbers = sorted({check.rung for check in self.checks})
        return [(n, [check for check in self.checks if check.rung == n]) for n in numbers]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; numbers that JSON lacks become the words nan, inf and -inf."""
        return {
            "schema": SCHEMA_VERSION,
            "passed": self.passed,
            "verdict": self.verdict,
            "first_red_rung": None if self.first_red is None else self.first_red.rung,
            "checks": [_plain(vars(check)) for check in self.checks],
            "skipped": {str(rung): reason for rung, reason in sorted(self.skipped.items())},
            "seconds": {str(rung): round(spent, 2) for rung, spent in self.seconds.items()},
            "facts": _plain(self.facts),
            "series": _plain(self.series),
        }

    def to_json(self) -> str:
        """Indented JSON of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """Restore a report written by `to_dict`.

        Raises:
            BadInputError: another schema version, or not a report.
        """
        if values.get("schema") != SCHEMA_VERSION:
            raise BadInputError(
                f"report schema {values.get('schema')!r}", expected=f"schema {SCHEMA_VERSION}"
            )
        try:
            checks = [Check(**_restored(entry)) for entry in values["checks"]]
            skipped = {int(rung): str(reason) for rung, reason in values["skipped"].items()}
            series = {
                name: [float(number) for number in numbers]
                for name, numbers in values["series"].items()
            }
            seconds = {int(n): float(spent) for n, spent in values.get("seconds", {}).items()}
            return cls(checks, skipped, dict(values["facts"]), series, seconds)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInputError(f"not a Hermes report: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a report.json."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise BadInputError(f"{path}: not readable as JSON: {error}") from error
        if not isinstance(values, dict):
            raise BadInputError(f"{path}: holds a {type(values).__name__}", expected="a report")
        return cls.from_dict(values)


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [_plain(item) for item in items]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def _restored(entry: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(entry)
    for name in ("value", "limit"):
        if values[name] in ("nan", "inf", "-inf"):
            values[name] = float(cast("str", values[name]))
    return values
