"""Conversations that a chat template must render the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for index, content in enumerate(contents):
        messages.append({"role": "assistant" if index % 2 else "user", "content": content})
    return messages


_HOSTILE = (
    " \n{{ 7*7 }}{% raw %}{# x #} 'single' \"double\" \\n \\ <|im_end|></s>\n<b>&amp;</b> %s {0} "
    "tab\there\r\nCRLF \u00e9\u00df\u0130 \u4e2d\u6587 \U0001f60a\u200d\u2028 \u00a0 \n\n "
)

# Every conversation that a template must render the same in both engines. Without U+0000: the
# runtime's interface passes prompts as C strings, so a text ends there.
PROBES: dict[str, list[dict[str, str]]] = {
    "user": turns("Name the capital of Italy."),
    "system and user": turns("Hi", system="You answer briefly."),
    "three turns": turns("One?", "Yes, one.", "And two?"),
    "system and three turns": turns("One?", "Yes.\n", " And two? ", system="Be exact."),
    "empty": turns(""),
    "empty system and answer": turns("x", "", "", system=""),
    "long": turns("0123456789 abcdef\n" * 1200),
    "hostile": turns(_HOSTILE, _HOSTILE, _HOSTILE),
    "hostile system": turns("{{ messages }}", system=_HOSTILE),
    "white space": turns(" \t\n", "\n", "  a  b  "),
    "thinking": turns("q", "<think>\nfirst\n</think>\n\nthen", "r"),
}


def in_parts(messages: Sequence[Mapping[str, str]]) -> list[dict[str, object]]:
    """The same messages as the runtime passes them."""
    return [
        {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]
