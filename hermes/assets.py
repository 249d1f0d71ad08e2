"""Where the shipped recipes, texts, prompts and the embedded model lie."""

from __future__ import annotations

import sys
from pathlib import Path


def assets_folder() -> Path:
    """The source tree's `assets/`, or `share/hermes` of the environment of an installed wheel."""
    beside = Path(__file__).resolve().parent.parent / "assets"
    return beside if beside.is_dir() else Path(sys.prefix) / "share" / "hermes"
