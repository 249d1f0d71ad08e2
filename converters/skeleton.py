"""Trace the exportable module into a TFLite graph that holds no weight.

Every matrix and norm gain is a graph input of its real shape, sampled by a zero-stride tensor, so
tracing a model of any size costs the memory of its operators only. Biases are constants with a
recognisable pattern (`bias_pattern`) that the binder replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hermes.config import HermesConfig
from hermes.recipe import ExportShapes, GraphOptions
from hermes.signatures import DECODE, GraphWeight, Signature, build_signatures, graph_weights

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_INPUT_PREFIX = "weights_"


def trace_skeleton(
    config: HermesConfig, shapes: ExportShapes, options: GraphOptions, target: Path
) -> None:
    """Write the weightless graph with all signatures to `target` (.tflite)."""
    import torch

    weights = graph_weights(config, options)
    patterns = {
        weight.name: torch.from_numpy(bias_pattern(index, weight.shape[0]))
        for index, weight in enumerate(weights)
        if weight.kind == "bias"
    }
    samples = {
        weight.name: torch.zeros(1).expand(weight.shape)
        for weight in weights
        if weight.kind != "bias"
    }
    trace_signatures(config, shapes, options, samples, patterns, target)


def bias_pattern(index: int, rows: int) -> np.ndarray:
    """Distinct float32 values that stand for the bias at `index` of `graph_weights`."""
    generator = np.random.default_rng([0x4E52, index])
    return generator.standard_normal(rows).astype(np.float32)


def trace_signatures(
    config: HermesConfig,
    shapes: ExportShapes,
    options: GraphOptions,
    weights: Mapping[str, Tensor],
    biases: Mapping[str, Tensor],
    target: Path,
) -> None:
    """Trace every signature with the given weight samples as inputs and export one flatbuffer."""
    import litert_torch

    import converters.lowerings  # noqa: F401  (registers our operators)
    from hermes.exportable import ExportableModel

    modules = {
        with_logits: ExportableModel(
            config, shapes.context, options, with_logits=with_logits, biases=biases
        ).eval()
        for with_logits in (False, True)
    }
    converter = litert_torch.Converter()
    for signature in build_signatures(config, shapes.context, shapes.prefill):
        converter.add_signature(
            signature.name,
            modules[signature.name == DECODE],
            sample_kwargs={**sample_inputs(signature), "weights": dict(weights)},
        )
    converter.convert().export(str(target))


def sample_inputs(signature: Signature) -> dict[str, Tensor | dict[str, Tensor]]:
    """Zero tensors for the runtime inputs, shaped as keyword arguments of the module."""
    import torch

    samples: dict[str, Tensor | dict[str, Tensor]] = {}
    cache: dict[str, Tensor] = {}
    for spec in signature.inputs:
        dtype = torch.int32 if spec.dtype == "int32" else torch.float32
        if spec.name.startswith("kv_cache_"):
            cache[spec.name.removeprefix("kv_cache_")] = torch.zeros(spec.shape, dtype=dtype)
        else:
            samples[spec.name] = torch.zeros(spec.shape, dtype=dtype)
    samples["kv_cache"] = cache
    return samples


def matrix_weights(config: HermesConfig, options: GraphOptions) -> tuple[GraphWeight, ...]:
    """The weights that recipes have rules for."""
    return tuple(w for w in graph_weights(config, options) if w.kind == "matrix")
