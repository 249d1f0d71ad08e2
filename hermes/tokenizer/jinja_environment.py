"""Chat templates rendered with the meaning that transformers' apply_chat_template gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, object]

MARK = "hermes_mark"


class _Generation(Extension):
    """`{% generation %}` only marks the assistant's tokens for training; its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A `with` block gives the body a scope of its own, as the original's call block does.
        return nodes.With([], [], body).set_lineno(line)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def chat_environment(now: datetime | None = None) -> ImmutableSandboxedEnvironment:
    """An environment with transformers' settings, filters and functions for chat templates.

    Args:
        now: what the template's clock shows instead of the present.
    """

    def strftime_now(layout: str) -> str:
        return (now or datetime.now()).strftime(layout)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def compile_template(
    source: str, *, now: datetime | None = None, marks: set[int] | None = None
) -> Template:
    """Parse and compile a template.

    Args:
        source: the template.
        now: what `strftime_now` shows instead of the present.
        marks: collects the numbers of the instrumented expressions that run.

    Raises:
        jinja2.TemplateSyntaxError: the template is broken.
    """
    environment = chat_environment(now)
    if marks is not None:

        def mark(number: int) -> bool:
            marks.add(number)
            return True

        environment.globals[MARK] = mark
    return environment.from_string(source)


def render(
    template: str | Template,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt that the template prints for these messages, without tools and documents.

    Args:
        template: its source, or compiled.
        messages: dictionaries with `role` and `content`.
        special_tokens: `bos_token`, `eos_token` and so on, as far as the tokenizer has them.
        add_generation_prompt: end with the opening of the assistant's answer.

    Raises:
        jinja2.TemplateError: the template refuses the conversation or fails.
    """
    compiled = compile_template(template) if isinstance(template, str) else template
    return compiled.render(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **special_tokens,
    )
