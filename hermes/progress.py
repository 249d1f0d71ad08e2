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
    """

    stage: str
    done: int = 0
    total: int = 0
    unit: str = ""
    detail: str = ""


OnProgress = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Report to nobody."""
