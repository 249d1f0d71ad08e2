"""What `hermes eval` measured, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def fidelity_lines(rows: Sequence[Mapping[str, float | str]]) -> list[str]:
    """One line per text."""
    lines = [f"{'text':<20}{'tokens':>8}{'mean KL':>10}{'p99 KL':>9}{'top-1':>8}{'perplexity':>20}"]
    lines += [
        f"{row['text']:<20}{row['positions']:>8}{row['kl']:>10.5f}{row['kl_p99']:>9.4f}"
        f"{row['top1']:>8.1%}{row['perplexity']:>10.3f} (float {row['reference_perplexity']:.3f})"
        for row in rows
    ]
    return lines
