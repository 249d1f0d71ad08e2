"""Two flatbuffers compared operator by operator, whatever their tensors are numbered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converters.flatbuffer import operator_name, read_model, signature_inputs, signature_outputs
from converters.layer_block import plain


def graph_differences(first: Path, second: Path) -> list[str]:
    """What differs between two models: signatures, interfaces, operators, wiring, constants.

    The comparison stops at the first difference of each signature.
    """
    one, two = read_model(first), read_model(second)
    names = [[s.signatureKey.decode() for s in model.signatureDefs] for model in (one, two)]
    if names[0] != names[1]:
        return [f"signatures {names[0]} and {names[1]}"]
    found = []
    for left, right in zip(one.signatureDefs, two.signatureDefs, strict=True):
        difference = _Pair(_Side(one, left), _Side(two, right)).difference()
        if difference:
            found.append(f"{left.signatureKey.decode()}: {difference}")
    return found


def operator_counts(path: Path) -> dict[str, int]:
    """Signature name -> number of operators."""
    model = read_model(path)
    return {
        signature.signatureKey.decode(): len(model.subgraphs[signature.subgraphIndex].operators)
        for signature in model.signatureDefs
    }


class _Side:
    """One model's signature."""

    def __init__(self, model: Any, signature: Any) -> None:
        self.model = model
        self.graph = model.subgraphs[signature.subgraphIndex]
        self.inputs = signature_inputs(signature)
        self.outputs = signature_outputs(signature)
        self.input_names = {index: name for name, index in self.inputs.items()}
        self.output_names = {index: name for name, index in self.outputs.items()}

    def interface(self) -> list[list[str]]:
        """Names in the signature's order and in the subgraph's."""
        return [
            list(self.inputs),
            list(self.outputs),
            [self.input_names[int(index)] for index in self.graph.inputs],
            [self.output_names[int(index)] for index in self.graph.outputs],
        ]

    def constant(self, index: int) -> bytes | None:
        data = self.model.buffers[self.graph.tensors[index].buffer].data
        return None if data is None else bytes(data)

    def kind(self, index: int) -> object:
        """Everything a tensor is apart from its name, number and buffer."""
        tensor = self.graph.tensors[index]
        shape = [int(length) for length in tensor.shape]
        return shape, tensor.type, plain(tensor.quantization), tensor.isVariable

    def operator(self, operator: Any) -> object:
        """The operator without its tensors."""
        code = self.model.operatorCodes[operator.opcodeIndex]
        return (
            operator_name(self.model, operator),
            code.version,
            code.customCode,
            operator.builtinOptionsType,
            plain(operator.builtinOptions),
            operator.builtinOptions2Type,
            plain(operator.builtinOptions2),
            plain(operator.customOptions),
        )


class _Pair:
    def __init__(self, left: _Side, right: _Side) -> None:
        self.left = left
        self.right = right
        self.matched: dict[int, int] = {}

    def difference(self) -> str | None:
        left, right = self.left, self.right
        if left.interface() != right.interface():
            return "other inputs or outputs"
        if len(left.graph.operators) != len(right.graph.operators):
            return f"{len(left.graph.operators)} and {len(right.graph.operators)} operators"
        for number, (one, two) in enumerate(
            zip(left.graph.operators, right.graph.operators, strict=True)
        ):
            if left.operator(one) != right.operator(two):
                return f"operator {number}: {left.operator(one)} and {right.operator(two)}"
            if len(one.inputs) != len(two.inputs) or len(one.outputs) != len(two.outputs):
                return f"operator {number} has other operands"
            for a, b in zip(one.inputs, two.inputs, strict=True):
                if not self._same_input(int(a), int(b)):
                    return f"operator {number} {left.operator(one)} reads {a} and {b}"
            for a, b in zip(one.outputs, two.outputs, strict=True):
                if left.kind(int(a)) != right.kind(int(b)):
                    return f"operator {number} makes {left.kind(int(a))}, {right.kind(int(b))}"
                self.matched[int(a)] = int(b)
        for name, index in left.outputs.items():
            if self.matched.get(index) != right.outputs[name]:
                return f"output {name} is made elsewhere"
        return None

    def _same_input(self, a: int, b: int) -> bool:
        if a < 0 or b < 0:
            return a == b
        if self.left.kind(a) != self.right.kind(b):
            return False
        if a in self.matched or b in self.matched.values():
            return self.matched.get(a) == b
        if a in self.left.input_names or b in self.right.input_names:
            return self.left.input_names.get(a) == self.right.input_names.get(b)
        constants = self.left.constant(a), self.right.constant(b)
        return constants[0] is not None and constants[0] == constants[1]
