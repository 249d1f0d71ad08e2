"""From a training checkpoint to an answer on a device, with everything real but the silicon."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from arm64 import obtain_sysroot
from real_adb import obtain_adb, real_device, why_no_namespace

from hermes.assets import assets_folder
from hermes.cli import app, run_command
from hermes.errors import ResourceError

NAMED = os.environ.get("ON_THE_PHONE", "")


class Phone:
    """A real adbd in a namespace, and the emulated Arm64 runtime as its runner."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reason = why_no_namespace()
        if reason:
            pytest.skip(reason)
        try:
            self._programs = obtain_adb()
        except ResourceError as error:
            pytest.skip(f"no real adb to test with: {error.found}")
        # Other tests of the process may have moved the cache since it was built there.
        monkeypatch.setenv("XDG_CACHE_HOME", str(obtain_sysroot().path.parent.parent))
        self._folder, self._monkeypatch = folder, monkeypatch
        self.files = folder / "phone"

    def push(
        self, bundle: Path, prompt: str, capsys: pytest.CaptureFixture[str], *more: str
    ) -> dict[str, Any]:
        """`hermes push` with the runner; its report."""
        runner = self._folder / "litert_lm"
        assert run_command(app, ["arm64", "runner", "-o", str(runner)]) == 0
        options = ["--dir", str(self.files), "--runner", str(runner), "--json", *more]
        with real_device(self._programs, self._folder / "device") as device:
            self._monkeypatch.setenv("PATH", f"{device.bin}:{os.environ['PATH']}")
            device.connect(5710)
            capsys.readouterr()
            status = run_command(app, ["push", str(bundle), "--prompt", prompt, *options])
        said = capsys.readouterr()
        assert status == 0, said.out + said.err
        report: dict[str, Any] = json.loads(said.out.splitlines()[-1])
        return report


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Phone:
    return Phone(tmp_path, monkeypatch)


@pytest.mark.slow
def test_checkpoint_to_greedy_tokens_on_the_device(
    phone: Phone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "tiny.litertlm"
    checkpoint = str(assets_folder() / "tiny")
    assert run_command(app, ["convert", checkpoint, "-o", str(bundle), "--no-verify"]) == 0
    report = phone.push(bundle, "ROMEO.\n", capsys, "--bench")
    assert report["passed"]
    answer = report["facts"]["answer"]
    assert answer["device_ids"] == answer["desktop_ids"]
    assert len(answer["device_ids"]) >= 20
    (tokens,) = [item for item in report["checks"] if item["name"].startswith("greedy tokens")]
    assert tokens["value"] == tokens["limit"] == 32
    speed = report["facts"]["benchmark"]
    assert all(speed[name] > 0 for name in ("prefill", "decode", "first_token_seconds"))
    assert sorted(entry.name for entry in phone.files.iterdir()) == ["litert_lm", bundle.name]
    assert (phone.files / bundle.name).read_bytes() == bundle.read_bytes()


@pytest.mark.skipif(not NAMED, reason="ON_THE_PHONE names no bundle; `make demo-arm64` does")
def test_a_bundle_of_your_own(phone: Phone, capsys: pytest.CaptureFixture[str]) -> None:
    report = phone.push(Path(NAMED), "Name the capital of Italy.", capsys)
    answer = report["facts"]["answer"]
    with capsys.disabled():
        print(f"\ndevice:  {answer['device']!r}\ndesktop: {answer['desktop']!r}")
    assert report["passed"]
    assert answer["device_ids"] == answer["desktop_ids"]
