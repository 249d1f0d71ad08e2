"""Every hostile file: the right error, at once, in little memory, with nothing run or written."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
from hostile_files import CANARY, HOSTILE
from mapped_logits import logits_of, mapped

from hermes.errors import HermesError

_SECONDS = 5.0
_KILOBYTES = 150_000


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker, code = HOSTILE[name]
    folder = tmp_path / "in"
    folder.mkdir()
    path = maker(folder)
    monkeypatch.chdir(tmp_path)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(HermesError) as caught:
        logits_of(mapped(path))
    assert time.perf_counter() - started < _SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _KILOBYTES
    assert caught.value.exit_code == code, str(caught.value)
    assert "weights_only=False" not in str(caught.value)
    # A fault must be found as itself, not by chance because no configuration was given.
    assert "nothing tells" not in str(caught.value) or name.startswith("config")
    assert len(str(caught.value)) < 4000
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]
    assert not list(tmp_path.rglob(f"*{CANARY}*"))


def test_there_are_at_least_sixty() -> None:
    assert len(HOSTILE) >= 60
