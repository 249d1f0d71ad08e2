"""What `hermes tune` found, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes.report.wording import size

SHOWN = 10


def tuning_lines(facts: Mapping[str, Any]) -> list[str]:
    """The result, and the matmuls that move the logits most."""
    most = facts["sensitivity"][:SHOWN]
    return [
        facts["description"],
        f"mean KL {facts['kl']:.5f} (base {facts['base_kl']:.5f}), top-1 {facts['top1']:.1%}, "
        f"matrices {size(facts['bytes'])} (base {size(facts['base_bytes'])})",
        "most sensitive:",
        *(f"  {one['unit']:<42}{one['kl']:>10.5f} nats{one['bytes']:>+14,} B" for one in most),
        f"written: {facts['recipe']}",
    ]
