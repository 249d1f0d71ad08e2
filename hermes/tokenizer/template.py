"""The chat template: found beside the checkpoint, translated for the runtime, proven equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hermes.errors import BadInputError, NativeToolError
from hermes.tokenizer.interface import Tokenizer
from hermes.tokenizer.opening import read_json_object

_SECONDS = 20.0
_LONGEST_TEMPLATE = 256 * 2**10


@dataclass(frozen=True)
class ChatTemplate:
    """A template in the form that the runtime renders.

    Attributes:
        source: for the bundle.
        original: as found.
        prompts: what the original prints for each of PROBES, in transformers' semantics.
        refusals: the probes that it refuses, with its message.
        turn_end: what it prints after an assistant's answer.
        notes: for the report.
    """

    source: str
    original: str
    prompts: dict[str, str]
    refusals: dict[str, str] = field(default_factory=dict)
    turn_end: str = ""
    notes: tuple[str, ...] = ()


def find_template(
    files: Mapping[str, Path], gguf_metadata: Mapping[str, object] | None = None
) -> tuple[str, str] | None:
    """The template and where it was found: chat_template.jinja, tokenizer_config.json or GGUF."""
    if "chat_template.jinja" in files:
        path = files["chat_template.jinja"]
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise BadInputError(f"{path}: not readable as text: {error}") from error
    if "tokenizer_config.json" in files:
        path = files["tokenizer_config.json"]
        found = read_json_object(path).get("chat_template")
        if found is not None:
            return _default_template(found, str(path)), f"{path}: chat_template"
    found = (gguf_metadata or {}).get("tokenizer.chat_template")
    return (found, "tokenizer.chat_template") if isinstance(found, str) else None


def _default_template(found: object, origin: str) -> str:
    if isinstance(found, str):
        return found
    named = {}
    for entry in found if isinstance(found, list) else ():
        if isinstance(entry, dict):
            named[str(entry.get("name"))] = entry.get("template")
    template = named.get("default")
    if not isinstance(template, str):
        raise BadInputError(
            f"{origin}: chat_template is neither text nor a list with one named default",
            expected="a template, or named templates among which one is default",
            todo=f"rename one of {sorted(named)} to default" if named else "correct the file",
        )
    return template


def special_tokens(
    files: Mapping[str, Path], gguf_metadata: Mapping[str, object] | None, tokenizer: Tokenizer
) -> dict[str, str]:
    """Texts of `bos_token`, `eos_token` and so on, as transformers passes them to a template."""
    from hermes.tokenizer.jinja_dialect import SPECIAL_TOKEN_NAMES

    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        values = read_json_object(files[name]) if name in files else {}
        for token in SPECIAL_TOKEN_NAMES:
            value = values.get(token)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[token] = text
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for token, key in keys.items():
        token_id = (gguf_metadata or {}).get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < tokenizer.vocab_size:
            found.setdefault(f"{token}_token", tokenizer.piece(token_id))
    return found


def prepare_chat_template(original: str, tokens: Mapping[str, str]) -> ChatTemplate:
    """Translate a template for the runtime and compare both on every probe.

    Runs in a child process with limits on time and memory, because a template is a program.

    Raises:
        BadInputError: broken, refuses a plain user message, or exceeds the limits.
        UnsupportedModelError: cannot be translated; with line and construct.
    """
    from hermes.runners.child import run_in_child
    from hermes.tokenizer.template_check import MEMORY_LIMIT

    if len(original) > _LONGEST_TEMPLATE:
        raise BadInputError(f"the chat template has {len(original)} characters")
    try:
        found = run_in_child(
            "hermes.tokenizer.template_check:translate_and_compare",
            original,
            dict(tokens),
            tool="chat template",
            timeout=_SECONDS,
            memory_limit=MEMORY_LIMIT,
        )
    except NativeToolError as error:
        raise BadInputError(
            f"rendering the chat template failed: {error.found}",
            expected=f"a prompt within {_SECONDS:g} s and {MEMORY_LIMIT >> 20} MiB",
            todo="look for an endless or exploding loop in the template",
        ) from error
    assert isinstance(found, ChatTemplate)
    return found
