"""Turn a parsed Jinja template back into source that has no whitespace rules left.

Jinja2's parser has applied trim_blocks, lstrip_blocks and the minus signs already, so every piece
of text is written as a string literal and no engine can trim it differently. Compound expressions
are always in parentheses: precedence differs between engines in places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from jinja2 import nodes

from hermes.errors import UnsupportedModelError

_BINARY: dict[type[nodes.Node], str] = {
    nodes.Add: "+",
    nodes.Sub: "-",
    nodes.Mul: "*",
    nodes.Div: "/",
    nodes.FloorDiv: "//",
    nodes.Mod: "%",
    nodes.Pow: "**",
    nodes.And: "and",
    nodes.Or: "or",
}
_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def template_source(template: nodes.Template) -> str:
    """Source of the template, in constructs that Jinja2 and minijinja share.

    Raises:
        UnsupportedModelError: a construct that minijinja has no syntax for, with its line.
    """
    return _body(template.body)


def string_literal(text: str) -> str:
    """The text in double quotes, readable by both engines."""
    return '"' + "".join(_ESCAPES.get(character, character) for character in text) + '"'


def unsupported(node: nodes.Node, construct: str) -> UnsupportedModelError:
    """The error for a construct that cannot be expressed for the runtime."""
    return UnsupportedModelError(
        f"chat template, line {node.lineno}: {construct}",
        expected="constructs that the runtime's template engine (minijinja) has",
        todo="write this part of the template differently, or leave the template out",
    )


def _body(statements: Sequence[nodes.Node]) -> str:
    return "".join(_statement(statement) for statement in statements)


def _statement(node: nodes.Node) -> str:
    writer = _STATEMENTS.get(type(node))
    if writer is None:
        raise unsupported(node, f"{{% {_tag_name(node)} %}} is not available in the runtime")
    return writer(node)


def _tag_name(node: nodes.Node) -> str:
    names = {"FromImport": "from ... import", "ExprStmt": "do"}
    return names.get(type(node).__name__, type(node).__name__.lower())


def expression(node: nodes.Node) -> str:
    """Source of one expression."""
    operator = _BINARY.get(type(node))
    if operator is not None:
        binary = cast(nodes.BinExpr, node)
        return f"({expression(binary.left)} {operator} {expression(binary.right)})"
    writer = _EXPRESSIONS.get(type(node))
    if writer is None:
        raise unsupported(node, f"expression {type(node).__name__}")
    return writer(node)


def _output(node: nodes.Output) -> str:
    parts = []
    for item in node.nodes:
        if isinstance(item, nodes.TemplateData):
            if item.data:
                parts.append("{{ " + string_literal(item.data) + " }}")
        else:
            parts.append("{{ " + expression(item) + " }}")
    return "".join(parts)


def _for(node: nodes.For) -> str:
    head = f"for {_target(node.target)} in {expression(node.iter)}"
    if node.test is not None:
        head += f" if {expression(node.test)}"
    if node.recursive:
        head += " recursive"
    otherwise = "{% else %}" + _body(node.else_) if node.else_ else ""
    return f"{{% {head} %}}{_body(node.body)}{otherwise}{{% endfor %}}"


def _if(node: nodes.If) -> str:
    text = f"{{% if {expression(node.test)} %}}{_body(node.body)}"
    for branch in node.elif_:
        text += f"{{% elif {expression(branch.test)} %}}{_body(branch.body)}"
    if node.else_:
        text += "{% else %}" + _body(node.else_)
    return text + "{% endif %}"


def _parameters(arguments: Sequence[nodes.Name], defaults: Sequence[nodes.Expr]) -> str:
    required = len(arguments) - len(defaults)
    parts = [argument.name for argument in arguments[:required]]
    for argument, default in zip(arguments[required:], defaults, strict=True):
        parts.append(f"{argument.name}={expression(default)}")
    return ", ".join(parts)


def _macro(node: nodes.Macro) -> str:
    head = f"{node.name}({_parameters(node.args, node.defaults)})"
    return f"{{% macro {head} %}}{_body(node.body)}{{% endmacro %}}"


def _call_block(node: nodes.CallBlock) -> str:
    parameters = f"({_parameters(node.args, node.defaults)})" if node.args else ""
    return f"{{% call{parameters} {_call(node.call)} %}}{_body(node.body)}{{% endcall %}}"


def _filter_chain(node: nodes.Filter | None) -> str:
    """Filters whose innermost input is the block itself, outermost last."""
    if node is None:
        return ""
    inner = _filter_chain(node.node) if isinstance(node.node, nodes.Filter) else ""
    return f"{inner}{' | ' if inner else ''}{node.name}{_arguments(node, brackets=False)}"


def _assign_block(node: nodes.AssignBlock) -> str:
    chain = _filter_chain(node.filter)
    head = _target(node.target) + (f" | {chain}" if chain else "")
    return f"{{% set {head} %}}{_body(node.body)}{{% endset %}}"


def _with(node: nodes.With) -> str:
    pairs = zip(node.targets, node.values, strict=True)
    head = ", ".join(f"{_target(target)} = {expression(value)}" for target, value in pairs)
    return f"{{% with {head} %}}{_body(node.body)}{{% endwith %}}"


def _target(node: nodes.Node) -> str:
    if isinstance(node, nodes.Tuple):
        return ", ".join(_target(item) for item in node.items)
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    return expression(node)


def _const(node: nodes.Const) -> str:
    value: object = node.value
    if isinstance(value, str):
        return string_literal(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _sequence(opening: str, items: Sequence[nodes.Node], closing: str) -> str:
    return opening + ", ".join(expression(item) for item in items) + closing


def _tuple(node: nodes.Tuple) -> str:
    return _sequence("(", node.items, ",)" if len(node.items) == 1 else ")")


def _dict(node: nodes.Dict) -> str:
    pairs = (f"{expression(pair.key)}: {expression(pair.value)}" for pair in node.items)
    return "{" + ", ".join(pairs) + "}"


def _condition(node: nodes.CondExpr) -> str:
    text = f"({expression(node.expr1)} if {expression(node.test)}"
    return text + (f" else {expression(node.expr2)})" if node.expr2 is not None else ")")


def _compare(node: nodes.Compare) -> str:
    parts = [expression(node.expr)]
    parts.extend(f"{_COMPARE[operand.op]} {expression(operand.expr)}" for operand in node.ops)
    return "(" + " ".join(parts) + ")"


def _arguments(node: nodes.Call | nodes.Filter | nodes.Test, *, brackets: bool) -> str:
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        raise unsupported(node, "arguments unpacked with * or **")
    parts = [expression(argument) for argument in node.args]
    for keyword in node.kwargs:
        # Filters and calls hold Keyword nodes; a Pair is what optimised trees have.
        parts.append(f"{cast(nodes.Keyword, keyword).key}={expression(keyword.value)}")
    return f"({', '.join(parts)})" if parts or brackets else ""


def _call(node: nodes.Call) -> str:
    return expression(node.node) + _arguments(node, brackets=True)


def _filter(node: nodes.Filter) -> str:
    if node.node is None:
        raise unsupported(node, f"filter {node.name} without an input")
    return f"({expression(node.node)} | {node.name}{_arguments(node, brackets=False)})"


def _test(node: nodes.Test) -> str:
    return f"({expression(node.node)} is {node.name}{_arguments(node, brackets=False)})"


def _getitem(node: nodes.Getitem) -> str:
    return f"{expression(node.node)}[{expression(node.arg)}]"


def _slice(node: nodes.Slice) -> str:
    start, stop, step = (
        "" if part is None else expression(part) for part in (node.start, node.stop, node.step)
    )
    return f"{start}:{stop}" + (f":{step}" if step else "")


def _writers(table: dict[type, object]) -> dict[type[nodes.Node], Callable[[nodes.Node], str]]:
    # Each writer takes exactly its own node type; the lookup by type guarantees it.
    return cast(dict[type[nodes.Node], Callable[[nodes.Node], str]], table)


_STATEMENTS = _writers(
    {
        nodes.Output: _output,
        nodes.For: _for,
        nodes.If: _if,
        nodes.Macro: _macro,
        nodes.CallBlock: _call_block,
        nodes.FilterBlock: lambda node: (
            f"{{% filter {_filter_chain(node.filter)} %}}{_body(node.body)}{{% endfilter %}}"
        ),
        nodes.With: _with,
        nodes.Assign: lambda node: f"{{% set {_target(node.target)} = {expression(node.node)} %}}",
        nodes.AssignBlock: _assign_block,
        nodes.Block: lambda node: _body(node.body),
    }
)
_EXPRESSIONS = _writers(
    {
        nodes.Name: lambda node: node.name,
        nodes.NSRef: _target,
        nodes.Const: _const,
        nodes.TemplateData: lambda node: string_literal(node.data),
        nodes.Tuple: _tuple,
        nodes.List: lambda node: _sequence("[", node.items, "]"),
        nodes.Dict: _dict,
        nodes.CondExpr: _condition,
        nodes.Compare: _compare,
        nodes.Concat: lambda node: "(" + " ~ ".join(map(expression, node.nodes)) + ")",
        nodes.Not: lambda node: f"(not {expression(node.node)})",
        nodes.Neg: lambda node: f"(-{expression(node.node)})",
        # minijinja has no unary plus, and it changes nothing.
        nodes.Pos: lambda node: expression(node.node),
        nodes.Call: _call,
        nodes.Filter: _filter,
        nodes.Test: _test,
        nodes.Getattr: lambda node: f"{expression(node.node)}.{node.attr}",
        nodes.Getitem: _getitem,
        nodes.Slice: _slice,
    }
)
