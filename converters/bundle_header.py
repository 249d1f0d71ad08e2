"""The header of a .litertlm file, read with every offset checked before it is followed.

Layout (litert_lm_builder 0.18.1, litertlm_core and litertlm_header_schema): 8 bytes magic, three
uint32 of version, 4 bytes of padding, a uint64 with the header's end, then a flatbuffer. The native
runtime follows damaged offsets and dies; this reader refuses them instead.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

from hermes.errors import BadInputError

MAGIC = b"LITERTLM"
HEADER_BEGIN = 32
_MOST_ENTRIES = 4096
_LARGEST_HEADER = 16 * 2**20

SECTION_KINDS = {
    1: "GenericBinaryData",
    3: "TFLiteModel",
    4: "SP_Tokenizer",
    5: "LlmMetadataProto",
    6: "HF_Tokenizer_Zlib",
    7: "TFLiteWeights",
    8: "EmbeddingMetadataProto",
    9: "ExecutorMetadataProto",
    10: "TtsMetadataProto",
    11: "AsrMetadataProto",
}
# Members of the union VData by number: struct format of their only field, None for the string.
_VALUE_FORMATS: dict[int, str | None] = {
    1: "<B",
    2: "<b",
    3: "<H",
    4: "<h",
    5: "<I",
    6: "<i",
    7: "<f",
    8: "<?",
    9: None,
    10: "<Q",
    11: "<q",
    12: "<d",
}

Value = int | float | bool | str


@dataclass(frozen=True)
class HeaderEntry:
    """A key with its value; `position` is the file offset of a string value's bytes, else 0."""

    key: str
    value: Value
    position: int = 0


@dataclass(frozen=True)
class HeaderSection:
    """One section: its kind, the bytes [begin, end) of the file, and its own entries.

    `end_position` is the file offset of the uint64 that says where it ends.
    """

    kind: str
    begin: int
    end: int
    entries: tuple[HeaderEntry, ...]
    end_position: int


@dataclass(frozen=True)
class Header:
    """Everything that the header says."""

    version: tuple[int, int, int]
    end: int
    system: tuple[HeaderEntry, ...]
    sections: tuple[HeaderSection, ...]


class _DamageError(Exception):
    """An offset or a count that leads outside; carries what was being read."""


class _Buffer:
    """Checked access to a flatbuffer."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def number(self, layout: str, position: int, what: str) -> int:
        size = struct.calcsize(layout)
        if position < 0 or position + size > len(self.data):
            raise _DamageError(f"{what} lies at {position}, outside the header's {len(self.data)}")
        value: int = struct.unpack_from(layout, self.data, position)[0]
        return value

    def follow(self, position: int, what: str) -> int:
        target = position + self.number("<I", position, what)
        if target <= position or target + 4 > len(self.data):
            raise _DamageError(f"{what} points to {target}, outside the header's {len(self.data)}")
        return target

    def field(self, table: int, slot: int, what: str) -> int | None:
        """Position of a table's field, None if absent."""
        vtable = table - self.number("<i", table, what)
        vtable_size = self.number("<H", vtable, f"{what}'s vtable")
        table_size = self.number("<H", vtable + 2, f"{what}'s vtable")
        if vtable_size < 4 or vtable_size % 2 or vtable + vtable_size > len(self.data):
            raise _DamageError(f"{what} has a vtable of {vtable_size} bytes")
        if table_size < 4 or table + table_size > len(self.data):
            raise _DamageError(f"{what} has {table_size} bytes at {table}")
        if 4 + 2 * slot + 2 > vtable_size:
            return None
        offset = self.number("<H", vtable + 4 + 2 * slot, what)
        if offset >= table_size:
            raise _DamageError(f"{what} has a field at {offset} of its {table_size} bytes")
        return table + offset if offset else None

    def tables(self, table: int, slot: int, what: str) -> list[int]:
        position = self.field(table, slot, what)
        if position is None:
            return []
        vector = self.follow(position, what)
        count = self.number("<I", vector, what)
        if count > _MOST_ENTRIES or vector + 4 + 4 * count > len(self.data):
            raise _DamageError(f"{what} claims {count} entries")
        return [self.follow(vector + 4 + 4 * index, what) for index in range(count)]

    def text(self, table: int, slot: int, what: str) -> tuple[str, int]:
        position = self.field(table, slot, what)
        if position is None:
            return "", 0
        start = self.follow(position, what)
        length = self.number("<I", start, what)
        raw = self.data[start + 4 : start + 4 + length]
        if len(raw) != length:
            raise _DamageError(f"{what} claims {length} bytes")
        try:
            return raw.decode("utf-8"), start + 4
        except UnicodeDecodeError as error:
            raise _DamageError(f"{what} is not UTF-8: {error.reason}") from error

    def scalar(self, table: int, slot: int, layout: str, what: str) -> int:
        position = self.field(table, slot, what)
        return 0 if position is None else self.number(layout, position, what)

    def entries(self, table: int, slot: int, what: str) -> tuple[HeaderEntry, ...]:
        return tuple(self._entry(entry, what) for entry in self.tables(table, slot, what))

    def _entry(self, table: int, what: str) -> HeaderEntry:
        key, _ = self.text(table, 0, f"{what}: key")
        what = f"{what}: {key!r}"
        kind = self.scalar(table, 1, "<B", what)
        position = self.field(table, 2, what)
        if kind not in _VALUE_FORMATS or position is None:
            raise _DamageError(f"{what} has a value of unknown type {kind}")
        value = self.follow(position, what)
        layout = _VALUE_FORMATS[kind]
        if layout is not None:
            return HeaderEntry(key, self.scalar(value, 0, layout, what))
        text, start = self.text(value, 0, what)
        return HeaderEntry(key, text, HEADER_BEGIN + start)


def parse_header(start: bytes, origin: str) -> tuple[tuple[int, int, int], int]:
    """Version and end of the header from the file's first 32 bytes."""
    if len(start) < HEADER_BEGIN or start[:8] != MAGIC:
        raise BadInputError(
            f"{origin}: begins with {start[:8]!r}",
            expected=f"a .litertlm file, which begins with {MAGIC!r}",
            todo="check the path; an interrupted export or download leaves such a file",
        )
    major, minor, patch, _, end = struct.unpack("<IIIIQ", start[8:HEADER_BEGIN])
    if major != 1:
        raise BadInputError(
            f"{origin}: format version {major}.{minor}.{patch}", expected="version 1"
        )
    if not HEADER_BEGIN < end <= _LARGEST_HEADER:
        raise BadInputError(
            f"{origin}: the header ends at byte {end}",
            expected=f"between {HEADER_BEGIN} and {_LARGEST_HEADER}",
            todo="the file is damaged; export or download it again",
        )
    return (major, minor, patch), end


def parse_metadata(
    version: tuple[int, int, int], end: int, data: bytes, file_size: int, origin: str
) -> Header:
    """The flatbuffer `data` of the bytes [32, end) as plain values.

    Raises:
        BadInputError: an offset, a count or a section that leads outside the header or the file.
    """
    buffer = _Buffer(data)
    try:
        if len(data) != end - HEADER_BEGIN:
            raise _DamageError(f"the file ends inside the header, after {len(data)} bytes of it")
        root = buffer.follow(0, "root table")
        system_position = buffer.field(root, 0, "root table")
        section_position = buffer.field(root, 1, "root table")
        system: tuple[HeaderEntry, ...] = ()
        if system_position is not None:
            table = buffer.follow(system_position, "system metadata")
            system = buffer.entries(table, 0, "system metadata")
        sections = []
        if section_position is not None:
            table = buffer.follow(section_position, "section list")
            for index, entry in enumerate(buffer.tables(table, 0, "section list")):
                sections.append(_section(buffer, entry, index, end, file_size))
        _refuse_overlaps(sections)
    except _DamageError as damage:
        raise BadInputError(
            f"{origin}: damaged header: {damage}",
            todo="the file is incomplete or damaged; export or download it again",
        ) from damage
    return Header(version, end, system, tuple(sections))


def _section(buffer: _Buffer, table: int, index: int, end: int, file_size: int) -> HeaderSection:
    what = f"section {index}"
    begin = buffer.scalar(table, 1, "<Q", what)
    stop = buffer.scalar(table, 2, "<Q", what)
    number = buffer.scalar(table, 3, "<B", what)
    if number not in SECTION_KINDS:
        raise _DamageError(f"{what} has unknown type {number}")
    if not end <= begin < stop <= file_size:
        raise _DamageError(f"{what} is bytes {begin} to {stop} of a file of {file_size}")
    entries = buffer.entries(table, 0, what)
    position = HEADER_BEGIN + (buffer.field(table, 2, what) or 0)
    return HeaderSection(SECTION_KINDS[number], begin, stop, entries, position)


def _refuse_overlaps(sections: list[HeaderSection]) -> None:
    ordered = sorted(sections, key=lambda section: section.begin)
    for before, after in pairwise(ordered):
        if after.begin < before.end:
            raise _DamageError(
                f"{before.kind} (to byte {before.end}) overlaps {after.kind} (from {after.begin})"
            )
