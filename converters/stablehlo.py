"""Write what the exportable module computes as StableHLO, while it runs on tensors without data.

The official way (torch.export, several decompositions, lowering through jax) spends seconds on a
signature to arrive at this same text. Here every torch function that the module calls is written
down as it is called, by the rules of `converters.stablehlo_rules`. A function without a rule raises
`NoRuleError`, and the caller takes the official way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATTRIBUTES = ("get", "len", "size", "dim", "numel", "hash")
_ELEMENTS = {torch.float32: "f32", torch.int32: "i32"}


class NoRuleError(Exception):
    """The module calls a function that cannot be written down here; says which."""


class Recorder(TorchFunctionMode):
    """While it is entered, every torch function on recorded tensors becomes a line of StableHLO.

    Args:
        label: tells this module from others.
        inputs: the function's arguments, in order.
        constants: tensors whose values are known.
        rules: torch function's name -> what writes it down, given the recorder and the function's
            arguments, and returns the result: tensors without data.
    """

    def __init__(
        self,
        label: str,
        inputs: Sequence[Tensor],
        constants: Mapping[Tensor, np.ndarray],
        rules: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__()
        self._label = label
        self._rules = rules
        self._lines: list[str] = []
        self._inputs = list(inputs)
        self._constants = constants
        # Tensors are known by identity, so they must not be freed meanwhile.
        self._names: dict[Tensor, str] = {t: f"%arg{i}" for i, t in enumerate(self._inputs)}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(getattr(func, "__name__", func)).split(".")[0].strip("_")
        rule = self._rules.get(name)
        if rule is not None:
            return rule(self, *args, **(kwargs or {}))
        # Shapes and the like; torch's own kernels for tensors without data take seconds to import.
        if name in _ATTRIBUTES:
            return func(*args, **(kwargs or {}))
        raise NoRuleError(f"torch function {name}")

    def module(self, outputs: Sequence[Tensor]) -> str:
        """The whole module, with the function `main`."""
        arguments = ", ".join(f"{self._names[t]}: {type_of(t)}" for t in self._inputs)
        results = ", ".join(type_of(t) for t in outputs)
        returned = ", ".join(self.name(t) for t in outputs)
        body = "\n".join(self._lines)
        return (
            f"module {{\nfunc.func public @main({arguments}) -> ({results}) {{\n{body}\n"
            f"return {returned} : {results}\n}}\n}}\n"
        )

    def name(self, tensor: Tensor) -> str:
        """The value that stands for a tensor."""
        if tensor not in self._names and tensor in self._constants:
            data = self._constants[tensor]
            text = f'"0x{np.ascontiguousarray(data).tobytes().hex().upper()}"'
            self._names[tensor] = self.line(f"arith.constant dense<{text}> : {type_of(tensor)}")
        if tensor not in self._names:
            raise NoRuleError("a tensor that was made outside the module")
        return self._names[tensor]

    def line(self, text: str) -> str:
        """Append an operation; its value's name."""
        name = f"%{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        return name

    def unique(self) -> str:
        """32 hexadecimal digits that no other place of any module has."""
        return hashlib.md5(f"{self._label} {len(self._lines)}".encode()).hexdigest()

    def made(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor of this shape for which the value stands."""
        result = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
        self._names[result] = name
        return result

    def unary(self, operation: str, operand: str, shape: str, result: str, extra: str = "") -> str:
        """`operation operand extra : (shape) -> result`."""
        return self.line(f"stablehlo.{operation} {operand}{extra} : ({shape}) -> {result}")

    def binary(self, operation: str, left: str, right: str, shape: str) -> str:
        """An operation of two operands of the result's type."""
        return self.line(f"stablehlo.{operation} {left}, {right} : {shape}")

    def scalar(self, value: float) -> str:
        """A float32 constant, exact."""
        bits = int(np.float32(value).view(np.uint32))
        return self.line(f"stablehlo.constant dense<0x{bits:08X}> : tensor<f32>")

    def splat(self, value: float, shape: str) -> str:
        """A float32 constant in every place."""
        return self.unary(
            "broadcast_in_dim", self.scalar(value), "tensor<f32>", shape, ", dims = []"
        )

    def broadcast(self, operand: Tensor | float, shape: Sequence[int], like: Tensor) -> str:
        """A number or tensor in this shape, as torch broadcasts."""
        if not isinstance(operand, Tensor):
            return self.splat(operand, shaped(shape, like))
        name, narrow = self.name(operand), list(operand.shape)
        wide = [1] * (len(shape) - len(narrow)) + narrow
        if wide != narrow:
            axes = list(range(len(shape) - len(narrow), len(shape)))
            name = self.unary(
                "broadcast_in_dim", name, type_of(operand), shaped(wide, like), f", dims = {axes}"
            )
        if wide == list(shape):
            return name
        axes = list(range(len(shape)))
        return self.unary(
            "broadcast_in_dim", name, shaped(wide, like), shaped(shape, like), f", dims = {axes}"
        )

    def reduced(self, operation: str, operand: str, source: Tensor, initial: float) -> str:
        """The last axis reduced away and put back with length 1."""
        start = self.scalar(initial)
        kept = list(source.shape[:-1])
        last = source.ndim - 1
        flat = self.line(
            f"stablehlo.reduce({operand} init: {start}) applies stablehlo.{operation} across "
            f"dimensions = [{last}] : ({type_of(source)}, tensor<f32>) -> {shaped(kept, source)}"
        )
        if operation == "maximum":
            flat = self.binary(
                operation, self.splat(initial, shaped(kept, source)), flat, shaped(kept, source)
            )
        return self.unary(
            "broadcast_in_dim", flat, shaped(kept, source), shaped([*kept, 1], source),
            f", dims = {list(range(last))}",
        )  # fmt: skip


def type_of(tensor: Tensor) -> str:
    """MLIR's name of a tensor's type."""
    return shaped(tensor.shape, tensor)


def shaped(shape: Sequence[int], like: Tensor) -> str:
    """The same with another shape."""
    element = _ELEMENTS.get(like.dtype)
    if element is None:
        raise NoRuleError(f"tensors of {like.dtype}")
    return f"tensor<{''.join(f'{length}x' for length in shape)}{element}>"
