"""Rewrite a chat template into what the runtime's template engine means the same by.

The runtime renders with minijinja and always passes a message's content as a list of parts. Every
difference handled here was observed in the runtime 0.18.1 and is observed again by
tests/tokenizer/test_runtime_templates.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from hermes.tokenizer.jinja_environment import MARK, chat_environment
from hermes.tokenizer.jinja_loops import LoopJumps
from hermes.tokenizer.jinja_source import template_source

_SPECIAL_TOKENS = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
SPECIAL_TOKEN_NAMES = tuple(f"{name}_token" for name in _SPECIAL_TOKENS)

# Text of a content: as it is, or the texts of its parts one after the other.
_TEXT_MACRO = (
    "{% macro hermes_text(content) %}"
    "{% if content is string or content is mapping or content is not iterable %}{{ content }}"
    "{% else %}{% for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
)

_FILTER_METHODS = {"upper", "lower", "title", "capitalize"}
_METHODS = {"strip", "lstrip", "rstrip", "startswith", "endswith", "replace", "join", "items"}
_LOOP_METHODS = {"cycle", "changed"}
_FILTERS = frozenset(
    {"abs", "attr", "batch", "bool", "capitalize", "count", "d", "default", "dictsort", "e"}
    | {"escape", "first", "float", "format", "groupby", "indent", "int", "items", "join", "last"}
    | {"length", "list", "lower", "map", "max", "min", "random", "reject", "rejectattr", "replace"}
    | {"reverse", "round", "safe", "select", "selectattr", "slice", "sort", "split", "string"}
    | {"title", "tojson", "trim", "unique", "upper", "urlencode"}
)
_TESTS = frozenset(
    {"boolean", "defined", "divisibleby", "eq", "equalto", "escaped", "even", "false", "float"}
    | {"ge", "gt", "in", "integer", "iterable", "le", "lt", "mapping", "ne", "none", "number"}
    | {"odd", "sameas", "sequence", "string", "true", "undefined"}
    | {"==", "!=", ">", ">=", "<", "<="}
)


@dataclass
class Rewritten:
    """A template for the runtime.

    Attributes:
        source: the template.
        instrumented: the same with `hermes_mark(n)` called where unsupported expression n runs.
        unsupported: line and construct of those expressions.
    """

    source: str
    instrumented: str
    unsupported: list[tuple[int, str]]


def rewrite(source: str, special_tokens: Mapping[str, str], *, join_parts: bool) -> Rewritten:
    """Translate a template written for transformers.

    Args:
        source: the original.
        special_tokens: texts of `bos_token` and the like; the runtime passes empty ones.
        join_parts: read every `content` as one text; False for a template that wants parts.

    Raises:
        UnsupportedModelError: syntax the runtime has not, with its line.
        jinja2.TemplateSyntaxError: the template is broken.
    """
    versions = []
    found: list[tuple[int, str]] = []
    for instrument in (False, True):
        tree = chat_environment().parse(source)
        lowered = LoopJumps().visit(tree)
        translator = _Translator(join_parts, instrument)
        body = cast(nodes.Template, translator.visit(lowered))
        prelude = _prelude(body, special_tokens, join_parts)
        versions.append(prelude + template_source(body))
        found = translator.unsupported
    return Rewritten(versions[0], versions[1], found)


def _prelude(template: nodes.Template, special_tokens: Mapping[str, str], join_parts: bool) -> str:
    """Definitions that the body relies on, and the names that transformers would have passed."""
    names = {name.name for name in template.find_all(nodes.Name) if name.ctx == "load"}
    stored = {name.name for name in template.find_all(nodes.Name) if name.ctx == "store"}
    body: list[nodes.Node] = []
    for name in SPECIAL_TOKEN_NAMES:
        if name in names and name in special_tokens:
            target = nodes.Name(name, "store")
            body.append(nodes.Assign(target, nodes.Const(special_tokens[name])))
        elif name in names and name not in stored:
            # The runtime defines bos_token and eos_token as empty; for transformers they do not
            # exist, which `is defined` can tell.
            for node in template.find_all(nodes.Name):
                if node.name == name:
                    node.name = f"hermes_no_{name}"
    for name in ("tools", "documents"):
        if name in names:
            defined = nodes.Test(nodes.Name(name, "load"), "defined", [], [], None, None)
            value = nodes.CondExpr(defined, nodes.Name(name, "load"), nodes.Const(None))
            body.append(nodes.Assign(nodes.Name(name, "store"), value))
    macro = _TEXT_MACRO if join_parts and "hermes_text" in names else ""
    return macro + template_source(nodes.Template(body))


class _Translator(NodeTransformer):
    """Expressions that mean something else, or nothing, in the runtime's engine."""

    def __init__(self, join_parts: bool, instrument: bool) -> None:
        self._join_parts = join_parts
        self._instrument = instrument
        self.unsupported: list[tuple[int, str]] = []

    def _refuse(self, node: nodes.Expr, construct: str) -> nodes.Expr:
        number = len(self.unsupported)
        self.unsupported.append((node.lineno, construct))
        if not self._instrument:
            return node
        mark = nodes.Call(nodes.Name(MARK, "load"), [nodes.Const(number)], [], None, None)
        return nodes.CondExpr(mark, node, node)

    def _text(self, node: nodes.Expr) -> nodes.Expr:
        if not self._join_parts:
            return node
        name = nodes.Name("hermes_text", "load")
        return _at(nodes.Call(name, [node], [], None, None), node)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        for index, item in enumerate(node.nodes):
            truth = isinstance(item, (nodes.Compare, nodes.Test, nodes.Not))
            if truth or (isinstance(item, nodes.Const) and isinstance(item.value, bool)):
                # The runtime prints them in lower case.
                yes, no = nodes.Const("True"), nodes.Const("False")
                node.nodes[index] = nodes.CondExpr(item, yes, no)
        return cast(nodes.Output, self.generic_visit(node))

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Expr:  # noqa: N802
        node = cast(nodes.Getattr, self.generic_visit(node))
        return self._text(node) if node.attr == "content" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        node = cast(nodes.Getitem, self.generic_visit(node))
        is_content = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return self._text(node) if is_content else node

    def visit_Test(self, node: nodes.Test) -> nodes.Expr:  # noqa: N802
        if node.name in ("defined", "undefined", "none") and isinstance(
            node.node, (nodes.Getattr, nodes.Getitem)
        ):
            # Whether a content exists must be asked of the content, not of its text.
            node.node = cast(nodes.Expr, self.generic_visit(node.node))
        else:
            node = cast(nodes.Test, self.generic_visit(node))
        if node.name == "none":
            # In the runtime undefined values are none, and none itself is not.
            return nodes.Compare(node.node, [nodes.Operand("eq", nodes.Const(None))])
        if node.name == "sequence":
            # Text and dictionaries are sequences for Jinja2 only.
            others = nodes.Or(_test(node.node, "string"), _test(node.node, "mapping"))
            return nodes.Or(others, node)
        if node.name not in _TESTS:
            return self._refuse(node, f"test {node.name!r}")
        return node

    def visit_Mod(self, node: nodes.Mod) -> nodes.Expr:  # noqa: N802
        node = cast(nodes.Mod, self.generic_visit(node))
        if isinstance(node.left, nodes.Const) and isinstance(node.left.value, str):
            values = node.right.items if isinstance(node.right, nodes.Tuple) else [node.right]
            return _filter(node.left, "format", list(values))
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        node = cast(nodes.Filter, self.generic_visit(node))
        # Jinja2 declares Pair here and puts Keyword nodes in, whose key is a plain string.
        keywords = {str(keyword.key): keyword for keyword in node.kwargs}
        if node.name in ("default", "d") and "boolean" in keywords:
            fallback = [*node.args, *([] if node.args else [nodes.Const("")])]
            if "default_value" in keywords:
                fallback = [keywords["default_value"].value]
            node.args = [*fallback, keywords["boolean"].value]
            node.kwargs = []
        elif node.name == "join" and "attribute" in keywords and node.node is not None:
            node.node = nodes.Filter(node.node, "map", [], [keywords["attribute"]], None, None)
            node.kwargs = []
        elif node.name == "tojson" and (node.args or node.kwargs):
            return self._refuse(node, "filter 'tojson' with arguments")
        elif node.name not in _FILTERS:
            return self._refuse(node, f"filter {node.name!r}")
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Expr:  # noqa: N802
        if isinstance(node.node, nodes.Getattr):
            node.node.node = self.visit(node.node.node)
            for index, argument in enumerate(node.args):
                node.args[index] = self.visit(argument)
            return self._method(node, node.node.node, node.node.attr)
        node = cast(nodes.Call, self.generic_visit(node))
        if isinstance(node.node, nodes.Name) and node.node.name in ("cycler", "joiner", "lipsum"):
            return self._refuse(node, f"function {node.node.name!r}")
        return node

    def _method(self, node: nodes.Call, value: nodes.Expr, method: str) -> nodes.Expr:
        arguments = node.args
        if method in _FILTER_METHODS and not arguments:
            return _filter(value, method, [])
        if method == "split":
            # An iterator in the runtime: no length, no slices, no last item.
            return _filter(node, "list", [])
        if method == "get" and arguments:
            is_content = isinstance(arguments[0], nodes.Const) and arguments[0].value == "content"
            found: nodes.Expr = nodes.Getitem(value, arguments[0], "load")
            fallback = arguments[1] if len(arguments) > 1 else nodes.Const(None)
            present = nodes.Compare(arguments[0], [nodes.Operand("in", value)])
            return nodes.CondExpr(present, self._text(found) if is_content else found, fallback)
        if method == "keys" and not arguments:
            return _filter(value, "list", [])
        if method == "values" and not arguments:
            items = nodes.Call(nodes.Getattr(value, "items", "load"), [], [], None, None)
            second = nodes.Keyword("attribute", nodes.Const(1))
            return _filter(nodes.Filter(items, "map", [], [second], None, None), "list", [])
        if method in ("removeprefix", "removesuffix") and len(arguments) == 1:
            return _without_affix(value, arguments[0], at_end=method == "removesuffix")
        is_loop = isinstance(value, nodes.Name) and value.name == "loop"
        known = method in _METHODS or (is_loop and method in _LOOP_METHODS)
        if not known or (method == "replace" and len(arguments) != 2):
            return self._refuse(node, f"method .{method}()")
        return node


_ExprT = TypeVar("_ExprT", bound=nodes.Expr)


def _at(node: _ExprT, place: nodes.Node) -> _ExprT:
    node.lineno = place.lineno
    return node


def _test(node: nodes.Expr, name: str) -> nodes.Test:
    return nodes.Test(node, name, [], [], None, None)


def _filter(node: nodes.Expr, name: str, arguments: list[nodes.Expr]) -> nodes.Filter:
    return _at(nodes.Filter(node, name, arguments, [], None, None), node)


def _without_affix(value: nodes.Expr, affix: nodes.Expr, *, at_end: bool) -> nodes.Expr:
    method = "endswith" if at_end else "startswith"
    matches = nodes.Call(nodes.Getattr(value, method, "load"), [affix], [], None, None)
    length = _filter(affix, "length", [])
    rest = nodes.Slice(length, None, None)
    if at_end:
        rest = nodes.Slice(None, nodes.Sub(_filter(value, "length", []), length), None)
    return nodes.CondExpr(matches, nodes.Getitem(value, rest, "load"), value)
