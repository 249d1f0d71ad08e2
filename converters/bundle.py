"""Write a .litertlm file through the official builder, reproducibly and checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from converters.bundle_header import (
    HEADER_BEGIN,
    Header,
    HeaderEntry,
    parse_header,
    parse_metadata,
)
from converters.bundle_reader import (
    CHECKSUM_KEY,
    DIGEST_KEY,
    NO_DIGEST,
    Bundle,
    Section,
    extract_section,
    hash_file,
    hash_section,
    holds_file,
    read_bundle,
    section_bytes,
)
from hermes.errors import BadInputError, NativeToolError, ResourceError
from hermes.tokenizer.interface import PromptContract, Tokenizer

if TYPE_CHECKING:
    from litert_lm_builder.litertlm_builder import LitertLmFileBuilder

__all__ = [
    "Bundle",
    "BundleSpec",
    "Section",
    "begin_bundle",
    "disk_errors",
    "extract_section",
    "finish_bundle",
    "read_bundle",
    "section_bytes",
    "stamp_metadata",
    "write_bundle",
]

# The builder always writes the current time; this one of equal length takes its place.
_TIMESTAMP = "1970-01-01T00:00:00.000001+00:00"
_ATTEMPTS = 3
_COPIED = 2**20


@dataclass(frozen=True)
class BundleSpec:
    """Everything that goes into a bundle.

    Attributes:
        model: file with the model.
        tokenizer: as `hermes.tokenizer` opened it.
        contract: start and stop tokens and the chat template.
        max_num_tokens: the exported context.
        metadata: further keys for the header.
        suppress_tokens: ids the sampler must never pick (rows of a padded vocabulary).
        model_sha256: of the model; computed if empty.
        model_offset: where in its file it begins.
    """

    model: Path
    tokenizer: Tokenizer
    contract: PromptContract
    max_num_tokens: int
    metadata: dict[str, str] = field(default_factory=dict)
    suppress_tokens: tuple[int, ...] = ()
    model_sha256: str = ""
    model_offset: int = 0


def write_bundle(spec: BundleSpec, target: Path) -> Bundle:
    """Write the bundle to `target`, reopen it and compare it with the spec.

    `target` must be a temporary path; it is written in place.

    Returns:
        The bundle as it was read back.

    Raises:
        BadInputError: the spec contradicts itself or the model file is missing.
        ResourceError: the disk is full.
        NativeToolError: the builder wrote something else than it was given.
    """
    if not spec.model.is_file() or spec.model.stat().st_size <= spec.model_offset:
        raise BadInputError(
            "this bundle cannot be written", problems=[f"{spec.model}: no such file, or empty"]
        )
    offset = begin_bundle(spec, target)
    with disk_errors(target), spec.model.open("rb") as source, target.open("r+b") as file:
        source.seek(spec.model_offset)
        file.seek(offset)
        shutil.copyfileobj(source, file, _COPIED)
    return finish_bundle(spec, target)


def begin_bundle(spec: BundleSpec, target: Path) -> int:
    """Write everything that comes before the model; gives the offset where the model belongs.

    The model is the last section, so it can be made in its place, and need not exist yet.

    Raises:
        BadInputError: the spec contradicts itself.
        ResourceError: the disk is full.
    """
    _check_spec(spec)
    with disk_errors(target):
        for _ in range(_ATTEMPTS):
            with tempfile.TemporaryDirectory(prefix="hermes-bundle-") as folder:
                builder = _builder(spec, Path(folder))
                with target.open("wb") as stream:
                    builder.build(stream, validate_metadata=True)
            with target.open("rb") as file:
                header = _read_header(file, target)
            stamp = _entry(header.system, "creation_timestamp")
            # Once in a million runs the microseconds are zero and left out.
            if len(str(stamp.value)) == len(_TIMESTAMP):
                break
        offset = header.sections[-1].begin
        os.truncate(target, offset)
    return offset


def finish_bundle(spec: BundleSpec, target: Path) -> Bundle:
    """Complete the header of a bundle whose model is in its place, and compare it with the spec.

    The same spec gives the same bytes: the builder's random uuid and clock are replaced by values
    derived from the content. The header holds every section's hash and its own, so that
    `converters.integrity` finds any changed bit.

    Args:
        spec: as `begin_bundle` took it; its model may be the very file of the bundle.
        target: with the model at its end.

    Raises:
        ResourceError: the disk is full.
        NativeToolError: the builder wrote something else than it was given.
    """
    checksum = spec.model_sha256 or hash_file(spec.model, spec.model_offset)
    with disk_errors(target):
        size = target.stat().st_size
        with target.open("r+b") as file:
            # Until now the header speaks of the stand-in.
            model = _read_header(file, target).sections[-1]
            file.seek(model.end_position)
            file.write(size.to_bytes(8, "little"))
            _overwrite(file, _entry(model.entries, CHECKSUM_KEY), checksum)
        _finish(target)
    bundle = _read_back(spec, checksum, target)
    _compare(spec, checksum, bundle)
    return bundle


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn what a disk refuses into ResourceError."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{target}: writing the bundle failed: {error.strerror or error}",
            todo="free some space, or write to another disk",
        ) from error


def _read_back(spec: BundleSpec, checksum: str, target: Path) -> Bundle:
    """The bundle as read; a model that is byte for byte the given one has its hash."""
    bundle = read_bundle(target, hashes=False)
    sections = []
    for section in bundle.sections:
        same = section.kind == "TFLiteModel" and _holds_model(spec, section, target)
        digest = checksum if same else hash_section(target, section)
        sections.append(replace(section, sha256=digest))
    return replace(bundle, sections=tuple(sections))


def _holds_model(spec: BundleSpec, section: Section, target: Path) -> bool:
    if target.samefile(spec.model):
        return section.offset == spec.model_offset
    return holds_file(target, section, spec.model, spec.model_offset)


def _check_spec(spec: BundleSpec) -> None:
    problems = []
    if not spec.contract.stop_token_ids:
        problems.append("no stop token: the runtime refuses to run without one")
    if spec.max_num_tokens < 2:
        problems.append(f"max_num_tokens is {spec.max_num_tokens}")
    reserved = {"uuid", "creation_timestamp", DIGEST_KEY} & set(spec.metadata)
    if reserved:
        problems.append(f"metadata keys {sorted(reserved)} belong to the builder")
    ids = (*spec.contract.stop_token_ids, *spec.suppress_tokens, spec.contract.start_token_id or 0)
    if min(ids, default=0) < 0:
        problems.append(f"negative token ids among {sorted(ids)[:3]}")
    if set(spec.contract.stop_token_ids) & set(spec.suppress_tokens):
        problems.append("a stop token is suppressed: it could never be emitted")
    if problems:
        raise BadInputError("this bundle cannot be written", problems=problems)


def _llm_metadata(spec: BundleSpec) -> bytes:
    from litert_lm_builder.runtime.proto.llm_metadata_pb2 import LlmMetadata
    from litert_lm_builder.runtime.proto.sampler_params_pb2 import SamplerParameters

    message = LlmMetadata(max_num_tokens=spec.max_num_tokens)
    if spec.contract.start_token_id is not None:
        message.start_token.token_ids.ids.append(spec.contract.start_token_id)
    for token_id in spec.contract.stop_token_ids:
        message.stop_tokens.add().token_ids.ids.append(token_id)
    if spec.contract.chat_template is not None:
        message.jinja_prompt_template = spec.contract.chat_template
    if spec.suppress_tokens:
        message.suppress_tokens.ids.extend(spec.suppress_tokens)
    # TOP_P with k = 1 is greedy; the types GREEDY and TOP_K make decoding fail.
    message.sampler_params.type = SamplerParameters.TOP_P
    message.sampler_params.k = 1
    message.sampler_params.p = 1.0
    message.sampler_params.temperature = 1.0
    # Without a type the runtime guesses one from the vocabulary and may pick another template path.
    message.llm_model_type.generic_model.SetInParent()
    message.supports_thinking = False
    message.supports_function_calling = False
    return cast(bytes, message.SerializeToString(deterministic=True))


def _builder(spec: BundleSpec, folder: Path) -> LitertLmFileBuilder:
    from litert_lm_builder import litertlm_builder as official

    def entry(key: str, value: str) -> official.Metadata:
        return official.Metadata(key=key, value=value, dtype=official.DType.STRING)

    metadata_path, builder = folder / "llm_metadata.pb", official.LitertLmFileBuilder()
    stand_in = folder / "model.tflite"
    stand_in.write_bytes(b"\0")
    for key, value in sorted((spec.metadata | {DIGEST_KEY: NO_DIGEST}).items()):
        builder.add_system_metadata(entry(key, value))
    metadata_path.write_bytes(_llm_metadata(spec))
    builder.add_llm_metadata(
        str(metadata_path), additional_metadata=[entry(CHECKSUM_KEY, hash_file(metadata_path))]
    )
    if spec.tokenizer.kind == "sentencepiece":
        tokenizer_path, add_tokenizer = folder / "t.model", builder.add_sentencepiece_tokenizer
        tokenizer_path.write_bytes(spec.tokenizer.data)
    else:
        tokenizer_path, add_tokenizer = folder / "t.zlib", builder.add_hf_tokenizer
        size = len(spec.tokenizer.data).to_bytes(8, "little")
        tokenizer_path.write_bytes(size + zlib.compress(spec.tokenizer.data, 9))
    add_tokenizer(
        str(tokenizer_path), additional_metadata=[entry(CHECKSUM_KEY, hash_file(tokenizer_path))]
    )
    builder.add_tflite_model(
        str(stand_in),
        official.TfLiteModelType.PREFILL_DECODE,
        additional_metadata=[entry(CHECKSUM_KEY, NO_DIGEST)],
    )
    return builder


def stamp_metadata(path: Path, values: Mapping[str, str]) -> None:
    """Replace header values by others of equal length; uuid and digest follow the new content."""
    with path.open("r+b") as file:
        entries = {entry.key: entry for entry in _read_header(file, path).system}
        for key, value in values.items():
            if len(str(entries[key].value)) != len(value):
                raise ValueError(
                    f"{key} has {len(str(entries[key].value))} characters, not {len(value)}"
                )
            _overwrite(file, entries[key], value)
    _finish(path)


def _read_header(file: BinaryIO, path: Path) -> Header:
    size = file.seek(0, 2)
    file.seek(0)
    version, end = parse_header(file.read(HEADER_BEGIN), str(path))
    return parse_metadata(version, end, file.read(end - HEADER_BEGIN), size, str(path))


def _finish(path: Path) -> None:
    """Overwrite uuid, time and digest."""
    with path.open("r+b") as file:
        header = _read_header(file, path)
        _overwrite(file, _entry(header.system, "creation_timestamp"), _TIMESTAMP)
        content = _content_hash(header.system, header.sections)
        name = str(uuid.UUID(bytes=content[:16], version=5))
        digest = _entry(header.system, DIGEST_KEY)
        _overwrite(file, _entry(header.system, "uuid"), name)
        _overwrite(file, digest, NO_DIGEST)
        file.seek(0)
        _overwrite(file, digest, hashlib.sha256(file.read(header.end)).hexdigest())


def _entry(entries: Sequence[HeaderEntry], key: str) -> HeaderEntry:
    return next(entry for entry in entries if entry.key == key)


def _content_hash(system: Sequence[HeaderEntry], sections: Sequence[object]) -> bytes:
    digest = hashlib.sha256()
    changing = ("uuid", "creation_timestamp", DIGEST_KEY)
    kept = [entry for entry in system if entry.key not in changing]
    digest.update(repr(kept).encode("utf-8"))
    digest.update(repr(sections).encode("utf-8"))
    return digest.digest()


def _overwrite(file: BinaryIO, entry: HeaderEntry, text: str) -> None:
    file.seek(entry.position)
    file.write(text.encode("ascii"))


def _compare(spec: BundleSpec, model_checksum: str, bundle: Bundle) -> None:
    model = bundle.section("TFLiteModel")
    prompt, size = bundle.prompt, spec.model.stat().st_size - spec.model_offset
    checks = {
        "model": model.sha256 == model_checksum and model.size == size,
        "tokenizer": bundle.tokenizer.data == spec.tokenizer.data,
        "start token": prompt.start_token_id == spec.contract.start_token_id,
        "stop tokens": prompt.stop_token_ids == spec.contract.stop_token_ids,
        "chat template": prompt.chat_template == (spec.contract.chat_template or None),
        "context": prompt.max_num_tokens == spec.max_num_tokens,
        "suppressed tokens": prompt.suppress_tokens == spec.suppress_tokens,
    }
    wrong = [name for name, equal in checks.items() if not equal]
    if wrong:
        raise NativeToolError(
            f"{bundle.path}: read back, the bundle differs from what was given to the builder",
            problems=wrong,
            todo="check the disk; if it happens again, report it with the command line",
        )
