"""The Arm64 sysroot: an emulator, an Arm64 Python and Arm64 builds of LiteRT and LiteRT-LM.

Built once in the user's cache folder from Debian and PyPI packages; no root, nothing installed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hermes
from hermes.deploy.debian import DebianPackages, Package, host_architecture, unpack
from hermes.deploy.probe import check_processor
from hermes.deploy.wheels import fetch_wheels, pinned, unpack_wheels
from hermes.errors import NativeToolError, ResourceError
from hermes.progress import OnProgress, Progress, silent
from hermes.runners.process import Launcher

CORE = "cortex-a76"
"""A core with the int8 dot product, as phones have had since 2018; QEMU 7.2 emulates it right."""
PYTHON = "3.11"
EMULATOR = "./usr/bin/qemu-aarch64-static"
DEBIAN_PACKAGES = ("python3-minimal", f"libpython{PYTHON}-stdlib", "libstdc++6")
PYTHON_PACKAGES = ("litert-lm-api", "ai-edge-litert")
SCHEMA = 1
_MANIFEST = "manifest.json"
_IMPORTED = (
    "hermes.runners.worker, hermes.runners.compiled_model, ai_edge_litert.compiled_model, "
    "ai_edge_litert.interpreter, litert_lm"
)
# The emulated programs would otherwise read the host's, and XNNPACK's choice of kernels by an
# x86 /proc/cpuinfo ends in a segmentation fault.
_CPUINFO = """processor\t: 0
BogoMIPS\t: 100.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc \
dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 1

"""


@dataclass(frozen=True)
class Sysroot:
    """A finished sysroot.

    Attributes:
        path: its folder: `emulator`, `root` (Debian), `site` (Python packages).
    """

    path: Path

    def launcher(self, core: str = CORE) -> Launcher:
        """The Arm64 Python, emulated on a core; it imports this very Hermes."""
        root = self.path / "root"
        library = root / "usr" / "lib" / f"python{PYTHON}"
        command = (
            str(self.path / "emulator"),
            "-L",
            str(root),
            "-cpu",
            core,
            str(root / "usr" / "bin" / f"python{PYTHON}"),
        )
        # Last, because it may be a site-packages with packages for this machine's processor.
        ours = Path(hermes.__file__).resolve().parent.parent
        path = (self.path / "site", library, library / "lib-dynload", ours)
        return Launcher(command, tuple(str(entry) for entry in path))

    def check(self, core: str = CORE) -> dict[str, float]:
        """The self-test: known logits, before anything that it says is believed."""
        return check_processor(self.launcher(core), f"the emulated {core}")

    @property
    def manifest(self) -> dict[str, object]:
        """What it was built of."""
        values: dict[str, object] = json.loads((self.path / _MANIFEST).read_text("utf-8"))
        return values


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/hermes` or `~/.cache/hermes`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hermes"


def find_sysroot() -> Sysroot | None:
    """The sysroot that is there, if it is of this version of Hermes and of the runtime."""
    found = Sysroot(cache_folder() / "arm64")
    try:
        return found if found.manifest["key"] == _key() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def require_sysroot() -> Sysroot:
    """The sysroot, or what to do about it."""
    found = find_sysroot()
    if found is None:
        raise ResourceError(
            f"no Arm64 runtime in {cache_folder() / 'arm64'}",
            expected="one that fits the installed LiteRT-LM",
            todo="run `hermes arm64 setup` once",
        )
    return found


def build_sysroot(
    mirror: str | None = None, *, force: bool = False, on_progress: OnProgress = silent
) -> Sysroot:
    """Fetch, unpack, test, and only then put in place.

    A run that was interrupted or lost its network is taken up by the next one. Of two runs at once
    the second waits for the first and finds its result.

    Raises:
        ResourceError: no network, no apt, no pip, or no room.
        NativeToolError: the emulated core fails the self-test.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "arm64.lock"):
        present = find_sysroot()
        if present is not None and not force:
            return present
        work, made = cache / "arm64.fetched", cache / "arm64.new"
        try:
            sources = _fill(made, work, mirror, on_progress)
            on_progress(Progress("compiling its Python modules"))
            _compile(Sysroot(made).launcher())
            on_progress(Progress("self-test of the emulated core"))
            tested = Sysroot(made).check()
            manifest = {"key": _key(), "core": CORE, "sources": sources, "self_test": tested}
            (made / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        except OSError as error:
            raise ResourceError(
                f"the Arm64 runtime could not be built: {error}", expected="about 1 GB of room"
            ) from error
        target, old = cache / "arm64", cache / "arm64.old"
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        made.rename(target)
        for folder in (old, work):
            shutil.rmtree(folder, ignore_errors=True)
    return Sysroot(target)


def _fill(made: Path, work: Path, mirror: str | None, on_progress: OnProgress) -> list[str]:
    """Fetch everything into `work` and unpack it into `made`; what it was made of."""
    on_progress(Progress("fetching the emulator"))
    emulator = DebianPackages(work / "host", host_architecture(), mirror).fetch(
        ["qemu-user-static"], dependencies=False
    )
    on_progress(Progress("fetching an Arm64 system"))
    system = DebianPackages(work / "arm64", "arm64", mirror).fetch(DEBIAN_PACKAGES)
    on_progress(Progress("fetching LiteRT and LiteRT-LM for Arm64"))
    wheels = fetch_wheels(
        pinned(PYTHON_PACKAGES), work / "wheels", processor="aarch64", python=PYTHON
    )
    on_progress(Progress("unpacking"))
    shutil.rmtree(made, ignore_errors=True)
    unpack(emulator, made, [EMULATOR])
    (made / EMULATOR).rename(made / "emulator")
    shutil.rmtree(made / "usr")
    unpack(system, made / "root")
    unpack_wheels(wheels, made / "site")
    (made / "root" / "proc").mkdir(exist_ok=True)
    (made / "root" / "proc" / "cpuinfo").write_text(_CPUINFO, encoding="ascii")
    return [_named(package) for package in (*emulator, *system)] + [item.name for item in wheels]


def _compile(launcher: Launcher) -> None:
    """Import once what workers import, so that Python keeps it compiled: ten seconds less each."""
    code = f"import sys; sys.path[:] = {list(launcher.path)!r}; import {_IMPORTED}"
    settings = dict(os.environ)
    settings.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [*launcher.command, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        env=settings,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise NativeToolError(
            f"the emulated Python ended with status {done.returncode}",
            problems=[f"it printed: {line}" for line in done.stderr.splitlines()[-6:]],
        )


def _named(package: Package) -> str:
    return f"{package.name}_{package.version}_{package.architecture}"


def _key() -> str:
    """What the sysroot is for; another key means that it has to be built anew."""
    return " ".join([f"schema {SCHEMA}", *pinned(PYTHON_PACKAGES), *DEBIAN_PACKAGES])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
