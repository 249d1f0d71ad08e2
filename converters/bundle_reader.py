"""Read a .litertlm file: sections, hashes and the prompt metadata, without the native runtime."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from converters.bundle_header import HEADER_BEGIN, Value, parse_header, parse_metadata
from hermes.deploy.prompt_metadata import PromptMetadata, TokenRule
from hermes.errors import BadInputError
from hermes.tokenizer.huggingface import read_tokenizer_json
from hermes.tokenizer.interface import Tokenizer
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer

if TYPE_CHECKING:
    from io import FileIO

    from litert_lm_builder.runtime.proto.llm_metadata_pb2 import LlmMetadata
    from litert_lm_builder.runtime.proto.token_pb2 import TokenUnion

CHECKSUM_KEY = "sha256"
DIGEST_KEY = "hermes_digest"
"""SHA-256 of the whole header, computed while the value itself is `NO_DIGEST`."""
NO_DIGEST = "0" * 64
_CHUNK = 4 * 2**20
_BLOCK = 2**18
_LARGEST_SMALL_SECTION = 256 * 2**20


@dataclass(frozen=True)
class Section:
    """One section of a bundle.

    Attributes:
        kind: the format's name of its type, e.g. `TFLiteModel`.
        offset: first byte in the file.
        size: bytes as stored (a tokenizer.json is stored compressed).
        sha256: of the stored bytes; `""` if not asked for.
        entries: the section's own keys, e.g. `model_type`.
    """

    kind: str
    offset: int
    size: int
    sha256: str
    entries: dict[str, Value]


@dataclass(frozen=True)
class Bundle:
    """A bundle as read: where its sections are and what its metadata says."""

    path: Path
    version: tuple[int, int, int]
    size: int
    sections: tuple[Section, ...]
    metadata: dict[str, Value]
    prompt: PromptMetadata

    def section(self, *kinds: str) -> Section:
        """The first section of one of these kinds."""
        for section in self.sections:
            if section.kind in kinds:
                return section
        raise BadInputError(
            f"{self.path}: no {' or '.join(kinds)} section",
            expected="a language model bundle: model, tokenizer and metadata",
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer."""
        section = self.section("SP_Tokenizer", "HF_Tokenizer_Zlib")
        data = section_bytes(self, section)
        origin = f"{self.path}: {section.kind}"
        if section.kind == "SP_Tokenizer":
            return SentencePieceTokenizer(data, origin)
        return read_tokenizer_json(data, origin)


def read_bundle(path: Path, *, hashes: bool = True) -> Bundle:
    """Open a bundle and check its structure.

    Args:
        path: the .litertlm file.
        hashes: read every section to compute its SHA-256, and refuse one that differs from the
            checksum that Hermes wrote into the header.

    Raises:
        BadInputError: not a bundle, or damaged anywhere that can be seen.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            version, end = parse_header(file.read(HEADER_BEGIN), str(path))
            data = file.read(end - HEADER_BEGIN)
    except OSError as error:
        raise BadInputError(f"{path}: not readable: {error.strerror or error}") from error
    header = parse_metadata(version, end, data, size, str(path))
    sections = []
    for raw in header.sections:
        entries = {entry.key: entry.value for entry in raw.entries}
        section = Section(raw.kind, raw.begin, raw.end - raw.begin, "", entries)
        if hashes:
            section = Section(
                section.kind, section.offset, section.size, hash_section(path, section), entries
            )
        sections.append(section)
    _refuse_wrong_checksums(path, sections)
    system = {entry.key: entry.value for entry in header.system}
    bare = Bundle(path, version, size, tuple(sections), system, PromptMetadata())
    return Bundle(path, version, size, tuple(sections), system, _prompt_metadata(bare))


def _refuse_wrong_checksums(path: Path, sections: list[Section]) -> None:
    problems = [
        f"{section.kind}: SHA-256 {section.sha256}, the header says {section.entries[CHECKSUM_KEY]}"
        for section in sections
        if section.sha256 and section.entries.get(CHECKSUM_KEY, section.sha256) != section.sha256
    ]
    if problems:
        raise BadInputError(
            f"{path}: the content of {len(problems)} section(s) was changed after the export",
            problems=problems,
            todo="the file is damaged; export or download it again",
        )


def _chunks(path: Path, section: Section) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(section.offset)
        left = section.size
        while left:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                raise BadInputError(f"{path}: ends inside section {section.kind}")
            left -= len(chunk)
            yield chunk


def hash_section(path: Path, section: Section) -> str:
    """SHA-256 of a section's stored bytes, hexadecimal."""
    digest = hashlib.sha256()
    for chunk in _chunks(path, section):
        digest.update(chunk)
    return digest.hexdigest()


def hash_file(path: Path, offset: int = 0) -> str:
    """SHA-256 of a file's bytes from there on, hexadecimal."""
    with path.open("rb") as file:
        file.seek(offset)
        return hashlib.file_digest(file, "sha256").hexdigest()


def holds_file(path: Path, section: Section, source: Path, offset: int = 0) -> bool:
    """Whether a section is byte for byte that file from there on: quicker to say than its hash."""
    if source.stat().st_size - offset != section.size:
        return False
    left = section.size
    with path.open("rb", buffering=0) as file, source.open("rb", buffering=0) as other:
        file.seek(section.offset)
        other.seek(offset)
        stored, wanted = bytearray(min(left, _BLOCK)), bytearray(min(left, _BLOCK))
        while left:
            if left < len(stored):
                stored, wanted = bytearray(left), bytearray(left)
            if not (_fill(file, stored) and _fill(other, wanted) and stored == wanted):
                return False
            left -= len(stored)
    return True


def _fill(file: FileIO, block: bytearray) -> bool:
    view = memoryview(block)
    while view:
        count = file.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True


def section_bytes(bundle: Bundle, section: Section) -> bytes:
    """Content of a small section (not the model), decompressed."""
    if section.size > _LARGEST_SMALL_SECTION:
        raise BadInputError(f"{bundle.path}: section {section.kind} has {section.size} bytes")
    data = b"".join(_chunks(bundle.path, section))
    return _decompress(data, bundle.path) if section.kind == "HF_Tokenizer_Zlib" else data


def _decompress(data: bytes, path: Path) -> bytes:
    # Eight bytes with the decompressed size, then a zlib stream (litert_lm_builder 0.18.1).
    size = int.from_bytes(data[:8], "little")
    problem = f"claims {size} bytes of text"
    if size <= _LARGEST_SMALL_SECTION:
        try:
            text = zlib.decompressobj().decompress(data[8:], size + 1)
        except zlib.error as error:
            problem = str(error)
        else:
            if len(text) == size:
                return text
            problem = f"claims {size} bytes of text and holds another number"
    raise BadInputError(f"{path}: damaged tokenizer section: {problem}")


def extract_section(bundle: Bundle, section: Section, target: Path) -> None:
    """Write a section's content to a file; a tokenizer.json comes out as text."""
    with target.open("wb") as out:
        if section.kind == "HF_Tokenizer_Zlib":
            out.write(section_bytes(bundle, section))
        else:
            for chunk in _chunks(bundle.path, section):
                out.write(chunk)


def _prompt_metadata(bundle: Bundle) -> PromptMetadata:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from litert_lm_builder.runtime.proto.llm_metadata_pb2 import LlmMetadata

    if all(section.kind != "LlmMetadataProto" for section in bundle.sections):
        return PromptMetadata()
    message = LlmMetadata()
    try:
        message.ParseFromString(section_bytes(bundle, bundle.section("LlmMetadataProto")))
    except DecodeError as error:
        raise BadInputError(f"{bundle.path}: damaged prompt metadata: {error}") from error
    return _plain(message)


def _plain(message: LlmMetadata) -> PromptMetadata:
    def rule(union: TokenUnion) -> TokenRule:
        if union.HasField("token_str"):
            return str(union.token_str)
        return tuple(union.token_ids.ids)

    sampler = message.sampler_params
    affixes = message.prompt_templates
    return PromptMetadata(
        start_token=rule(message.start_token) if message.HasField("start_token") else None,
        stop_tokens=tuple(rule(token) for token in message.stop_tokens),
        chat_template=message.jinja_prompt_template or None,
        max_num_tokens=message.max_num_tokens,
        suppress_tokens=tuple(message.suppress_tokens.ids),
        model_type=message.llm_model_type.WhichOneof("model_type") or "",
        sampler={descriptor.name: float(value) for descriptor, value in sampler.ListFields()},
        prompt_affixes={
            descriptor.name: (value.prefix, value.suffix)
            for descriptor, value in affixes.ListFields()
        },
        min_runtime_version=message.min_runtime_version,
    )
