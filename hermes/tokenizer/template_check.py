"""Render a template and its translation, and compare; runs in a process of its own."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from hermes.errors import BadInputError, UnsupportedModelError
from hermes.tokenizer.probes import PROBES, in_parts, turns
from hermes.tokenizer.template import ChatTemplate

if TYPE_CHECKING:
    from jinja2 import Template

MEMORY_LIMIT = 768 * 2**20
# Both forms must see the same clock.
_NOW = datetime(2024, 7, 9, 15, 4, 5)
_ANSWER = "the-assistants-answer"


def translate_and_compare(original: str, tokens: Mapping[str, str]) -> ChatTemplate:
    """The work of `prepare_chat_template`; call it only in a process of its own."""
    # The parent's memory limit is polled; an allocation at once must fail by itself.
    resource.setrlimit(resource.RLIMIT_AS, (2 * MEMORY_LIMIT, 2 * MEMORY_LIMIT))
    return compare(original, tokens)


def compare(original: str, tokens: Mapping[str, str]) -> ChatTemplate:
    """Translate, render both on every probe, and demand equality; without limits."""
    from jinja2 import TemplateSyntaxError

    try:
        return _Comparison(original, tokens).run()
    except TemplateSyntaxError as error:
        raise BadInputError(
            f"chat template, line {error.lineno}: {error.message}", todo="correct the template"
        ) from error
    except (MemoryError, RecursionError, OverflowError) as error:
        raise BadInputError(
            f"rendering the chat template failed: {type(error).__name__}",
            todo="look for an endless or exploding loop in the template",
        ) from error


class _Comparison:
    """One template, rendered in its original and in its translated form."""

    def __init__(self, original: str, tokens: Mapping[str, str]) -> None:
        self.original = original
        self.tokens = tokens
        self.marks: set[int] = set()
        self.compiled: dict[str, Template] = {}

    def run(self) -> ChatTemplate:
        from hermes.tokenizer.jinja_dialect import rewrite

        # Syntax that the runtime lacks is refused before anything is rendered.
        rewritten = rewrite(self.original, self.tokens, join_parts=True)
        join_parts, notes = self._wants_text()
        if not join_parts:
            rewritten = rewrite(self.original, self.tokens, join_parts=False)
        prompts, refusals, problems = {}, {}, []
        for name, messages in PROBES.items():
            given: Sequence[Mapping[str, object]]
            given = messages if join_parts else in_parts(messages)
            for prompted in (True, False):
                wanted = self._render(self.original, given, prompted)
                forms: list[Sequence[Mapping[str, object]]] = [in_parts(messages), given]
                for form in forms:
                    if self._render(rewritten.source, form, prompted) != wanted:
                        problems.append(f"probe {name!r} renders differently")
                self._render(rewritten.instrumented, in_parts(messages), prompted)
                if prompted and isinstance(wanted, str):
                    prompts[name] = wanted
                elif prompted:
                    refusals[name] = str(wanted)
        for number, (line, construct) in enumerate(rewritten.unsupported):
            where = f"line {line}: {construct} is not available in the runtime"
            if number in self.marks:
                problems.append(where)
            else:
                notes.append(f"chat template, {where} (used with tools only)")
        if problems:
            raise UnsupportedModelError(
                "the chat template cannot be translated for the runtime's template engine",
                problems=list(dict.fromkeys(problems)),
                todo="write these parts of the template differently, or leave the template out",
            )
        notes.extend(f"chat template refuses {name}: {why}" for name, why in refusals.items())
        source, end = rewritten.source, self._turn_end(join_parts)
        return ChatTemplate(source, self.original, prompts, refusals, end, tuple(notes))

    def _wants_text(self) -> tuple[bool, list[str]]:
        """Whether contents are given as text (usual), or the template works with parts only."""
        as_text = self._render(self.original, PROBES["user"], True)
        if isinstance(as_text, str) and PROBES["user"][0]["content"] in as_text:
            return True, []
        by_parts = self._render(self.original, in_parts(PROBES["user"]), True)
        if isinstance(by_parts, str) and PROBES["user"][0]["content"] in by_parts:
            return False, ["the chat template takes contents as lists of parts only"]
        raise BadInputError(
            "the chat template does not print a plain user message",
            problems=[] if isinstance(as_text, str) else [str(as_text)],
            todo="correct the template",
        )

    def _render(
        self, source: str, messages: Sequence[Mapping[str, object]], prompted: bool
    ) -> str | _Refused:
        from jinja2 import TemplateError

        from hermes.tokenizer.jinja_environment import compile_template, render

        if source not in self.compiled:
            self.compiled[source] = compile_template(source, now=_NOW, marks=self.marks)
        try:
            return render(
                self.compiled[source], messages, self.tokens, add_generation_prompt=prompted
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            return _Refused(str(error))

    def _turn_end(self, join_parts: bool) -> str:
        messages = turns("question", _ANSWER)
        text = self._render(self.original, messages if join_parts else in_parts(messages), False)
        return text.rpartition(_ANSWER)[2] if isinstance(text, str) and _ANSWER in text else ""


class _Refused(Exception):  # noqa: N818
    """A template's own refusal or failure; any two are equal, since wordings differ."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Refused)

    __hash__ = Exception.__hash__
