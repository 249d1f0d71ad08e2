"""Whether a finished bundle will load and behave in LiteRT-LM, by static rules.

A rule has a name, a severity, an explanation and a way out. An `error` means that the runtime
refuses the file, dies, or answers wrongly; a `warning` that it works worse than it could, or not
everywhere. Every rule states what LiteRT-LM 0.18.1 was observed to do, or names its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hermes.deploy.lint_facts import BundleFacts

Severity = Literal["error", "warning"]
_SHOWN = 3
"""Findings of one rule that are listed."""


@dataclass(frozen=True)
class Rule:
    """One question to a bundle.

    Attributes:
        name: short and stable, for reports and searches.
        why: what happens in the runtime or the shop, in plain words.
        todo: the way out.
        check: what was found, a line each; nothing where the rule holds.
    """

    name: str
    severity: Severity
    why: str
    todo: str
    check: Callable[[BundleFacts], Iterable[str]]


@dataclass(frozen=True)
class Finding:
    """A rule that does not hold."""

    rule: str
    severity: Severity
    found: str
    why: str
    todo: str

    def to_dict(self) -> dict[str, str]:
        """JSON values."""
        return asdict(self)


class RuleBook:
    """The rules of one topic, in the order they are written down."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def rule(
        self, name: str, severity: Severity, why: str, todo: str
    ) -> Callable[[Callable[[BundleFacts], Iterable[str]]], Callable[[BundleFacts], Iterable[str]]]:
        """Enter the decorated function as a rule."""

        def enter(
            check: Callable[[BundleFacts], Iterable[str]],
        ) -> Callable[[BundleFacts], Iterable[str]]:
            self.rules.append(Rule(name, severity, why, todo, check))
            return check

        return enter


def all_rules() -> tuple[Rule, ...]:
    """Every rule: container, graph, tokenizer, prompt, device."""
    from hermes.deploy import (
        lint_container,
        lint_device,
        lint_graph,
        lint_prompt,
        lint_template,
        lint_tokenizer,
        lint_weights,
    )

    books = (
        lint_container.BOOK,
        lint_graph.BOOK,
        lint_weights.BOOK,
        lint_tokenizer.BOOK,
        lint_prompt.BOOK,
        lint_template.BOOK,
        lint_device.BOOK,
    )
    return tuple(rule for book in books for rule in book.rules)


def lint(facts: BundleFacts) -> list[Finding]:
    """Every rule that does not hold, errors first."""
    found = [finding for rule in all_rules() for finding in _apply(rule, facts)]
    return sorted(found, key=lambda finding: finding.severity)


def _apply(rule: Rule, facts: BundleFacts) -> Iterator[Finding]:
    lines = list(rule.check(facts))
    if len(lines) > _SHOWN:
        # A fault of the exporter repeats in every layer.
        lines[_SHOWN - 1 :] = [f"{lines[_SHOWN - 1]} (and {len(lines) - _SHOWN} more alike)"]
    for line in lines:
        yield Finding(rule.name, rule.severity, line, rule.why, rule.todo)


def lint_lines(findings: Iterable[Finding]) -> list[str]:
    """Findings for a terminal: what was found, why it matters, what to do."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.severity}: {finding.rule}: {finding.found}")
        lines.append(f"  why: {finding.why}")
        lines.append(f"  what to do: {finding.todo}")
    return lines


def verdict(findings: Iterable[Finding]) -> str:
    """One sentence."""
    severities = [finding.severity for finding in findings]
    errors, warnings = severities.count("error"), severities.count("warning")
    if not severities:
        return f"no findings: {len(all_rules())} rules hold"
    return f"{errors} error(s), {warnings} warning(s) by {len(all_rules())} rules"


def rules_lines() -> list[str]:
    """Every rule for a terminal."""
    lines = []
    for rule in all_rules():
        lines += [
            f"{rule.name} ({rule.severity})",
            f"  why: {rule.why}",
            f"  what to do: {rule.todo}",
        ]
    return lines


def rules_as_json() -> list[dict[str, Any]]:
    """Every rule without its check."""
    return [
        {"rule": rule.name, "severity": rule.severity, "why": rule.why, "todo": rule.todo}
        for rule in all_rules()
    ]
