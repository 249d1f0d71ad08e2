"""The values of `--runtime`; apart, so that the command line needs nothing else to list them."""

from __future__ import annotations

from enum import StrEnum


class RuntimeChoice(StrEnum):
    """What else the bundle runs in; `litert` adds nothing.

    `tensorflow` repeats rungs 4 and 5, `arm64` adds rung 8.
    """

    LITERT = "litert"
    TENSORFLOW = "tensorflow"
    ARM64 = "arm64"
