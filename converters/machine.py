"""What a report says of the machine it was made on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import hermes

_PACKAGES = (
    "torch",
    "litert-torch",
    "litert-converter",
    "ai-edge-litert",
    "ai-edge-quantizer",
    "litert-lm-builder",
    "litert-lm-api",
)


def describe_machine() -> dict[str, Any]:
    """Versions and processor."""
    return {
        "hermes": hermes.__version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
