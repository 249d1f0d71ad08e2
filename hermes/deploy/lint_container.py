"""Rules about the file: its name, its parts, its integrity."""

from __future__ import annotations

from collections.abc import Iterator

from hermes.deploy.lint import RuleBook
from hermes.deploy.lint_facts import BundleFacts

BOOK = RuleBook()
_SUFFIX = ".litertlm"
_KNOWN_MINOR = 7
_TESTED_RUNTIME = (0, 18)
_PAGE = 16 * 1024


@BOOK.rule(
    "file-name",
    "error",
    "LiteRT-LM recognises a bundle by the ending of its name; otherwise: 'Failed to create engine: "
    "INVALID_ARGUMENT: Unsupported or unknown file format'.",
    "rename it so that it ends in .litertlm",
)
def file_name(facts: BundleFacts) -> Iterator[str]:
    if not facts.name.endswith(_SUFFIX):
        yield f"the file is called {facts.name}"


@BOOK.rule(
    "damaged",
    "error",
    "The file differs from what was exported. The runtime checks nothing: a changed weight answers "
    "wrongly, a changed header ends the process.",
    "copy or download the file again; `hermes check` shows the same list",
)
def damaged(facts: BundleFacts) -> Iterator[str]:
    yield from facts.damage


@BOOK.rule(
    "no-hashes",
    "warning",
    "Without hashes in the file nobody can tell on the phone whether the download was complete and "
    "right.",
    "keep the file's SHA-256 beside it, or export with hermes, which writes hashes into the header",
)
def no_hashes(facts: BundleFacts) -> Iterator[str]:
    if not facts.digest and not facts.damage:
        yield "the header holds no hash of any section"


@BOOK.rule(
    "no-model",
    "error",
    "The engine has nothing to run: 'Failed to create engine'.",
    "export again; the file lacks its TFLiteModel section or it is damaged",
)
def no_model(facts: BundleFacts) -> Iterator[str]:
    if all(section.kind != "TFLiteModel" for section in facts.sections):
        yield "no TFLiteModel section"
    elif facts.model_problem:
        yield facts.model_problem


@BOOK.rule(
    "no-metadata",
    "error",
    "Start token, stop tokens, context and template stand in the LlmMetadataProto section; without "
    "it the runtime ends the process.",
    "export again with an exporter that writes it",
)
def no_metadata(facts: BundleFacts) -> Iterator[str]:
    if facts.prompt is None:
        yield "no LlmMetadataProto section"


@BOOK.rule(
    "alignment",
    "warning",
    "The format aligns sections to 16 KiB, the largest page of Apple and Android devices, because "
    "the runtime maps each of them into memory. On a desktop with small pages it opens others too.",
    "write the file with litert-lm-builder, which aligns sections to 16 KiB",
)
def alignment(facts: BundleFacts) -> Iterator[str]:
    for section in facts.sections:
        if section.offset % _PAGE:
            yield f"section {section.kind} begins at byte {section.offset}"


@BOOK.rule(
    "format-version",
    "warning",
    f"These rules know the format up to 1.{_KNOWN_MINOR} (litert-lm-builder 0.18). An older app "
    "may not read a newer file.",
    "use the runtime version that the file was built for, on the phone too",
)
def format_version(facts: BundleFacts) -> Iterator[str]:
    major, minor, patch = facts.version
    if (major, minor) > (1, _KNOWN_MINOR):
        yield f"the file has format version {major}.{minor}.{patch}"


@BOOK.rule(
    "runtime-version",
    "warning",
    "The file asks for a newer runtime than the one that these rules were observed in. The runtime "
    "itself only reports this wish; an older one may fail with 'Failed to create engine'.",
    "put at least this version of LiteRT-LM into the app",
)
def runtime_version(facts: BundleFacts) -> Iterator[str]:
    wanted = "" if facts.prompt is None else facts.prompt.min_runtime_version
    numbers = [int(part) for part in wanted.split(".")[:2] if part.isdigit()]
    if tuple(numbers) > _TESTED_RUNTIME:
        tested = ".".join(map(str, _TESTED_RUNTIME))
        yield f"it asks for runtime {wanted}; tested is {tested}"


@BOOK.rule(
    "stale-cache",
    "warning",
    "The runtime keeps packed weights beside the file under its name, time and size, not its "
    "content. Another model with the same three was answered for by the old one's weights.",
    "delete the cache, or give every new model a name of its own (hermes push puts a hash into it)",
)
def stale_cache(facts: BundleFacts) -> Iterator[str]:
    for name in facts.caches:
        yield f"a weight cache lies beside the file: {name}"
