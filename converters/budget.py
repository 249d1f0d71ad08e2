"""What a tuned recipe must hold."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hermes.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Budget:
    """What must hold: a mean KL in nats, or a file size in bytes; the other one is minimised."""

    kl: float | None = None
    size: int | None = None


def parse_budget(kl: str | None, size: str | None) -> Budget:
    """`KL=0.01` or a number of bytes, exactly one of them."""
    if (kl is None) == (size is None):
        raise UsageError(
            "--budget and --bytes" if kl is not None else "no budget",
            expected="one of --budget KL=0.01 and --bytes 90MB",
        )
    match = re.fullmatch(r"KL=([0-9.eE+-]+)", kl or "")
    units = re.fullmatch(r"([0-9.]+)\s*([kMG]?)B?", size or "")
    try:
        if match is not None:
            return Budget(kl=float(match[1]))
        if units is not None:
            return Budget(size=int(float(units[1]) * _UNITS[units[2]]))
    except ValueError:
        pass
    raise UsageError(
        f"budget {kl or size!r}",
        expected="--budget KL=0.01 (nats) or --bytes 90000000, 90MB",
        todo="correct the budget",
    )
