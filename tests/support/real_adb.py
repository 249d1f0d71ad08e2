"""A real adb and a real adbd in a network namespace of their own; nothing here imitates either.

The packages come from Debian and are unpacked into the user's cache. The programs start through
their own dynamic loader, so that no library path leaks into the device's shell.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hermes.deploy.debian import BACKPORTS, DebianPackages, host_architecture, unpack
from hermes.deploy.sysroot import cache_folder

_TOOLS = "usr/lib/android-sdk/platform-tools"
_LOADERS = {"amd64": "lib64/ld-linux-x86-64.so.2", "arm64": "lib/ld-linux-aarch64.so.1"}
_SYSTEMS = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
_SERVER_PORT = ":13AD"
"""5037, as the kernel lists it."""
# SIOCSIFFLAGS with IFF_UP; then the namespace lives until its standard input ends.
_HOLDER = """
import fcntl, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))
print("ready", flush=True)
sys.stdin.read()
"""


def why_no_namespace() -> str:
    """Why this machine cannot make a network namespace; '' if it can."""
    for name in ("unshare", "nsenter"):
        if shutil.which(name) is None:
            return f"no {name} (util-linux) on this machine"
    done = subprocess.run(
        ["unshare", "-Urnm", "true"], capture_output=True, text=True, timeout=30, check=False
    )
    return f"no user namespaces here: {done.stderr.strip()}" if done.returncode else ""


def obtain_adb() -> Path:
    """The folder with both, fetched once.

    Raises:
        ResourceError: no network, or no apt.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    target, made, work = cache / "adb", cache / "adb.new", cache / "adb.fetched"
    with (cache / "adb.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            packages = DebianPackages(work, host_architecture()).fetch(
                ["adb", "adbd"], release=BACKPORTS
            )
            shutil.rmtree(made, ignore_errors=True)
            unpack(packages, made)
            made.rename(target)
            shutil.rmtree(work)
    return target


class Device:
    """A namespace with an adb server and as many daemons as are started.

    Args:
        programs: `obtain_adb()`.
        folder: for the wrapper of adb, its keys and its logs.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        self._holder = subprocess.Popen(
            ["unshare", "-Urnm", sys.executable, "-c", _HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        wrapper = self.bin / "adb"
        words = " ".join(f"'{word}'" for word in self._inside(self._program("adb")))
        wrapper.write_text(f'#!/bin/sh\nHOME={folder} exec {words} "$@"\n', encoding="utf-8")
        wrapper.chmod(0o755)
        self._start([*self._program("adb"), "nodaemon", "server"], "server")
        self._wait_for_server()

    def connect(self, port: int) -> None:
        """Start a daemon on this port and let adb know it; its serial is `localhost:PORT`."""
        self._start(self._program("adbd"), f"adbd-{port}", ADBD_PORT=str(port))
        deadline = time.monotonic() + 20
        while self.adb("devices").find(f"localhost:{port}\tdevice") < 0:
            assert time.monotonic() < deadline, self.adb("devices")
            self.adb("connect", f"localhost:{port}")
            time.sleep(0.05)

    def pull_cables(self) -> None:
        """All daemons die at once, as when cables are pulled; adb has to find out by itself."""
        for daemon in self._running[1:]:
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        del self._running[1:]

    def forget(self) -> None:
        """No daemon is left, and adb knows none."""
        self.pull_cables()
        self.adb("disconnect")

    def adb(self, *arguments: str) -> str:
        """What adb prints."""
        done = subprocess.run(
            [str(self.bin / "adb"), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    def inside(self, *command: str) -> str:
        """Run a command in the namespace."""
        done = subprocess.run(
            self._inside(command), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        """End everything that was started."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._holder.communicate(timeout=20)

    def _start(self, command: list[str], name: str, **settings: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                self._inside(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(self._folder), **settings},
            )
        self._running.append(process)
        return process

    def _wait_for_server(self) -> None:
        # A client that finds no server starts one, which cannot work through the loader.
        deadline = time.monotonic() + 20
        while _SERVER_PORT not in self.inside("cat", "/proc/self/net/tcp"):
            assert time.monotonic() < deadline, (self._folder / "server.log").read_text()
            time.sleep(0.02)

    def _program(self, name: str) -> list[str]:
        architecture = host_architecture()
        system = _SYSTEMS[architecture]
        folders = (f"usr/lib/{system}/android", f"usr/lib/{system}", f"lib/{system}")
        library_path = ":".join(str(self._programs / folder) for folder in folders)
        loader = self._programs / "lib" / system / Path(_LOADERS[architecture]).name
        program = self._programs / _TOOLS / name
        return [str(loader), "--library-path", library_path, str(program)]

    def _inside(self, command: list[str] | tuple[str, ...]) -> list[str]:
        enter = ["nsenter", "--target", str(self._holder.pid), "--user", "--net", "--mount"]
        return [*enter, "--preserve-credentials", "--", *command]


@contextmanager
def real_device(programs: Path, folder: Path) -> Iterator[Device]:
    """A device that is ended afterwards."""
    device = Device(programs, folder)
    try:
        yield device
    finally:
        device.close()
