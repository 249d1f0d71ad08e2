"""adb, with its many ways to fail turned into one message each."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hermes.errors import DeviceError, ResourceError, UsageError

_SHELL_SECONDS = 120.0
_SLOWEST_BYTES_PER_SECOND = 1e6
_ANDROID_FOLDERS = ("ANDROID_HOME", "ANDROID_SDK_ROOT")
_LOST = ("device offline", "not found", "no devices", "closed", "failed to read copy response")
_TIMED_OUT = -1000


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    status: int
    output: str
    errors: str

    @property
    def said(self) -> str:
        """The last line that tells something."""
        lines = [line for line in (self.errors + self.output).splitlines() if line.strip()]
        return lines[-1].strip() if lines else "nothing was said"


def find_adb() -> str:
    """The adb on the PATH, or that of an Android SDK."""
    found = shutil.which("adb")
    folders = [Path(os.environ[name]) for name in _ANDROID_FOLDERS if os.environ.get(name)]
    for candidate in [folder / "platform-tools" / "adb" for folder in folders]:
        if found is None and candidate.is_file():
            found = str(candidate)
    if found is None:
        raise ResourceError(
            "no adb on this machine",
            expected="adb on the PATH, or ANDROID_HOME naming an Android SDK",
            todo="install Debian's package adb, or Android's platform tools",
        )
    return found


def parse_devices(listing: str) -> dict[str, str]:
    """Serial number -> state, from what `adb devices` prints."""
    rows = [line.split("\t") for line in listing.splitlines() if "\t" in line]
    return {serial.strip(): state.strip() for serial, state, *_ in rows}


def choose_device(devices: dict[str, str], serial: str | None) -> str:
    """The one device that is meant and ready.

    Raises:
        DeviceError: there is none, or it refuses.
        UsageError: several, and none was named.
    """
    listed = [f"{name}: {state}" for name, state in devices.items()]
    if serial is None and len(devices) > 1:
        raise UsageError(
            f"{len(devices)} devices are connected",
            problems=listed,
            expected="one, or a choice",
            todo="name one with --serial",
        )
    if not devices or (serial is not None and serial not in devices):
        missing = "no device is connected" if serial is None else f"no device {serial}"
        raise DeviceError(
            missing,
            problems=listed,
            expected="a phone with USB debugging switched on, seen by `adb devices`",
            todo="connect it, unlock it, and switch on USB debugging in its developer options",
        )
    chosen = serial or next(iter(devices))
    _demand_ready(chosen, devices[chosen])
    return chosen


def _demand_ready(serial: str, state: str) -> None:
    if state == "device":
        return
    if state in ("unauthorized", "authorizing"):
        raise DeviceError(
            f"{serial} has not authorized this computer",
            todo="unlock it and accept the question about USB debugging; if none appears, revoke "
            "the authorizations in its developer options and connect it again",
        )
    raise DeviceError(
        f"{serial} is {state}",
        expected="device",
        todo="connect it again; `adb kill-server` helps if adb itself is confused",
    )


class Adb:
    """One device.

    Args:
        serial: which, if several are connected.

    Raises:
        ResourceError: no adb.
        DeviceError: no device, or it refuses or has gone.
        UsageError: several devices and no serial.
    """

    def __init__(self, serial: str | None = None) -> None:
        self._command = find_adb()
        self.serial = choose_device(self._devices(), serial)

    def shell(self, script: str, timeout: float = _SHELL_SECONDS) -> Done:
        """Run a script in the device's shell; its own failure is the caller's to judge."""
        done = self._run(["-s", self.serial, "shell", script], timeout)
        if done.status != 0 and self.gone(done):
            raise self._lost(done)
        return done

    def demand(self, script: str, what: str) -> str:
        """Run a script that has to work; what it prints."""
        done = self.shell(script)
        if done.status != 0:
            raise DeviceError(f"{self.serial}: could not {what}: {done.said}")
        return done.output

    def push(self, source: Path, target: str) -> Done:
        """Send a file; a failure of the device's file system is the caller's to judge."""
        timeout = 60 + source.stat().st_size / _SLOWEST_BYTES_PER_SECOND
        done = self._run(["-s", self.serial, "push", str(source), target], timeout)
        if done.status != 0 and self.gone(done):
            raise self._lost(done)
        return done

    def gone(self, done: Done) -> bool:
        """The connection and not the command has failed: adb says so, or does not know it now."""
        printed = (done.errors + done.output).splitlines()
        told = [line for line in printed if line.startswith(("adb:", "error:"))]
        if done.status == _TIMED_OUT or any(word in line for line in told for word in _LOST):
            return True
        return self._devices().get(self.serial) != "device"

    def _devices(self) -> dict[str, str]:
        done = self._run(["devices"], _SHELL_SECONDS)
        if done.status != 0:
            raise DeviceError(f"adb does not work: {done.said}")
        return parse_devices(done.output)

    def _lost(self, done: Done) -> DeviceError:
        return DeviceError(
            f"the connection to {self.serial} broke: {done.said}",
            expected="a cable that stays in, and a device that stays on",
            todo="connect it and run the same command again; the model that was there is as it was",
        )

    def _run(self, arguments: list[str], timeout: float) -> Done:
        try:
            done = subprocess.run(
                [self._command, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Done(_TIMED_OUT, "", f"adb {arguments[-1]}: no answer in {timeout:.0f} s")
        except OSError as error:
            raise ResourceError(f"{self._command}: {error}", expected="an adb that runs") from error
        return Done(done.returncode, done.stdout, done.stderr)


def quoted(text: str) -> str:
    """For the device's shell."""
    return shlex.quote(text)
