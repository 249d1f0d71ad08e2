"""Ties a bundle to its report, and a repeated report to the first one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from converters.bundle import Bundle, read_bundle, stamp_metadata
from converters.bundle_reader import DIGEST_KEY, hash_file
from converters.inputs import top_files
from converters.source import Source
from hermes.deploy.card import CARD_KEY, REPORT_KEY, beside, essentials, inside
from hermes.errors import VerificationError
from hermes.report.check import Report
from hermes.report.comparison import UNVERIFIED, contradictions, fingerprint

__all__ = ["REPORT_KEY", "demand_same", "hash_file", "input_hashes", "seal"]


def seal(bundle: Path, report: Report) -> dict[str, Any]:
    """Write the report's fingerprint and the export card into the bundle's metadata, in place.

    Only the header changes: sections, and so all that the report says of them, stay as they are.

    Returns:
        The card that belongs beside the bundle.
    """
    mark = fingerprint(report) if report.checks else UNVERIFIED
    stamp_metadata(bundle, {REPORT_KEY: mark, CARD_KEY: inside(essentials(report))})
    if report.checks:
        report.facts["fingerprint"] = mark
    described = report.facts.get("bundle")
    if isinstance(described, dict):
        described["sha256"] = hash_file(bundle)
    digest = read_bundle(bundle, hashes=False).metadata[DIGEST_KEY]
    return beside(report, str(digest))


def demand_same(bundle: Path, earlier: Report, now: Report) -> None:
    """Compare a repeated report with an earlier one of the same bundle.

    Raises:
        VerificationError: the earlier report belongs to another bundle, or a verdict changed.
    """
    problems = _belongs(read_bundle(bundle, hashes=False), earlier) + contradictions(earlier, now)
    if problems:
        raise VerificationError(
            f"{bundle}: the repeated checks contradict the report",
            problems=problems,
            expected="the same checks with the same verdicts",
            todo="repeat with the options the report was made with (see its command)",
        )


def _belongs(bundle: Bundle, report: Report) -> list[str]:
    sealed = str(bundle.metadata.get(REPORT_KEY, ""))
    if sealed in ("", UNVERIFIED):
        return []
    mark = fingerprint(report)
    if mark == sealed:
        return []
    return [f"the bundle was published with report {sealed[:16]}..., this one is {mark[:16]}..."]


def input_hashes(source: Source, digest: Callable[[Path], str] = hash_file) -> dict[str, str]:
    """SHA-256 of the checkpoint's files and of the tokenizer, by file name."""
    hashes = {file.name: digest(file) for file in top_files(source.checkpoint.path)}
    hashes["tokenizer as bundled"] = hashlib.sha256(source.tokenizer.data).hexdigest()
    return hashes
