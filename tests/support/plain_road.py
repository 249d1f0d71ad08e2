"""The road Hermes does not take: constants traced in, then ai-edge-quantizer over the whole file.

It serves as the oracle of skeleton + bind on small models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from converters.flatbuffer import operator_name, read_model
from converters.skeleton import sample_inputs
from hermes.config import HermesConfig
from hermes.exportable import ExportableModel
from hermes.recipe import ExportShapes, GraphOptions
from hermes.signatures import DECODE, build_signatures, graph_weights


class WithConstants(nn.Module):
    """The exportable module with its weights inside."""

    def __init__(self, inner: ExportableModel, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.names = list(weights)
        for name, value in weights.items():
            self.register_buffer(f"constant_{name}", value)

    def forward(
        self, tokens: Tensor, input_pos: Tensor, mask: Tensor, kv_cache: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        weights = {name: getattr(self, f"constant_{name}") for name in self.names}
        return self.inner(tokens, input_pos, mask, kv_cache, weights)


def trace_with_constants(
    config: HermesConfig,
    shapes: ExportShapes,
    options: GraphOptions,
    state: Mapping[str, Tensor],
    target: Path,
) -> None:
    """Trace the float model with its constants into `target`."""
    import litert_torch

    import converters.lowerings  # noqa: F401

    weights = graph_weights(config, options)
    # litert-torch 0.10 mixes up constants that are not contiguous.
    constants = {w.name: torch.cat([state[p] for p in w.parts]).contiguous() for w in weights}
    biases = {w.name: constants.pop(w.name) for w in weights if w.kind == "bias"}
    converter = litert_torch.Converter()
    for signature in build_signatures(config, shapes.context, shapes.prefill):
        inner = ExportableModel(
            config, shapes.context, options, with_logits=signature.name == DECODE, biases=biases
        )
        module = WithConstants(inner, constants).eval()
        converter.add_signature(signature.name, module, sample_kwargs=sample_inputs(signature))
    converter.convert().export(str(target))


def quantize_file(source: Path, target: Path, table_shape: tuple[int, int]) -> None:
    """ai-edge-quantizer's dynamic int8 recipe, all lookups but that of `table_shape` left float."""
    from ai_edge_quantizer import algorithm_manager, qtyping, quantizer, recipe

    tool = quantizer.Quantizer(str(source), recipe.dynamic_wi8_afp32())
    model = read_model(source)
    for subgraph in model.subgraphs:
        for operator in subgraph.operators:
            if operator_name(model, operator) != "EMBEDDING_LOOKUP":
                continue
            if tuple(subgraph.tensors[operator.inputs[1]].shape) == table_shape:
                continue
            output = subgraph.tensors[operator.outputs[0]].name.decode()
            tool.update_quantization_recipe(
                regex=f"{re.escape(output)}(;|$)",
                operation_name=qtyping.TFLOperationName.EMBEDDING_LOOKUP,
                algorithm_key=algorithm_manager.AlgorithmName.NO_QUANTIZE,
            )
    tool.quantize().export_model(str(target))
