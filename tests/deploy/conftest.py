"""The embedded model as bundles of every recipe, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from converters.pipeline import ConvertOptions, convert
from converters.source import SourceOptions
from hermes.assets import assets_folder


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Recipe -> bundle of the embedded model, context 128; made once, its graph once for all."""
    folder = tmp_path_factory.mktemp("embedded")
    base = tmp_path_factory.getbasetemp()
    # Workers of pytest-xdist have their own folders below a common one.
    root = base.parent if base.name.startswith("popen-") else base
    patch = pytest.MonkeyPatch()

    def make(recipe: str) -> Path:
        target = folder / f"{recipe}.litertlm"
        if not target.is_file():
            patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
            options = ConvertOptions(
                SourceOptions(assets_folder() / "tiny"),
                target,
                recipe=recipe,
                context=128,
                prefill=(1,),
                verify=False,
            )
            convert(options)
            patch.undo()
        return target

    return make


@pytest.fixture(scope="session")
def embedded(converted: Callable[[str], Path]) -> Path:
    """The default recipe."""
    return converted("int8")
