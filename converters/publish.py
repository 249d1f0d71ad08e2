"""Put a finished file into place: all of it or nothing, and one writer at a time."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hermes.errors import ResourceError, TargetError

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def publish(target: Path, force: bool = False) -> Iterator[Path]:
    """A temporary path beside `target` that replaces it when the block ends without an exception.

    The temporary file is a hidden one in the target's folder and carries a lock. Until the block
    has ended the old target stays as it is; then the new file is flushed to the disk and renamed.
    On any exception, Ctrl-C, SIGTERM or SIGHUP the temporary file is removed. One that a killed run
    left behind is taken over. The block must write the file in place, not replace it.

    Args:
        target: the final path.
        force: an existing target may be replaced.

    Raises:
        ResourceError: the disk is full at the end.
        TargetError: the target exists (without `force`), is no place for a file, or another run is
            writing it.
    """
    target = Path(os.path.realpath(target))
    _check_place(target, force)
    # The ending stays: LiteRT-LM recognises a file by it.
    temporary = target.with_name(f".{target.stem}.partial{target.suffix}")
    with signals_as_exceptions():
        lock = _lock(temporary, target)
        try:
            yield temporary
            try:
                _flush(temporary)
                _move(temporary, target, force)
            except OSError as error:
                raise ResourceError(
                    f"{target}: could not be completed: {error.strerror or error}",
                    todo="free some space, or write to another disk",
                ) from error
        finally:
            # A second Ctrl-C must wait until the temporary file is gone.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_SIGNALS})
            # After the move the name is gone, or belongs to the next run: then it is not ours.
            if _is_ours(lock, temporary):
                temporary.unlink()
            os.close(lock)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _check_place(target: Path, force: bool) -> None:
    if target.is_dir():
        raise TargetError(f"{target}: is a folder", expected="the path of a file to write")
    if target.exists() and not target.is_file():
        raise TargetError(f"{target}: is neither a file nor free", expected="a path to write")
    if not target.parent.is_dir():
        raise TargetError(
            f"{target.parent}: no such folder", todo="create it, or choose another target"
        )
    if target.exists() and not force:
        raise _exists(target)


def _exists(target: Path) -> TargetError:
    return TargetError(
        f"{target}: exists already", todo="choose another name, or replace it with --force"
    )


def _lock(temporary: Path, target: Path) -> int:
    """Create or take over the temporary file; the lock lives as long as the descriptor."""
    while True:
        try:
            lock = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TargetError(
                f"{temporary}: cannot be written: {error.strerror}",
                todo="choose a target in a folder that you may write to",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise TargetError(
                f"{target}: busy, another run is writing it",
                todo="wait for it, or choose another name",
            ) from error
        if _is_ours(lock, temporary):
            if os.fstat(lock).st_nlink == 1:
                os.ftruncate(lock, 0)
                return lock
            # A killed run's work folder holds its content, for a run that continues it.
            temporary.unlink()
        # Or between opening and locking the other run finished and renamed this very file.
        os.close(lock)


def _is_ours(lock: int, temporary: Path) -> bool:
    try:
        found = os.stat(temporary, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(lock)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _move(temporary: Path, target: Path, force: bool) -> None:
    if force:
        os.replace(temporary, target)
    else:
        try:
            # Unlike a rename, a link never replaces a file that appeared in the meantime.
            os.link(temporary, target)
        except FileExistsError:
            raise _exists(target) from None
        except OSError:
            if target.exists():
                raise _exists(target) from None
            os.replace(temporary, target)
        else:
            temporary.unlink()
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, as Ctrl-C does; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # A handler that somebody set, or an ignored hang-up (nohup), stays.
    default = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    previous = {number: signal.signal(number, leave) for number in default}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
