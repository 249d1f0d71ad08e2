"""The files a conversion reads, known by their content.

Hashing takes as long as the processor needs for the bytes, so a thread does it beside the rest of
the opening. A file that changes after it was hashed would make a lie of every hash, so the bound
model is only trusted after `demand_unchanged`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from converters.bundle_reader import hash_file
from hermes.checkpoint import Checkpoint
from hermes.errors import BadInputError

Identity = tuple[int, int, int, int, int]


class HashedFiles:
    """SHA-256 of files by path, each read once."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._found: dict[Path, Future[tuple[Identity, str]]] = {}

    def begin(self, files: Iterable[Path]) -> None:
        """Start hashing what is not hashed yet."""
        for file in files:
            path = file.resolve()
            if path not in self._found:
                self._found[path] = self._pool.submit(_hash, path)

    def digest(self, file: Path) -> str:
        """A file's SHA-256; waits for it."""
        self.begin([file])
        return self._found[file.resolve()].result()[1]

    def demand_unchanged(self) -> None:
        """Compare size, times and number of every file with those before it was hashed.

        Raises:
            BadInputError: one has changed since.
        """
        changed = [
            path.name for path, done in self._found.items() if _identity(path) != done.result()[0]
        ]
        if changed:
            raise BadInputError(
                "files of the checkpoint changed while they were read",
                problems=changed,
                todo="convert again when nothing writes to them",
            )


@contextmanager
def hashed_files(checkpoint: Path) -> Iterator[HashedFiles]:
    """Hashes of a checkpoint's files; those that lie beside each other are begun at once."""
    pool = ThreadPoolExecutor(1)
    try:
        files = HashedFiles(pool)
        files.begin(top_files(checkpoint))
        yield files
    finally:
        pool.shutdown(cancel_futures=True)


def top_files(checkpoint: Path) -> list[Path]:
    """The checkpoint itself, or the files that lie in its folder."""
    if checkpoint.is_dir():
        return sorted(path for path in checkpoint.iterdir() if path.is_file())
    return [checkpoint] if checkpoint.is_file() else []


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """The files in which the checkpoint's tensors lie."""
    places = (tensor.location for tensor in checkpoint.tensors.values())
    names = {str(place[0]) for place in places if place}
    return [Path(name) for name in sorted(names)]


def _identity(path: Path) -> Identity:
    try:
        found = os.stat(path)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read any more: {error.strerror}") from error
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def _hash(path: Path) -> tuple[Identity, str]:
    identity = _identity(path)
    try:
        return identity, hash_file(path)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
