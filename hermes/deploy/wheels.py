"""Python packages for another processor, fetched with pip and unpacked into a folder."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from hermes.errors import ResourceError

_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
_SHOWN_LINES = 6


def pinned(names: Sequence[str]) -> list[str]:
    """The versions that this environment has, so that both processors run the same release."""
    try:
        return [f"{name}=={importlib.metadata.version(name)}" for name in names]
    except importlib.metadata.PackageNotFoundError as error:
        raise ResourceError(
            f"{error.name} is not installed here", expected="the environment that Hermes needs"
        ) from error


def fetch_wheels(
    requirements: Sequence[str], folder: Path, *, processor: str, python: str
) -> list[Path]:
    """Wheels with all they depend on; pip verifies each against its index.

    Args:
        requirements: as pip takes them.
        folder: wheels that are there already are not fetched again.
        processor: as in platform tags, `aarch64`.
        python: version of the Python that will import them, `3.11`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [option for name in _PLATFORMS for option in ("--platform", f"{name}_{processor}")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:"]
    command += ["--python-version", python, "--dest", str(folder), *platforms, *requirements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "WARNING" not in line]
        raise ResourceError(
            f"pip could not fetch {', '.join(requirements)} for {processor}",
            problems=lines[-_SHOWN_LINES:],
            expected="pip, and a package index that can be reached",
            todo="connect to the network; what was fetched so far is kept",
        )
    return sorted(folder.glob("*.whl"))


def unpack_wheels(wheels: Sequence[Path], folder: Path) -> None:
    """Write the packages below `folder`, which becomes importable."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
