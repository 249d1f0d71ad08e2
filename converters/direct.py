"""Trace the exportable module into a weightless graph without torch.export.

`converters.stablehlo` writes down what the module computes; the official converter's passes make
the flatbuffer of it. `converters.skeleton` is the official way to the same graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from litert_converter.mlir import ir, passmanager
from litert_converter.mlir._mlir_libs import converter_api_ext as converter
from torch import Tensor

from converters.skeleton import WEIGHT_INPUT_PREFIX, bias_pattern
from converters.stablehlo import NoRuleError, Recorder
from converters.stablehlo_rules import RULES
from hermes.config import HermesConfig
from hermes.exportable import ExportableModel
from hermes.recipe import ExportShapes, GraphOptions
from hermes.signatures import DECODE, Signature, build_signatures, graph_weights

_CACHE = "kv_cache_"


def record_skeleton(
    config: HermesConfig, shapes: ExportShapes, options: GraphOptions, target: Path
) -> None:
    """Write the weightless graph with all signatures to `target` (.tflite).

    Raises:
        NoRuleError: the module does something that has no rule; the official way is needed.
    """
    context = ir.Context()
    converter.prepare_mlir_context(context)
    weights = {
        w.name: _nothing(w.shape) for w in graph_weights(config, options) if w.kind != "bias"
    }
    modules = []
    for signature in build_signatures(config, shapes.context, shapes.prefill):
        text = _recorded(signature, config, shapes, options, weights)
        with context, ir.Location.unknown():
            try:
                module = ir.Module.parse(text)
            except ir.MLIRError as error:
                raise NoRuleError(f"what was written is not accepted: {error}") from error
        converter.set_signature(
            module.operation,
            signature_name=signature.name,
            input_names=[
                *(spec.name for spec in signature.inputs),
                *(WEIGHT_INPUT_PREFIX + name for name in weights),
            ],
            output_names=[spec.name for spec in signature.outputs],
        )
        modules.append(module)
    _convert(context, modules, target)


def _recorded(
    signature: Signature,
    config: HermesConfig,
    shapes: ExportShapes,
    options: GraphOptions,
    weights: dict[str, Tensor],
) -> str:
    """One signature as the text of an MLIR module."""
    module = ExportableModel(
        config,
        shapes.context,
        options,
        with_logits=signature.name == DECODE,
        biases={
            weight.name: torch.from_numpy(bias_pattern(index, weight.shape[0]))
            for index, weight in enumerate(graph_weights(config, options))
            if weight.kind == "bias"
        },
    ).eval()
    constants = {}
    for name, buffer in list(module.named_buffers()):
        stand_in = _nothing(tuple(buffer.shape))
        setattr(module, name, stand_in)
        constants[stand_in] = buffer.numpy()
    inputs = {spec.name: _nothing(spec.shape, spec.dtype) for spec in signature.inputs}
    given = [*inputs.values(), *weights.values()]
    with Recorder(signature.name, given, constants, RULES) as recorder:
        outputs = module(
            **{name: value for name, value in inputs.items() if not name.startswith(_CACHE)},
            kv_cache={
                name.removeprefix(_CACHE): value
                for name, value in inputs.items()
                if name.startswith(_CACHE)
            },
            weights=weights,
        )
    text: str = recorder.module([outputs[spec.name] for spec in signature.outputs])
    return text


def _nothing(shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _convert(context: Any, modules: list[Any], target: Path) -> None:
    """The passes of litert-torch 0.10 (`_convert/litert_converter.py`), with its settings."""
    merged = converter.merge_modules(modules)
    settings = converter.ConvertToTFLConfig()
    settings.model_origin_framework = "PYTORCH"
    settings.unsafe_fuse_dynamic_shaped_broadcast = True
    settings.canonicalizing_inf_as_min_max_float = False
    settings.enable_x64 = False
    with context:
        converter.run_convert_to_tfl_passes(merged, passmanager.PassManager(), settings)
    converter.export_flatbuffer_to_file(getattr(merged, "operation", merged), str(target))
