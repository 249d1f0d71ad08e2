"""Debian packages by name, fetched with apt into a folder of ours: no root, nothing installed.

apt runs with its own lists, its own idea of what is installed (nothing) and its own cache, so it
resolves dependencies for any architecture, verifies the index's signature and every package's
SHA-256, and takes up a broken download where it stopped. Of the machine's own configuration only
the acquire options (proxies, timeouts) and the mirror are used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hermes.errors import ResourceError

DEFAULT_MIRROR = "http://deb.debian.org/debian"
RELEASE = "bookworm"
BACKPORTS = f"{RELEASE}-backports"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TOOLS = ("apt-get", "apt-cache", "apt-config", "dpkg-deb", "tar")
_SHOWN_LINES = 6
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Package:
    """A package file as fetched."""

    name: str
    version: str
    architecture: str
    path: Path


def host_architecture() -> str:
    """Debian's name for this machine's processor."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise ResourceError(
            f"a {machine} processor", expected=" or ".join(sorted(_ARCHITECTURES)) + " under Linux"
        )
    return _ARCHITECTURES[machine]


def find_mirror() -> str:
    """The Debian mirror that this machine's own apt uses, else Debian's own address."""
    form = "$(REPO_URI) $(ORIGIN) $(CODENAME)"
    command = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return DEFAULT_MIRROR
    for line in done.stdout.splitlines():
        address, _, about = line.partition(" ")
        # Before the first update the origin is unknown and the address alone has to tell.
        if about == f"Debian {RELEASE}" or address.rstrip("/").endswith("/debian"):
            return address.rstrip("/")
    return DEFAULT_MIRROR


class DebianPackages:
    """An apt of our own in a folder.

    Args:
        folder: for lists and packages; what is already there is not fetched again.
        architecture: Debian's name of the processor that the packages are for.
        mirror: address of a Debian mirror; `find_mirror()` if None.

    Raises:
        ResourceError: no apt, no keyring, no network, or no such package.
    """

    def __init__(self, folder: Path, architecture: str, mirror: str | None = None) -> None:
        self.architecture = architecture
        self.mirror = mirror or find_mirror()
        self._folder = folder
        self._archives = folder / "cache" / "archives"
        self._updated = False
        _demand_tools()
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        source = f"deb [signed-by={KEYRING}] {self.mirror}"
        (folder / "sources.list").write_text(
            f"{source} {RELEASE} main\n{source} {BACKPORTS} main\n", encoding="utf-8"
        )
        (folder / "apt.conf").write_text(self._configuration(), encoding="utf-8")

    def fetch(
        self, names: Sequence[str], *, release: str = RELEASE, dependencies: bool = True
    ) -> list[Package]:
        """Packages of a release, each with all it depends on unless `dependencies` is off."""
        if not self._updated:
            self._apt("update", "-o", "APT::Update::Error-Mode=any")
            self._updated = True
        self._fetch(names, release, dependencies)
        if self._drop_unknown():
            self._fetch(names, release, dependencies)
        return [_described(path) for path in sorted(self._archives.glob("*.deb"))]

    def _fetch(self, names: Sequence[str], release: str, dependencies: bool) -> None:
        if dependencies:
            options = ("install", "--download-only", "--yes", "--no-install-recommends")
            self._apt(*options, "--target-release", release, *names)
        else:
            self._apt("download", *(f"{name}/{release}" for name in names), folder=self._archives)

    def _drop_unknown(self) -> bool:
        """Remove files that the index does not know or whose SHA-256 is another one.

        apt verifies what it fetches, but takes a file of an earlier run by its name and size.
        """
        found = [_described(path) for path in sorted(self._archives.glob("*.deb"))]
        listed = self._hashes([f"{item.name}={item.version}" for item in found])
        wrong = [item for item in found if _sha256(item.path) not in listed]
        for item in wrong:
            item.path.unlink()
        return bool(wrong)

    def _hashes(self, packages: Sequence[str]) -> set[str]:
        """SHA-256 of these packages by the index; those that it lacks are passed over."""
        done = subprocess.run(
            ["apt-cache", "show", *packages],
            capture_output=True,
            text=True,
            env=self._environment(),
            timeout=300,
            check=False,
        )
        prefix = "SHA256: "
        lines = done.stdout.splitlines()
        return {line.removeprefix(prefix) for line in lines if line.startswith(prefix)}

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "APT_CONFIG": str(self._folder / "apt.conf"),
            "LC_ALL": "C",
            "DEBIAN_FRONTEND": "noninteractive",
        }

    def _configuration(self) -> str:
        """Our folders, in front of the machine's acquire options."""
        nothing = ("parts", "main", "sourceparts", "preferences", "preferencesparts")
        settings = {
            **{f"Dir::Etc::{name}": "/dev/null" for name in nothing},
            "Dir::Etc::sourcelist": str(self._folder / "sources.list"),
            "Dir::State": str(self._folder),
            "Dir::State::status": str(self._folder / "status"),
            "Dir::Cache": str(self._folder / "cache"),
            "APT::Architecture": self.architecture,
            "APT::Architectures": self.architecture,
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
            "Acquire::http::Timeout": "30",
            "Debug::NoLocking": "1",
        }
        lines = [f'{name} "{value}";' for name, value in settings.items()]
        dumped = subprocess.run(
            ["apt-config", "dump", "--no-empty", "Acquire"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        kept = ("Acquire::http::Proxy", "Acquire::https::", "Acquire::Retries")
        lines += [line for line in dumped.stdout.splitlines() if line.startswith(kept)]
        return "\n".join(lines) + "\n"

    def _apt(self, *arguments: str, folder: Path | None = None) -> None:
        done = subprocess.run(
            ["apt-get", "--quiet", "--quiet", *arguments],
            capture_output=True,
            text=True,
            env=self._environment(),
            cwd=folder,
            timeout=1800,
            check=False,
        )
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W:"))]
            raise ResourceError(
                f"apt-get {arguments[0]} could not fetch Debian packages from {self.mirror}",
                problems=(said or done.stderr.splitlines())[-_SHOWN_LINES:],
                expected="a Debian mirror that can be reached",
                todo="connect to the network, or name another mirror with --mirror; what was "
                "fetched so far is kept",
            )


def unpack(packages: Sequence[Package], folder: Path, members: Sequence[str] = ()) -> None:
    """Write the packages' files below `folder`; only `members` (./usr/bin/...) if given."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        with subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(package.path)], stdout=subprocess.PIPE
        ) as archive:
            taken = subprocess.run(
                ["tar", "--extract", "--no-same-owner", "--directory", str(folder), *members],
                stdin=archive.stdout,
                capture_output=True,
                text=True,
                check=False,
            )
        # tar leaves early once it has the members it was asked for, and dpkg-deb then complains.
        if taken.returncode != 0 or (archive.returncode != 0 and not members):
            raise ResourceError(
                f"{package.path}: could not be unpacked: {taken.stderr.strip()[-300:]}",
                expected=f"room and a file system with symbolic links in {folder}",
            )


def _described(path: Path) -> Package:
    name, version, architecture = path.stem.split("_")
    return Package(name, version.replace("%3a", ":"), architecture, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _demand_tools() -> None:
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    if missing:
        raise ResourceError(
            f"this machine has no {', '.join(missing)}",
            expected="a Linux with apt and dpkg (Debian, Ubuntu, or their packages elsewhere)",
        )
    if not KEYRING.is_file():
        raise ResourceError(
            f"no {KEYRING}",
            expected="Debian's keys, to verify its packages",
            todo="install the package debian-archive-keyring",
        )
