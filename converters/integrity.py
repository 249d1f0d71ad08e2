"""Whether a bundle still is, bit for bit, what was published; from the file alone.

The header holds the SHA-256 of every section, and its own as `hermes_digest`. What lies between is
zero, and nothing follows the last section. So every byte of the file is covered, one pass over it
is enough, and a difference is found in the part that it is in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from converters.bundle_header import (
    HEADER_BEGIN,
    Header,
    HeaderEntry,
    Value,
    parse_header,
    parse_metadata,
)
from converters.bundle_reader import (
    CHECKSUM_KEY,
    DIGEST_KEY,
    NO_DIGEST,
    hash_file,
    read_bundle,
)
from hermes.deploy.card import CARD_KEY, REPORT_KEY, read_inside
from hermes.errors import BadInputError

_CHUNK = 4 * 2**20
_OURS = "hermes_"


@dataclass(frozen=True)
class Part:
    """A section as stored: bytes [begin, end) and their hash, `""` without one to compare with."""

    kind: str
    begin: int
    end: int
    sha256: str


@dataclass(frozen=True)
class Integrity:
    """What was found.

    Attributes:
        path: the bundle.
        size: bytes of the file.
        digest: the header's own hash, which with the sections' hashes in it stands for the whole
            file; None in a bundle of another exporter.
        parts: the sections, with their present hashes where the header has any.
        metadata: the header's keys.
        problems: differences, each with the part it is in.
    """

    path: Path
    size: int
    digest: str | None
    parts: tuple[Part, ...]
    metadata: dict[str, Value]
    problems: tuple[str, ...]

    @property
    def proven(self) -> bool:
        """Every byte was compared with a hash, and equal."""
        return self.digest is not None and not self.problems

    def facts(self, card: Mapping[str, Any] | None) -> dict[str, Any]:
        """JSON values: what was compared, what the bundle says of itself, the card beside it."""
        return {
            "path": str(self.path),
            "bytes": self.size,
            "proven": self.proven,
            "digest": self.digest,
            "sha256": None if self.proven else hash_file(self.path),
            "sections": [
                {"kind": part.kind, "bytes": part.end - part.begin, "sha256": part.sha256}
                for part in self.parts
            ],
            "report": str(self.metadata.get(REPORT_KEY, "")),
            "inside": read_inside(self.metadata.get(CARD_KEY, "")),
            "beside": card,
        }

    def demand(self) -> Integrity:
        """Itself, unless something differs.

        Raises:
            BadInputError: naming every damaged part.
        """
        if self.problems:
            raise BadInputError(
                f"{self.path}: damaged: not the bytes that were exported",
                problems=self.problems,
                expected="every part as its hash in the header says",
                todo="copy or download the file again; if it was edited on purpose, export it anew",
            )
        return self


def check_integrity(path: Path) -> Integrity:
    """Compare every byte of a bundle with the hashes in it.

    Raises:
        BadInputError: not readable, or damaged so that its sections cannot even be found.
    """
    try:
        with Path(path).open("rb") as file:
            return _check(Path(path), file)
    except OSError as error:
        raise BadInputError(f"{path}: not readable: {error.strerror or error}") from error


def check_readable(path: Path) -> None:
    """What can be asked of a bundle without hashes: metadata, tokenizer and graph can be read.

    Raises:
        HermesError: one of them cannot.
    """
    from converters.inspection import read_signatures

    bundle = read_bundle(path, hashes=False)
    read_signatures(bundle)
    _ = bundle.tokenizer.vocab_size


def _check(path: Path, file: BinaryIO) -> Integrity:
    size = file.seek(0, 2)
    file.seek(0)
    version, end = parse_header(file.read(HEADER_BEGIN), str(path))
    file.seek(0)
    raw = file.read(end)
    header = parse_metadata(version, end, raw[HEADER_BEGIN:], size, str(path))
    problems = list(_header_problems(raw, header))
    parts = []
    claimed = _claims_hashes(header)
    for section in sorted(header.sections, key=lambda section: section.begin):
        # Where nothing can be compared, a large file need not be read.
        found = _hash(file, section.begin, section.end) if claimed else ""
        parts.append(Part(section.kind, section.begin, section.end, found))
        wanted = _text(section.entries, CHECKSUM_KEY)
        if wanted is None and claimed:
            problems.append(f"section {section.kind}: its hash is missing from the header")
        elif wanted is not None and wanted != found:
            problems.append(f"section {section.kind}: SHA-256 {found}, the header says {wanted}")
    problems += _gap_problems(file, end, parts, size)
    metadata = {entry.key: entry.value for entry in header.system}
    digest = _text(header.system, DIGEST_KEY)
    return Integrity(path, size, digest, tuple(parts), metadata, tuple(problems))


def _header_problems(raw: bytes, header: Header) -> Iterator[str]:
    entry = next((entry for entry in header.system if entry.key == DIGEST_KEY), None)
    if entry is None:
        if _claims_hashes(header):
            yield (
                f"header: it holds Hermes's entries but no {DIGEST_KEY}: damaged, or written by a "
                "Hermes that made none"
            )
        return
    blank = NO_DIGEST.encode("ascii")
    whole = raw[: entry.position] + blank + raw[entry.position + len(blank) :]
    found = hashlib.sha256(whole).hexdigest()
    if found != entry.value:
        yield f"header (bytes 0 to {header.end}): SHA-256 {found}, it says {entry.value!r}"


def _claims_hashes(header: Header) -> bool:
    """Hermes wrote this file: one damaged key must not make it look like another exporter's."""
    return any(entry.key.startswith(_OURS) for entry in header.system) or any(
        entry.key == CHECKSUM_KEY for section in header.sections for entry in section.entries
    )


def _text(entries: tuple[HeaderEntry, ...], key: str) -> str | None:
    return next((str(entry.value) for entry in entries if entry.key == key), None)


def _gap_problems(file: BinaryIO, end: int, parts: list[Part], size: int) -> Iterator[str]:
    """Padding that is not zero, and bytes after the last section."""
    borders = [("header", end), *((part.kind, part.end) for part in parts)]
    begins = [part.begin for part in parts]
    for (before, stop), begin in zip(borders, begins, strict=False):
        for offset, chunk in _chunks(file, stop, begin):
            if chunk.strip(b"\0"):
                place = offset + len(chunk) - len(chunk.lstrip(b"\0"))
                yield f"padding after {before}: byte {place} is not zero"
                break
    last, stop = borders[-1]
    if size > stop:
        yield f"after {last}: {size - stop} bytes follow the last section"


def _hash(file: BinaryIO, begin: int, end: int) -> str:
    digest = hashlib.sha256()
    for _, chunk in _chunks(file, begin, end):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    file.seek(begin)
    while begin < end:
        chunk = file.read(min(end - begin, _CHUNK))
        if not chunk:
            # The file shrank while it was read.
            raise BadInputError(f"{file.name}: ends at byte {begin}, {end} were there")
        yield begin, chunk
        begin += len(chunk)
