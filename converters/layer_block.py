"""Find the block of operators that a traced signature repeats per layer, and prove it.

Two consecutive blocks must be translates of each other: the same operators with the same versions,
options, shapes and types, reading the same shared tensors, constants with equal bytes, weights and
cache tensors of consecutive layers, and each other's results one period apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from converters.flatbuffer import signature_inputs, signature_outputs
from converters.skeleton import WEIGHT_INPUT_PREFIX

_LAYERED = re.compile(r"^(?P<stem>.+)_(?P<layer>\d+)$")
CACHE_PREFIX = "kv_cache_"


class StampRefusedError(Exception):
    """The layers are not provably alike; says why."""


@dataclass(frozen=True)
class Layered:
    """The name of a tensor that belongs to a layer: a weight, a bias or a cache tensor."""

    stem: str
    layer: int

    @classmethod
    def parse(cls, name: str) -> Layered | None:
        """Split `kv_cache_k_3`; None for names without a layer."""
        match = _LAYERED.match(name)
        return cls(match["stem"], int(match["layer"])) if match else None

    def moved(self, layers: int) -> Layered:
        """The same role, `layers` further up."""
        return Layered(self.stem, self.layer + layers)

    @property
    def name(self) -> str:
        """The tensor name again."""
        return f"{self.stem}_{self.layer}"


@dataclass(frozen=True)
class Producer:
    """Where a tensor is made: operator index and output slot."""

    operator: int
    slot: int


@dataclass
class LayerBlock:
    """Operators [start, start + period), whose translate follows directly.

    `carried` maps each tensor that the block reads from the block before it to the tensor of this
    block that takes its place in the next one.
    """

    start: int
    period: int
    carried: dict[int, int] = field(default_factory=dict)

    @property
    def middle(self) -> int:
        """First operator of the translate."""
        return self.start + self.period

    @property
    def end(self) -> int:
        """First operator after the translate."""
        return self.start + 2 * self.period


class TracedGraph:
    """One signature's subgraph with its tensors' names, producers and layers."""

    def __init__(self, model: Any, signature: Any, biases: Mapping[bytes, str]) -> None:
        """`biases` maps the bytes of every bias constant to its graph weight name."""
        self.model = model
        self.signature = signature
        self.name: str = signature.signatureKey.decode()
        self.graph = model.subgraphs[signature.subgraphIndex]
        self.operators: list[Any] = list(self.graph.operators)
        self.inputs = {index: name for name, index in signature_inputs(signature).items()}
        self.outputs = {index: name for name, index in signature_outputs(signature).items()}
        self.producers = {
            int(tensor): Producer(position, slot)
            for position, operator in enumerate(self.operators)
            for slot, tensor in enumerate(operator.outputs)
        }
        # Every cut that is tried compares them, so they are described once.
        self.options = [_options(operator) for operator in self.operators]
        self.types = [_type(tensor) for tensor in self.graph.tensors]
        self.layered = dict(self._layered(biases))
        self.made_by_layers = self._made_by_layers()

    def _layered(self, biases: Mapping[bytes, str]) -> Iterator[tuple[int, Layered]]:
        for index, name in self.inputs.items():
            layered = Layered.parse(name)
            if layered is not None and name.startswith((WEIGHT_INPUT_PREFIX, CACHE_PREFIX)):
                yield index, layered
        for index in range(len(self.graph.tensors)):
            bias = biases.get(self.constant(index) or b"")
            layered = Layered.parse(bias) if bias else None
            if layered is not None:
                yield index, layered

    def _made_by_layers(self) -> set[int]:
        """Tensors that depend on a layer's weights or cache; only the others can be shared."""
        made: set[int] = set()
        for operator in self.operators:
            read = {int(tensor) for tensor in operator.inputs}
            if read & made or read & self.layered.keys():
                made.update(int(tensor) for tensor in operator.outputs)
        return made

    def constant(self, index: int) -> bytes | None:
        """The tensor's constant bytes, None for computed tensors."""
        data = self.model.buffers[self.graph.tensors[index].buffer].data
        return None if data is None else bytes(data)

    def output_layer(self, index: int) -> Layered | None:
        """The cache output that this tensor is, if it is one."""
        name = self.outputs.get(index, "")
        return Layered.parse(name) if name.startswith(CACHE_PREFIX) else None

    def same_type(self, left: int, right: int) -> bool:
        """Equal shape, element type and quantization."""
        return bool(self.types[left] == self.types[right])

    def find_block(self) -> LayerBlock:
        """The cut whose blocks are translates, with the fewest tensors crossing it.

        Raises:
            StampRefusedError: no cut between layer 0's and layer 1's cache writes holds.
        """
        first = self._first_reader(f"{CACHE_PREFIX}k_1")
        period = self._first_reader(f"{CACHE_PREFIX}k_2") - first
        if period <= 0:
            raise StampRefusedError(f"{self.name}: layers are not in order")
        proven: list[LayerBlock] = []
        reasons: list[str] = []
        for start in range(max(0, first - period + 1), first + 1):
            try:
                proven.append(_prove(self, start, period))
            except StampRefusedError as error:
                reasons.append(str(error))
        if not proven:
            raise StampRefusedError(
                f"{self.name}: no cut between layers holds; the first fails because {reasons[0]}"
            )
        return min(proven, key=lambda block: len(block.carried))

    def _first_reader(self, name: str) -> int:
        for index, known in self.inputs.items():
            if known == name:
                for position, operator in enumerate(self.operators):
                    if index in operator.inputs:
                        return position
        raise StampRefusedError(f"{self.name}: nothing reads {name}")


def _prove(traced: TracedGraph, start: int, period: int) -> LayerBlock:
    block = LayerBlock(start, period)
    if block.end > len(traced.operators):
        raise StampRefusedError("the graph ends inside the second block")
    for position in range(start, block.middle):
        _prove_operator(traced, block, position)
    made = {int(t) for op in traced.operators[start : block.middle] for t in op.outputs}
    for position in range(block.end, len(traced.operators)):
        if made & {int(tensor) for tensor in traced.operators[position].inputs}:
            raise StampRefusedError(f"operator {position} reads past the next block")
    for tensor, name in traced.outputs.items():
        producer = traced.producers.get(tensor)
        inside = producer is not None and start <= producer.operator < block.end
        if inside and traced.output_layer(tensor) is None:
            raise StampRefusedError(f"output {name} leaves a repeated block")
    return block


def _prove_operator(traced: TracedGraph, block: LayerBlock, position: int) -> None:
    one, two = traced.operators[position], traced.operators[position + block.period]
    alike = traced.options[position] == traced.options[position + block.period]
    if one.opcodeIndex != two.opcodeIndex or not alike:
        raise StampRefusedError(f"operators {position} and {position + block.period} differ")
    if len(one.inputs) != len(two.inputs) or len(one.outputs) != len(two.outputs):
        raise StampRefusedError(f"operator {position} has another number of operands")
    for left, right in zip(one.outputs, two.outputs, strict=True):
        _prove_output(traced, int(left), int(right))
    for left, right in zip(one.inputs, two.inputs, strict=True):
        _prove_input(traced, block, int(left), int(right))


def _prove_output(traced: TracedGraph, left: int, right: int) -> None:
    if not traced.same_type(left, right):
        raise StampRefusedError(f"tensors {left} and {right} have other shapes or types")
    one, two = traced.output_layer(left), traced.output_layer(right)
    if two != (one.moved(1) if one else None):
        raise StampRefusedError(f"outputs {left} and {right} are not of consecutive layers")


def _prove_input(traced: TracedGraph, block: LayerBlock, left: int, right: int) -> None:
    if left in traced.layered or right in traced.layered:
        layered = traced.layered.get(left)
        if traced.layered.get(right) != (layered.moved(1) if layered else None):
            raise StampRefusedError(f"tensors {left} and {right} are not of consecutive layers")
        if not traced.same_type(left, right):
            raise StampRefusedError(f"tensors {left} and {right} have other shapes or types")
        return
    one, two = traced.producers.get(left), traced.producers.get(right)
    if left == right:
        if one is not None and one.operator >= block.start:
            raise StampRefusedError(f"both blocks read tensor {left}, made inside them")
        if left in traced.made_by_layers:
            raise StampRefusedError(f"both blocks read tensor {left}, which one layer made")
    elif one is None and two is None:
        constants = traced.constant(left), traced.constant(right)
        if None in constants or constants[0] != constants[1] or not traced.same_type(left, right):
            raise StampRefusedError(f"const differs: tensors {left} and {right}")
    elif one is None or two is None or two != Producer(one.operator + block.period, one.slot):
        raise StampRefusedError(f"tensors {left} and {right} are not made a period apart")
    elif one.operator < block.start:
        if two.operator < block.start:
            raise StampRefusedError(f"tensor {left} reaches across more than one layer")
        block.carried[left] = right


def _type(tensor: Any) -> Any:
    shape = [] if tensor.shape is None else [int(length) for length in tensor.shape]
    return shape, tensor.type, plain(tensor.quantization)


def _options(operator: Any) -> Any:
    return plain(
        [
            operator.builtinOptionsType,
            operator.builtinOptions,
            operator.builtinOptions2Type,
            operator.builtinOptions2,
            operator.customOptions,
        ]
    )


def plain(value: Any) -> Any:
    """A schema object as nested dicts and lists, for comparison."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if hasattr(value, "__dict__"):
        return {key: plain(item) for key, item in vars(value).items()}
    return value
