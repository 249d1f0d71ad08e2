"""What long work reports about itself while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """One step of a stage.

    Attributes:
        stage: what is being done, in a few words; the same words until the stage ends.
        done: units finished.
        total: units there are; 0 if unknown.
        unit: `bytes`, `tensors`, or empty.
        detail: the current item.
        size: bytes written so far; 0 if none are counted.
    """

    stage: str
    done: int = 0
    total: int = 0
    unit: str = ""
    detail: str = ""
    size: int = 0

    def counted(self, seconds: float) -> str:
        """Units, bytes, rate and time left, `seconds` after the stage began; '' if uncounted.

        The time left assumes that the rest costs as much a unit as what is done.
        """
        parts = []
        if self.total:
            parts.append(f"{self.done}/{self.total} {self.unit}".rstrip())
        if self.size:
            parts.append(f"{self.size / 1e6:.1f} MB")
            if seconds > 0:
                parts.append(f"{self.size / 1e6 / seconds:.1f} MB/s")
        if 0 < self.done < self.total:
            parts.append(f"{seconds * (self.total - self.done) / self.done:.0f} s left")
        return ", ".join(parts)


OnProgress = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Report to nobody."""
