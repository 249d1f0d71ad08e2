"""Repeat one traced layer of a skeleton to the model's full depth.

Tracing costs time per layer, yet every decoder layer is the same graph over other weights. So four
layers are traced, the repeating block is found and proved in each signature (`layer_block`), and
written as often as the model has layers. Whatever the proof does not cover raises
`StampRefusedError`, and the caller traces all layers instead.

Layer 0 may contain work that all layers share, and the last layer of a prefill is cut short because
nothing reads its output, so only the two layers between them are candidates: hence four.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from converters.flatbuffer import pack_model, read_model
from converters.layer_block import LayerBlock, Layered, StampRefusedError, TracedGraph
from converters.skeleton import WEIGHT_INPUT_PREFIX, bias_pattern
from hermes.config import HermesConfig
from hermes.recipe import ExportShapes, GraphOptions
from hermes.signatures import Signature, build_signatures, graph_weights

__all__ = ["TRACED_LAYERS", "StampRefusedError", "refusal", "stamp_layers"]

TRACED_LAYERS = 4


def refusal(config: HermesConfig) -> str | None:
    """Why a model of this config must not be stamped, or None."""
    if config.num_layers <= TRACED_LAYERS:
        return f"{config.num_layers} layers are not more than the {TRACED_LAYERS} that are traced"
    if config.no_rope_layers:
        return f"layers {list(config.no_rope_layers)} have no rotary positions, so layers differ"
    return None


def stamp_layers(
    traced: Path,
    traced_config: HermesConfig,
    config: HermesConfig,
    shapes: ExportShapes,
    options: GraphOptions,
    target: Path,
) -> None:
    """Write the skeleton of `config` to `target`, given one traced with fewer layers.

    Raises:
        StampRefusedError: the traced layers are not translates of each other.
    """
    model = read_model(traced)
    added = config.num_layers - traced_config.num_layers
    known = {data.tobytes(): name for name, data in _bias_patterns(traced_config, options).items()}
    biases = _BiasBuffers(model, _bias_patterns(config, options))
    weights = [
        WEIGHT_INPUT_PREFIX + weight.name
        for weight in graph_weights(config, options)
        if weight.kind != "bias"
    ]
    signatures = {s.name: s for s in build_signatures(config, shapes.context, shapes.prefill)}
    for signature in model.signatureDefs:
        graph = TracedGraph(model, signature, known)
        stamper = _Stamper(graph, graph.find_block(), added, biases)
        stamper.emit()
        stamper.write_interface(signatures[graph.name], weights)
    target.write_bytes(pack_model(model))


def _bias_patterns(config: HermesConfig, options: GraphOptions) -> dict[str, np.ndarray]:
    return {
        weight.name: bias_pattern(index, weight.shape[0])
        for index, weight in enumerate(graph_weights(config, options))
        if weight.kind == "bias"
    }


class _BiasBuffers:
    """Makes the buffer of each bias's pattern once, for all signatures."""

    def __init__(self, model: Any, patterns: dict[str, np.ndarray]) -> None:
        self._model = model
        self._patterns = patterns
        self._made: dict[str, int] = {}

    def index_of(self, name: str) -> int:
        if name not in self._made:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(self._patterns[name].tobytes(), dtype=np.uint8)
            self._model.buffers.append(buffer)
            self._made[name] = len(self._model.buffers) - 1
        return self._made[name]


class _Stamper:
    """Rewrites one signature's subgraph in place."""

    def __init__(
        self, traced: TracedGraph, block: LayerBlock, added: int, biases: _BiasBuffers
    ) -> None:
        self.traced = traced
        self.block = block
        self.added = added
        self.biases = biases
        self.inputs = {name: index for index, name in traced.inputs.items()}
        self.outputs = self._outputs_outside()
        self.by_layered = {layered: index for index, layered in traced.layered.items()}

    def emit(self) -> None:
        """Operators before the block, the block for each layer, operators after its translate."""
        block, operators = self.block, self.traced.operators
        body = operators[block.start : block.middle]
        emitted = operators[: block.start]
        made: dict[int, int] = {}
        for repeat in range(self.added + 2):
            previous, made = made, {}
            resolve = self._resolver(repeat, previous, made)
            emitted.extend(self._copy(operator, resolve, made, repeat) for operator in body)
            for tensor, index in made.items():
                layered = self.traced.output_layer(tensor)
                if layered is not None:
                    self.outputs[layered.moved(repeat).name] = index
        resolve = self._resolver_after(made)
        for operator in operators[block.end :]:
            operator.inputs = _indices(resolve(int(index)) for index in operator.inputs)
            emitted.append(operator)
        self.traced.graph.operators = emitted

    def write_interface(self, signature: Signature, weights: Sequence[str]) -> None:
        """Inputs and outputs of all layers, in the order a full trace has them.

        Weights that the cut last layer of a prefill does not read are inputs all the same.
        """
        for index, layered in list(self.traced.layered.items()):
            if index in self.traced.inputs:
                for moved in range(1, self.added + 1):
                    self._tensor_of(layered.moved(moved), like=index)
        graph, definition = self.traced.graph, self.traced.signature
        order = [*(spec.name for spec in signature.inputs), *weights]
        graph.inputs = _indices(self.inputs[name] for name in order)
        graph.outputs = _indices(self.outputs[spec.name] for spec in signature.outputs)
        definition.inputs = _tensor_map(self.inputs)
        definition.outputs = _tensor_map(self.outputs)

    def _outputs_outside(self) -> dict[str, int]:
        outputs = {}
        for tensor, name in self.traced.outputs.items():
            position = self.traced.producers[tensor].operator
            layered = self.traced.output_layer(tensor)
            if position < self.block.start or layered is None:
                outputs[name] = tensor
            elif position >= self.block.end:
                outputs[layered.moved(self.added).name] = tensor
        return outputs

    def _resolver(
        self, repeat: int, previous: dict[int, int], made: dict[int, int]
    ) -> Callable[[int], int]:
        """Traced tensor -> the tensor that copy number `repeat` of the block reads."""

        def resolve(index: int) -> int:
            if index in made:
                return made[index]
            if index in self.traced.layered:
                return self._tensor_of(self.traced.layered[index].moved(repeat), like=index)
            if repeat and index in self.block.carried:
                return previous[self.block.carried[index]]
            return index

        return resolve

    def _resolver_after(self, last: dict[int, int]) -> Callable[[int], int]:
        """The same for the operators after the translate, which the last copy replaces."""
        operators, block = self.traced.operators, self.block
        replaced = {
            int(old): last[int(new)]
            for position in range(block.start, block.middle)
            for new, old in zip(
                operators[position].outputs, operators[position + block.period].outputs, strict=True
            )
        }

        def resolve(index: int) -> int:
            if index in self.traced.layered:
                return self._tensor_of(self.traced.layered[index].moved(self.added), like=index)
            return replaced.get(index, index)

        return resolve

    def _copy(
        self, operator: Any, resolve: Callable[[int], int], made: dict[int, int], repeat: int
    ) -> Any:
        duplicate = copy.copy(operator)
        duplicate.inputs = _indices(resolve(int(index)) for index in operator.inputs)
        for index in operator.outputs:
            made[int(index)] = self._clone(int(index)) if repeat else int(index)
        duplicate.outputs = _indices(made[int(index)] for index in operator.outputs)
        return duplicate

    def _clone(self, index: int) -> int:
        tensors = self.traced.graph.tensors
        tensor = copy.copy(tensors[index])
        tensor.name = f"{self.traced.name}:{len(tensors)}".encode()
        tensors.append(tensor)
        return len(tensors) - 1

    def _tensor_of(self, layered: Layered, like: int) -> int:
        if layered not in self.by_layered:
            index = self._clone(like)
            tensor = self.traced.graph.tensors[index]
            if like in self.traced.inputs:
                tensor.name = f"{self.traced.name}_{layered.name}".encode()
                self.inputs[layered.name] = index
            else:
                tensor.buffer = self.biases.index_of(layered.name)
            self.by_layered[layered] = index
        return self.by_layered[layered]


def _indices(values: Any) -> np.ndarray:
    return np.fromiter(values, dtype=np.int32)


def _tensor_map(by_name: dict[str, int]) -> list[Any]:
    entries = []
    for name in sorted(by_name):
        entry = schema.TensorMapT()
        entry.name, entry.tensorIndex = name.encode(), by_name[name]
        entries.append(entry)
    return entries
