"""Files that are kept for later runs: whole and as they were written, or not found."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

_MARK = b"hermes-kept-1\n"
_DIGEST = 32


def keep(path: Path, data: bytes) -> None:
    """Write the data behind its hash, flush it and rename it into place.

    A cache that cannot be written costs time later and nothing else, so no error leaves here.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            temporary = Path(part.name)
            part.write(_MARK + hashlib.sha256(data).digest())
            part.write(data)
            part.flush()
            os.fsync(part.fileno())
        temporary.replace(path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def fetch(path: Path) -> bytes | None:
    """The data that was kept; None if there is none, or if it is not what was written."""
    try:
        with path.open("rb") as file:
            mark, digest = file.read(len(_MARK)), file.read(_DIGEST)
            data = file.read()
    except OSError:
        return None
    whole = mark == _MARK and hashlib.sha256(data).digest() == digest
    return data if whole else None
