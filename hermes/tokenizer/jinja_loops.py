"""Express `{% continue %}` and `{% break %}`, which the runtime's engine cannot parse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from jinja2 import nodes
from jinja2.visitor import NodeTransformer


class LoopJumps(NodeTransformer):
    """Replace `{% continue %}` and `{% break %}`, which the runtime cannot parse.

    Handled is the form that templates use: an `if` whose only branch with a jump ends in it. What
    follows such an `if` moves into its `else`. A break also sets a flag around the loop's body.
    """

    def __init__(self) -> None:
        self._flags = 0

    def visit_For(self, node: nodes.For) -> nodes.Node | list[nodes.Node]:  # noqa: N802
        flag = f"hermes_stop_{self._flags}"
        self._flags += 1
        state = _JumpState(flag)
        node.body = _without_jumps(node.body, state)
        node = cast(nodes.For, self.generic_visit(node))
        if not state.breaks:
            return node
        is_set = nodes.Getattr(nodes.Name(flag, "load"), "now", "load")
        node.body = [nodes.If(nodes.Not(is_set), node.body, [], [])]
        start = nodes.Keyword("now", nodes.Const(False))
        create = nodes.Call(nodes.Name("namespace", "load"), [], [start], None, None)
        return [nodes.Assign(nodes.Name(flag, "store"), create), node]


@dataclass
class _JumpState:
    flag: str
    breaks: bool = field(default=False)


def _without_jumps(body: list[nodes.Node], state: _JumpState) -> list[nodes.Node]:
    kept: list[nodes.Node] = []
    for index, statement in enumerate(body):
        if isinstance(statement, nodes.Continue):
            return kept
        if isinstance(statement, nodes.Break):
            state.breaks = True
            return [*kept, nodes.Assign(nodes.NSRef(state.flag, "now"), nodes.Const(True))]
        if isinstance(statement, nodes.If) and _ends_in_jump(statement.body):
            statement.body = _without_jumps(statement.body, state)
            others: list[nodes.Node] = list(statement.else_)
            if statement.elif_:
                first, *more = statement.elif_
                others = [nodes.If(first.test, first.body, more, statement.else_)]
                others[0].set_lineno(first.lineno)
            statement.elif_ = []
            statement.else_ = _without_jumps([*others, *body[index + 1 :]], state)
            return [*kept, statement]
        kept.append(statement)
    return kept


def _ends_in_jump(body: list[nodes.Node]) -> bool:
    return bool(body) and isinstance(body[-1], (nodes.Break, nodes.Continue))
