"""Which layout a file's names belong to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hermes.errors import BadInputError, UnsupportedModelError, UsageError
from hermes.layouts.table import Layout, Rule, template
from hermes.layouts.unsupported import unsupported_layout

# Below this share of known names a file is not of any layout, and a list of missing names no help.
_LEAST_SHARE = 0.3


@dataclass
class Match:
    """A layout laid over a file's names.

    Attributes:
        layout: the table.
        prefix: what stands before every name of the table.
        found: (source name of the table, layer or None) -> name in the file.
        unmatched: names that the table does not know.
    """

    layout: Layout
    prefix: str
    found: dict[tuple[str, int | None], str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    @property
    def layers(self) -> int:
        """Highest layer number plus one."""
        return 1 + max((layer for _, layer in self.found if layer is not None), default=-1)

    def rule_of(self, target: str) -> Rule | None:
        """The rule that has a source in the file and gives this Hermes name (`{}` for layers)."""
        present = {source for source, _ in self.found}
        for rule in self.layout.rules:
            if target in rule.targets and present.intersection(rule.sources):
                return rule
        return None


def match(layout: Layout, names: Sequence[str]) -> Match:
    """Lay a table over names; the prefix is the one that fits most of them."""
    by_length: dict[int, set[str]] = {}
    for source in layout.sources():
        by_length.setdefault(source.count(".") + 1, set()).add(source)
    hits: dict[str, list[tuple[str, tuple[str, int | None]]]] = {}
    for name in names:
        parts, shapes = name.split("."), template(name).split(".")
        for length, sources in by_length.items():
            source = ".".join(shapes[-length:])
            if length <= len(parts) and source in sources:
                key = _key(source, parts[-length:])
                if key is not None:
                    hits.setdefault(".".join(parts[:-length]), []).append((name, key))
    if not hits:
        return Match(layout, "", {}, list(names))
    prefix = max(hits, key=lambda found: (len(hits[found]), -len(found)))
    found = {key: name for name, key in hits[prefix]}
    used = set(found.values())
    dotted = f"{prefix}." if prefix else ""
    return Match(layout, dotted, found, [name for name in names if name not in used])


def _key(source: str, parts: Sequence[str]) -> tuple[str, int | None] | None:
    if "{}" not in source:
        return source, None
    number = parts[source.split(".").index("{}")]
    return (source, int(number)) if re.fullmatch(r"0|[1-9]\d{0,3}", number) else None


def choose(
    layouts: Sequence[Layout],
    names: Sequence[str],
    family: str | None,
    wanted: str,
    model_type: object = None,
    origin: str = "",
) -> tuple[Match, list[str]]:
    """The best match and the evidence for it.

    The configuration's spelling and model type tell tables with the same names apart.

    Raises:
        UsageError: no layout of that name.
        BadInputError: the names belong to none of the tables.
    """
    known = list(layouts)
    if wanted != "auto":
        known = [layout for layout in known if layout.name == wanted]
        if not known:
            raise UsageError(
                f"no layout {wanted!r}",
                expected=f"auto or one of {', '.join(layout.name for layout in layouts)}",
                todo="pick one, or leave --layout away",
            )
    matches = [match(layout, names) for layout in known]

    def quality(candidate: Match) -> tuple[int, bool, int, int]:
        families = candidate.layout.families
        fit = len(families) - families.index(family) if family in families else 0
        typed = model_type in candidate.layout.model_types
        return len(candidate.found), typed, fit, -len(candidate.prefix)

    best = max(matches, key=quality)
    if len(best.found) < _LEAST_SHARE * len(names) or not best.layers:
        _refuse_unknown(names, [layout.name for layout in known], best, origin)
    return best, _evidence(best, matches, len(names), family, wanted)


def _refuse_unknown(names: Sequence[str], known: Sequence[str], best: Match, origin: str) -> None:
    foreign = unsupported_layout(names)
    if foreign:
        raise UnsupportedModelError(
            f"{origin}: these are the tensors of {foreign[0]}: {foreign[1]}",
            expected=f"a Llama-type model in one of the layouts {', '.join(known)}",
            todo="Hermes does not compute this; bring a Llama-type model",
        )
    forms = Counter(template(name) for name in names)
    raise BadInputError(
        f"{origin}: the tensors' names belong to no known layout; {len(best.found)} of "
        f"{len(names)} are {best.layout.title} names",
        problems=[f"{form} ({count})" for form, count in forms.most_common(12)],
        expected=f"names of one of: {', '.join(known)}",
        todo="a new layout is one table file, see CONTRIBUTING.md",
    )


def _evidence(
    best: Match, matches: Sequence[Match], total: int, family: str | None, wanted: str
) -> list[str]:
    lines = [f"{len(best.found)} of {total} tensor names are {best.layout.title} names"]
    if best.prefix:
        lines.append(f"prefix {best.prefix!r} before all of them")
    if family is not None:
        lines.append(f"configuration in {family} spelling")
    others = [
        other.layout.name
        for other in matches
        if other is not best and len(other.found) == len(best.found)
    ]
    if others:
        lines.append(f"the same names also belong to {', '.join(others)}")
    if wanted != "auto":
        lines.append(f"layout {wanted} asked for")
    return lines
