"""One cache of graphs for all tests of this folder and all workers, outside the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def graph_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist have their own folders below a common one.
    root = base.parent if base.name.startswith("popen-") else base
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(Path(root) / "cache"))
    yield
    patch.undo()
