"""The export card: a report's essentials inside the bundle, and with its numbers beside it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes.errors import BadInputError, ResourceError, VerificationError
from hermes.report.check import Report
from hermes.report.wording import size

CARD_KEY = "hermes_card"
REPORT_KEY = "hermes_report"
CARD_ROOM = 2048
"""Characters that the header keeps free for the card until the ladder has been climbed."""
BLANK_CARD = " " * CARD_ROOM
SUFFIX = ".card.json"

_SCHEMA = 1
_MOST_FILES = 8
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "tie_embeddings",
)
_FIDELITY_RUNG = 5


def essentials(report: Report) -> dict[str, Any]:
    """What the same inputs always give: origin, shapes, recipe and verdict.

    Measured values, times and machines are left out, so that the same conversion on the
    same kind of processor writes the same bytes; they stand on the card beside the bundle.
    """
    facts = report.to_dict()["facts"]
    config, recipe = facts.get("config", {}), facts.get("recipe", {})
    export = recipe.get("export", {})
    card = {
        "schema": _SCHEMA,
        "hermes": facts.get("machine", {}).get("hermes", ""),
        "verdict": report.verdict,
        "checks": dict(Counter(str(check.rung) for check in report.checks)),
        "not_run": sorted(report.skipped),
        "recipe": recipe.get("name", ""),
        "context": export.get("context"),
        "prefill": export.get("prefill"),
        "model": {name: config[name]["value"] for name in _SIZES if name in config},
        "inputs": facts.get("inputs", {}),
    }
    if len(_compact(card)) > CARD_ROOM or len(card["inputs"]) > _MOST_FILES:
        # The report has them all, and its fingerprint stands beside this card in the header.
        card["inputs"] = {"files": len(card["inputs"])}
    return card


def inside(card: Mapping[str, Any]) -> str:
    """The card as the header holds it: ASCII, exactly `CARD_ROOM` characters.

    Raises:
        BadInputError: it does not fit.
    """
    text = _compact(card)
    if len(text) > CARD_ROOM:
        raise BadInputError(
            f"the export card has {len(text)} characters", expected=f"at most {CARD_ROOM}"
        )
    return text.ljust(CARD_ROOM)


def read_inside(value: object) -> dict[str, Any]:
    """The card in a header value; empty if there is none or it is not readable."""
    try:
        card = json.loads(str(value)) if str(value).strip() else {}
    except ValueError:
        return {}
    return card if isinstance(card, dict) else {}


def beside(report: Report, digest: str) -> dict[str, Any]:
    """The card for people and programs: the essentials, hashes, measured values and versions."""
    content = report.to_dict()
    facts = content["facts"]
    bundle = facts.get("bundle", {})
    return {
        **essentials(report),
        "digest": digest,
        "report": facts.get("fingerprint", ""),
        "file": Path(str(bundle.get("path", ""))).name,
        "bytes": bundle.get("bytes"),
        "sha256": bundle.get("sha256"),
        "sections": bundle.get("sections", []),
        "measured": {
            check["name"]: check["value"]
            for check in content["checks"]
            if check["rung"] == _FIDELITY_RUNG and isinstance(check["value"], float)
        },
        "prompt": facts.get("prompt", {}),
        "packages": facts.get("machine", {}).get("packages", {}),
    }


def card_path(bundle: Path) -> Path:
    """Where the card of a bundle lies: its whole name with an ending of its own."""
    return bundle.with_name(bundle.name + SUFFIX)


def write_card(bundle: Path, card: Mapping[str, Any]) -> None:
    """Write the card beside the bundle, replaced as a whole.

    Raises:
        ResourceError: it could not be written; the bundle is not touched.
    """
    target = card_path(bundle)
    part = target.with_name(f".{target.name}.part")
    try:
        try:
            part.write_text(json.dumps(card, indent=2, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(
            f"{target}: the export card could not be written: {error.strerror or error}",
            expected="room beside the bundle, which is complete and in place",
            todo="free some space and convert again, or use the bundle without its card",
        ) from error


def read_card(bundle: Path) -> dict[str, Any] | None:
    """The card beside the bundle, None if there is none.

    Raises:
        BadInputError: it is there and not readable as a card.
    """
    path = card_path(bundle)
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(
            f"{path}: not readable as an export card: {error}", todo="remove it, or copy it again"
        ) from error
    if not isinstance(card, dict):
        raise BadInputError(f"{path}: holds a {type(card).__name__}", expected="an export card")
    return card


def demand_card(bundle: Path, card: Mapping[str, Any] | None, digest: str | None) -> None:
    """Compare the card beside the bundle with the bundle.

    Raises:
        VerificationError: it speaks of another file.
    """
    if card is not None and card.get("digest") != digest:
        raise VerificationError(
            f"{card_path(bundle)}: the card belongs to another file",
            problems=[
                f"the card's digest is {card.get('digest')}",
                f"the bundle's digest is {digest or 'missing: it has no hashes'}",
            ],
            expected="the card that was written with this bundle",
            todo="copy bundle and card together again; the bundle itself is not damaged",
        )


def check_lines(facts: Mapping[str, Any]) -> list[str]:
    """What `hermes check` says of a bundle in which nothing differs."""
    name, count = Path(facts["path"]).name, len(facts["sections"])
    total = size(facts["bytes"])
    if not facts["proven"]:
        return [
            f"{name}: {total}, NOT PROVABLE: this exporter wrote no hashes into the file, so a "
            "changed bit inside a section cannot be seen",
            f"readable: header, {count} sections inside the file, metadata, tokenizer, graph",
            f"SHA-256 of the file, to compare with its source: {facts['sha256']}",
        ]
    inner, outer = facts["inside"], facts["beside"]
    lines = [
        f"{name}: {total}, INTACT: header and {count} sections are the bytes that were exported",
        f"digest {facts['digest']}",
    ]
    if inner:
        origin = ", ".join(map(str, inner.get("inputs", {})))
        lines.append(f"exported by Hermes {inner.get('hermes')}, recipe {inner.get('recipe')}")
        lines.append(f"from {origin}" if origin else "from an unnamed checkpoint")
        lines.append(f"ladder: {inner.get('verdict')}")
    lines.append("no card beside it" if outer is None else "the card beside it belongs to it")
    return lines


def _compact(card: Mapping[str, Any]) -> str:
    return json.dumps(card, separators=(",", ":"), allow_nan=False)
