"""With little memory the float rungs are streamed: the same figures, and the rest is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planted_faults import World, build_world

from converters.proof import ProofOptions, prove
from hermes.report.check import Report


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


def climbed(world: World, folder: Path, memory: int | None) -> Report:
    folder.mkdir()
    options = replace(ProofOptions(), memory=memory, threads=1)
    return prove(world.source, world.rewritten, world.recipe, world.bundle, folder, options).report


def test_streaming_gives_the_same_numbers(world: World, tmp_path: Path) -> None:
    whole = climbed(world, tmp_path / "whole", None)
    streamed = climbed(world, tmp_path / "streamed", 10**4)
    assert whole.passed
    assert streamed.passed
    assert not {3, 4} & set(whole.skipped)
    for rung in (3, 4):
        assert "billion parameters need" in streamed.skipped[rung]
    values = {(check.rung, check.name): check.value for check in whole.checks}
    compared = [check for check in streamed.checks if check.rung in (2, 5)]
    same = [check for check in compared if (check.rung, check.name) in values]
    assert len(same) >= 8
    for check in same:
        assert check.value == pytest.approx(values[check.rung, check.name], rel=1e-3, abs=1e-4)
    # Nothing else proves the prefill signatures then.
    assert any(check.name.startswith("prefill = steps") for check in compared)
