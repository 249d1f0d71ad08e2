"""`hermes verify --runtime tensorflow`: rungs 4 and 5 once more."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from planted_faults import World, build_world

from hermes.cli import app, run_command

pytestmark = pytest.mark.skipif(
    find_spec("tensorflow") is None, reason="the extra `tensorflow` is absent"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


def test_rungs_4_and_5_are_repeated(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, recipe = str(world.source.checkpoint.path), str(world.folder / "small.toml")
    arguments = [str(world.bundle), "--against", checkpoint, "--recipe", recipe, "--json"]
    assert run_command(app, ["verify", *arguments, "--runtime", "tensorflow"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    again = [check for check in report["checks"] if "in TensorFlow" in check["name"]]
    assert {check["rung"] for check in again} == {4, 5}
    assert len([check for check in again if check["limit"] is not None]) >= 6
    names = [(check["rung"], check["name"]) for check in report["checks"]]
    assert len(names) == len(set(names))
