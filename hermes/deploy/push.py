"""A file onto the device so that, whatever happens, a whole model is there: the old or the new.

It is sent under another name, hashed by the device, and renamed into place by one rename. Weight
caches of the old model go with it: LiteRT-LM finds them by name, size and time and would answer
with the old weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from posixpath import join as on_device

from hermes.deploy.adb import Adb, Done, quoted
from hermes.errors import (
    BadInputError,
    DeviceError,
    HermesError,
    ResourceError,
    TargetError,
    VerificationError,
)
from hermes.progress import OnProgress, Progress, silent

DEFAULT_FOLDER = "/data/local/tmp"
"""Where every Android lets adb write and run things."""
PART = ".part"
_CACHES = "_*.xnnpack_cache"
_CHUNK = 4 * 2**20
_READ_ONLY = ("permission denied", "read-only file system", "not permitted", "no such file")


@dataclass(frozen=True)
class Pushed:
    """What lies on the device now.

    Attributes:
        path: on the device.
        size: bytes.
        sha256: computed by the device.
        sent: False if the same file was there already.
    """

    path: str
    size: int
    sha256: str
    sent: bool


class Push:
    """One file on its way: `prepare`, `send`, `confirm`, `put_in_place`, or `run` for all.

    Args:
        adb: the device.
        source: the file here.
        folder: on the device; made if it is not there.
    """

    def __init__(self, adb: Adb, source: Path, folder: str) -> None:
        if not source.is_file():
            raise BadInputError(f"{source}: no such file")
        self._adb = adb
        self._source = source
        self._folder = folder
        self.target = on_device(folder, source.name)
        self.part = self.target + PART
        self.size = source.stat().st_size
        self.sha256 = _hash(source)

    def run(self, on_progress: OnProgress = silent) -> Pushed:
        """Everything; after a failure the device has the old file and no part of the new one."""
        if self._hash_there(self.target) == self.sha256:
            self._forget_part()
            return Pushed(self.target, self.size, self.sha256, False)
        try:
            self.prepare()
            on_progress(Progress(f"pushing {self.size / 1e6:.1f} MB"))
            self.send()
            on_progress(Progress("the device hashes it"))
            self.confirm()
            self.put_in_place()
        except HermesError:
            self._forget_part()
            raise
        return Pushed(self.target, self.size, self.sha256, True)

    def prepare(self) -> None:
        """A folder that can be written, without the rest of an earlier push, and room in it.

        Raises:
            TargetError: it cannot be written.
            ResourceError: not enough room.
        """
        folder, part = quoted(self._folder), quoted(self.part)
        made = self._adb.shell(f"mkdir -p {folder} && rm -f {part} && : > {part}")
        if made.status != 0:
            raise self._refused(made)
        room = self._adb.demand(f"df -P -k {folder}", f"ask for the room in {self._folder}")
        free = available_bytes(room)
        if free is not None and free < self.size:
            raise self._no_room(f"{free / 1e6:.1f} MB are free")

    def send(self) -> None:
        """The bytes, under the other name."""
        done = self._adb.push(self._source, self.part)
        if done.status != 0:
            raise self._refused(done)

    def confirm(self) -> None:
        """The device's own hash of what has arrived.

        Raises:
            VerificationError: it is another one.
        """
        found = self._hash_there(self.part)
        if found != self.sha256:
            raise VerificationError(
                f"{self.part}: arrived damaged, SHA-256 {found or 'unknown'}",
                expected=f"SHA-256 {self.sha256}",
                todo="push again, with another cable or port if it happens twice",
            )

    def put_in_place(self) -> None:
        """Rename, and remove the old model's weight caches before and after it."""
        caches = f"{quoted(self.target)}{_CACHES}"
        rename = f"mv -f {quoted(self.part)} {quoted(self.target)}"
        self._adb.demand(f"rm -f {caches} && {rename} && rm -f {caches}", "rename the new model")

    def _hash_there(self, path: str) -> str:
        words = self._adb.shell(f"sha256sum {quoted(path)}").output.split()
        # GNU's escapes file names with a backslash in front of the hash.
        return words[0].removeprefix("\\") if words else ""

    def _forget_part(self) -> None:
        try:
            self._adb.shell(f"rm -f {quoted(self.part)}")
        except DeviceError:
            return

    def _no_room(self, found: str) -> ResourceError:
        return ResourceError(
            f"no room for {self.size / 1e6:.1f} MB in {self._folder} of {self._adb.serial}: "
            f"{found}",
            expected="room for the new model beside the old one",
            todo="free some, or choose another folder with --dir",
        )

    def _refused(self, done: Done) -> HermesError:
        told = (done.errors + done.output).lower()
        if any(word in told for word in _READ_ONLY):
            return TargetError(
                f"{self._folder} of {self._adb.serial} cannot be written: {done.said}",
                todo=f"choose another folder with --dir; {DEFAULT_FOLDER} is open to adb",
            )
        if "no space left" in told:
            return self._no_room("it is full")
        return DeviceError(f"{self._adb.serial}: the push failed: {done.said}")


def available_bytes(listing: str) -> int | None:
    """Free bytes from POSIX `df -k`; None where it cannot be read."""
    words = listing.strip().splitlines()[-1].split() if listing.strip() else []
    return int(words[3]) * 1024 if len(words) >= 6 and words[3].isdigit() else None


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
