"""What a bundle's chat template does in the runtime's terms; runs in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from hermes.errors import HermesError

_SECONDS = 20.0
_QUESTION, _ANSWER = "the-users-question", "the-assistants-answer"
# The runtime defines both and leaves them empty.
_TOKENS = {"bos_token": "", "eos_token": ""}
# Methods that the runtime's engine has, observed in 0.18.1.
_METHODS = frozenset(
    {"strip", "lstrip", "rstrip", "startswith", "endswith", "split", "replace", "join", "items"}
)


@dataclass(frozen=True)
class TemplateProbe:
    """What was seen.

    Attributes:
        problem: why the template cannot be used at all.
        prompt: of one user message, its content given as the runtime gives it, as a list of parts.
        parts_problem: what happened to the content on the way.
        as_text: the template would have printed it, had it been given as text.
        after_answer: what is printed behind an assistant's answer.
        unsupported: constructs that run in plain conversations and that the runtime lacks.
        empty_names: `bos_token`, `eos_token`, where their text would be printed.
    """

    problem: str = ""
    prompt: str = ""
    parts_problem: str = ""
    as_text: bool = False
    after_answer: str = ""
    unsupported: tuple[str, ...] = ()
    empty_names: tuple[str, ...] = ()


@lru_cache(maxsize=8)
def probe_template(source: str) -> TemplateProbe:
    """Try the template in a child process with limits, because a template is a program."""
    from hermes.runners.child import run_in_child
    from hermes.tokenizer.template_check import MEMORY_LIMIT

    try:
        found = run_in_child(
            "hermes.deploy.template_probe:examine",
            source,
            tool="chat template",
            timeout=_SECONDS,
            memory_limit=MEMORY_LIMIT,
        )
    except HermesError as error:
        return TemplateProbe(problem=error.found)
    return cast(TemplateProbe, found)


def examine(source: str) -> TemplateProbe:
    """The child's side."""
    import resource

    from jinja2 import TemplateError, TemplateSyntaxError

    from hermes.tokenizer.probes import in_parts, turns
    from hermes.tokenizer.template_check import MEMORY_LIMIT

    resource.setrlimit(resource.RLIMIT_AS, (2 * MEMORY_LIMIT, 2 * MEMORY_LIMIT))
    try:
        unsupported = _unsupported(source)
    except TemplateSyntaxError as error:
        return TemplateProbe(problem=f"line {error.lineno}: {error.message}")
    except TemplateError as error:
        return TemplateProbe(problem=str(error))
    question, told = turns(_QUESTION), turns(_QUESTION, _ANSWER)
    prompt, problem = _render(source, in_parts(question), True)
    if not problem and _QUESTION not in prompt:
        problem = "the message's text is missing from the prompt"
    elif not problem and "'type'" in prompt:
        problem = "the list of parts is printed instead of its text"
    text, text_problem = _render(source, question, True)
    good = question if problem else in_parts(question)
    whole, _ = _render(source, told if problem else in_parts(told), False)
    return TemplateProbe(
        prompt=text if problem else prompt,
        parts_problem=problem,
        as_text=not text_problem and _QUESTION in text,
        after_answer=whole.rpartition(_ANSWER)[2] if _ANSWER in whole else "",
        unsupported=tuple(unsupported),
        empty_names=tuple(name for name in _TOKENS if _prints(source, good, name)),
    )


def _render(
    source: str,
    messages: Sequence[Mapping[str, object]],
    prompted: bool,
    tokens: Mapping[str, str] = _TOKENS,
) -> tuple[str, str]:
    """The prompt, or why there is none."""
    from hermes.tokenizer.jinja_environment import render

    try:
        return render(source, messages, tokens, add_generation_prompt=prompted), ""
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"


def _prints(source: str, messages: Sequence[Mapping[str, object]], name: str) -> bool:
    spelt = "<the-special-token>"
    return spelt in _render(source, messages, True, {**_TOKENS, name: spelt})[0]


def _unsupported(source: str) -> list[str]:
    """Constructs that plain conversations run and that the runtime's engine lacks."""
    from jinja2 import nodes

    from hermes.tokenizer.jinja_dialect import rewrite
    from hermes.tokenizer.jinja_environment import chat_environment

    tree = chat_environment().parse(source)
    jumps = [kind for kind in (nodes.Break, nodes.Continue) if next(tree.find_all(kind), None)]
    if jumps:
        # The runtime cannot even parse them.
        return [f"{{% {kind.__name__.lower()} %}}" for kind in jumps]
    try:
        rewritten = rewrite(source, _TOKENS, join_parts=False)
    except HermesError as error:
        return list(error.problems or (error.found,))
    places, instrumented = _translated(source)
    found = _run(rewritten.instrumented, rewritten.unsupported) + _run(instrumented, places)
    return [f"line {line}: {construct}" for line, construct in sorted(set(found))]


def _run(instrumented: str, places: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Those of the marked places that a plain conversation comes to."""
    from jinja2 import TemplateError

    from hermes.tokenizer.jinja_environment import compile_template, render
    from hermes.tokenizer.probes import PROBES, in_parts

    marks: set[int] = set()
    template = compile_template(instrumented, marks=marks)
    for name in ("user", "system and user", "three turns"):
        for messages in (PROBES[name], in_parts(PROBES[name])):
            for prompted in (True, False):
                with contextlib.suppress(TemplateError, TypeError, ValueError, LookupError):
                    render(template, messages, _TOKENS, add_generation_prompt=prompted)
    return [places[number] for number in sorted(marks)]


def _translated(source: str) -> tuple[list[tuple[int, str]], str]:
    """Methods and formatting that only a translated template has no more, each marked."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    from hermes.tokenizer.jinja_environment import MARK, chat_environment
    from hermes.tokenizer.jinja_source import template_source

    places: list[tuple[int, str]] = []

    def marked(node: nodes.Expr, construct: str) -> nodes.Expr:
        places.append((node.lineno, construct))
        number = nodes.Const(len(places) - 1)
        mark = nodes.Call(nodes.Name(MARK, "load"), [number], [], None, None)
        return nodes.CondExpr(mark, node, node)

    class Finder(NodeTransformer):
        def visit_Call(self, node: nodes.Call) -> nodes.Expr:  # noqa: N802
            node = cast(nodes.Call, self.generic_visit(node))
            callee = node.node
            if not isinstance(callee, nodes.Getattr) or callee.attr in _METHODS:
                return node
            if isinstance(callee.node, nodes.Name) and callee.node.name == "loop":
                return node
            return marked(node, f"method .{callee.attr}()")

        def visit_Mod(self, node: nodes.Mod) -> nodes.Expr:  # noqa: N802
            node = cast(nodes.Mod, self.generic_visit(node))
            is_text = isinstance(node.left, nodes.Const) and isinstance(node.left.value, str)
            return marked(node, "text formatting with %") if is_text else node

    tree = Finder().visit(chat_environment().parse(source))
    return places, template_source(tree)
