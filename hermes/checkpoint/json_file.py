"""JSON read strictly: bounded size, no duplicate keys, one readable error."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from hermes.errors import BadInputError

_MAX_BYTES = 64 * 2**20


class DuplicateKeyError(ValueError):
    """An object names a key twice."""


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise DuplicateKeyError(f"the key {twice!r} occurs twice")
    return result


def parse_json_object(data: bytes, origin: str) -> dict[str, object]:
    """Parse an object.

    Raises:
        BadInputError: not UTF-8, not JSON, not an object, too deep, or with a duplicate key.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadInputError(
            f"{origin}: not readable as JSON: {reason}",
            expected="a JSON object in UTF-8",
            todo="copy or download the file again, or correct it",
        ) from error
    if not isinstance(value, dict):
        raise BadInputError(f"{origin}: holds a {type(value).__name__}", expected="a JSON object")
    return value


def read_json_object(path: Path) -> dict[str, object]:
    """Read an object from a file; errors as `parse_json_object`."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise BadInputError(
                f"{path}: {size} bytes", expected=f"a JSON file of at most {_MAX_BYTES} bytes"
            )
        data = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_json_object(data, str(path))
