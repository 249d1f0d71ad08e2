"""A finished file gets into place whole, once, or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from converters.publish import publish
from hermes.errors import ResourceError, TargetError

WRITER = """
import signal, sys, time
from pathlib import Path
from converters.publish import publish
# A test runner in the background is started with these ignored, and passes that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with publish(Path(sys.argv[1]), force=True) as temporary:
    temporary.write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def start_writer(target: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_new_target(tmp_path: Path) -> None:
    target = tmp_path / "out.litertlm"
    with publish(target) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.suffix == ".litertlm"
        temporary.write_bytes(b"new")
        assert not target.exists()
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["out.litertlm"]


def test_existing_target_needs_force(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    with pytest.raises(TargetError, match="force"), publish(target):
        pytest.fail("the block must not run")
    with publish(target, force=True) as temporary:
        temporary.write_bytes(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["out"]


def test_failure_keeps_the_old_target_and_no_temporary(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), publish(target, force=True) as temporary:  # noqa: PT012
            temporary.write_bytes(b"half")
            raise error
        assert target.read_bytes() == b"old"
        assert names(tmp_path) == ["out"]


def test_target_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(TargetError, match="exists"), publish(target) as temporary:  # noqa: PT012
        temporary.write_bytes(b"new")
        target.write_bytes(b"somebody else's")
    assert target.read_bytes() == b"somebody else's"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_leave_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    process = start_writer(target)
    process.send_signal(number)
    assert process.wait(20) != 0
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["out"]


def test_busy_while_another_run_writes(tmp_path: Path) -> None:
    target = tmp_path / "out"
    process = start_writer(target)
    try:
        with pytest.raises(TargetError, match="busy"), publish(target, force=True):
            pytest.fail("the block must not run")
    finally:
        process.terminate()
        process.wait(20)
    with publish(target) as temporary:
        temporary.write_bytes(b"mine")
    assert target.read_bytes() == b"mine"


def test_a_killed_run_does_not_block_the_next(tmp_path: Path) -> None:
    target = tmp_path / "out"
    process = start_writer(target)
    process.kill()
    process.wait(20)
    assert names(tmp_path) == [".out.partial"]
    with publish(target) as temporary:
        assert temporary.read_bytes() == b""
        temporary.write_bytes(b"new")
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["out"]


def test_what_a_killed_run_left_under_another_name_stays(tmp_path: Path) -> None:
    """A work folder holds the same file; the next run begins with one of its own."""
    target, kept = tmp_path / "out.litertlm", tmp_path / "kept"
    left = tmp_path / ".out.partial.litertlm"
    left.write_bytes(b"bound")
    os.link(left, kept)
    with publish(target) as part:
        assert part == left
        assert part.read_bytes() == b""
        part.write_bytes(b"new")
    assert target.read_bytes() == b"new"
    assert kept.read_bytes() == b"bound"


def test_many_writers_never_mix(tmp_path: Path) -> None:
    """Each of eight processes either publishes its own bytes or is told why not."""
    code = (
        "import sys; from pathlib import Path; from converters.publish import publish\n"
        "from hermes.errors import TargetError\n"
        "done = 0\n"
        "for _ in range(40):\n"
        "    try:\n"
        "        with publish(Path(sys.argv[1]), force=True) as temporary:\n"
        "            temporary.write_bytes(sys.argv[2].encode() * 200000); done += 1\n"
        "    except TargetError as error:\n"
        "        assert 'busy' in str(error)\n"
        "print(done)\n"
    )
    target = tmp_path / "out"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(target), str(i)], stdout=subprocess.PIPE, text=True
        )
        for i in range(8)
    ]
    counts = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert sum(counts) > 0
    data = target.read_bytes()
    assert len(data) == 200000
    assert len(set(data)) == 1
    assert names(tmp_path) == ["out"]


def test_places_that_are_none(tmp_path: Path) -> None:
    for target, word in ((tmp_path, "folder"), (tmp_path / "no" / "x", "no such folder")):
        with pytest.raises(TargetError, match=word), publish(target):
            pytest.fail("the block must not run")
    with pytest.raises(TargetError), publish(Path("/dev/null"), force=True):
        pytest.fail("the block must not run")


def test_link_to_a_target_is_followed(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    real, link = tmp_path / "store" / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    with publish(link, force=True) as temporary:
        temporary.write_bytes(b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_a_planted_link_as_temporary_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / ".out.partial").symlink_to(victim)
    with pytest.raises(TargetError), publish(tmp_path / "out"):
        pytest.fail("the block must not run")
    assert victim.read_bytes() == b"precious"


def test_disk_full_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="space"), publish(tmp_path / "out") as temporary:
        temporary.write_bytes(b"x")
    assert names(tmp_path) == []


def test_handlers_are_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with publish(tmp_path / "out") as temporary:
        assert signal.getsignal(signal.SIGTERM) is not before
        temporary.write_bytes(b"x")
    assert signal.getsignal(signal.SIGTERM) is before
