"""Put a finished folder into place: all of it or nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converters.publish import signals_as_exceptions
from hermes.errors import TargetError


@contextmanager
def publish_folder(target: Path, force: bool = False) -> Iterator[Path]:
    """A new hidden folder beside `target` that takes its place when the block ends well.

    An empty folder counts as free. With `force` a folder that holds a model is replaced; what else
    it may be stays untouched. On an exception or signal the new folder is removed.

    Raises:
        TargetError: the target exists, or cannot be written.
    """
    target = Path(os.path.realpath(target))
    _check_place(target, force)
    with signals_as_exceptions(), staging_folder(target) as folder:
        yield folder
        for file in folder.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        _swap(folder, target, force)


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A hidden folder on the target's disk; gone afterwards unless it was renamed."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    except OSError as error:
        raise TargetError(
            f"{target.parent}: cannot be written: {error.strerror}",
            todo="choose a target in a folder that exists and that you may write to",
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_place(target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise TargetError(f"{target}: is a file", expected="the path of a folder to write")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise TargetError(
            f"{target}: exists already",
            expected="a name that is free, or an empty folder",
            todo="choose another name, or replace it with --force",
        )
    strange = [path.name for path in target.iterdir() if path.is_dir() or path.is_symlink()]
    if strange or not (target / "config.json").is_file():
        raise TargetError(
            f"{target}: does not look like the folder of a model, so it is not replaced",
            problems=[f"{name}: a folder or link inside" for name in strange[:5]],
            expected="config.json and files only",
            todo="choose another name, or remove the folder yourself",
        )


def _swap(folder: Path, target: Path, force: bool) -> None:
    folder.chmod(0o755)
    old = folder.with_name(f"{folder.name}-old")
    replaced = force and target.is_dir() and any(target.iterdir())
    try:
        if replaced:
            target.rename(old)
        try:
            # Succeeds on a free name and on an empty folder only.
            folder.rename(target)
        except BaseException:
            if replaced:
                old.rename(target)
            raise
    except OSError as error:
        raise TargetError(
            f"{target}: could not be put in place: {error.strerror}",
            todo="choose another name",
        ) from error
    shutil.rmtree(old, ignore_errors=True)
