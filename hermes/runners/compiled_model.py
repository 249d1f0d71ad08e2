"""Signatures in LiteRT's `CompiledModel`, the interface that LiteRT-LM itself uses.

One buffer per cache tensor is input and output of every signature, so the cache is updated in place
and never copied. Logits are bit-identical to `Interpreter`'s signature runners. The weight cache
path ":memory" keeps one packed copy of the weights for all signatures instead of one each, and
writes no file.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np

from hermes.runners.interface import Logits
from hermes.runners.roles import Roles, token_count
from hermes.runners.session import SignatureSession
from hermes.signatures import DECODE, Signature, TensorSpec

if TYPE_CHECKING:
    from ai_edge_litert.compiled_model import CompiledModel
    from ai_edge_litert.tensor_buffer import TensorBuffer


class CompiledSignatures(SignatureSession):
    """The compiled model and its buffers.

    Args:
        path: the .tflite file.
        threads: of the CPU kernels.
    """

    def __init__(self, path: str, threads: int) -> None:
        from ai_edge_litert.compiled_model import CompiledModel
        from ai_edge_litert.hardware_accelerator import HardwareAccelerator
        from ai_edge_litert.options import CpuOptions, Options

        cpu = CpuOptions(num_threads=threads, xnnpack_weight_cache_path=":memory")
        options = Options(hardware_accelerators=HardwareAccelerator.CPU, cpu_options=cpu)
        self._model: CompiledModel = CompiledModel.from_file(path, options=options)
        names = self._model.get_signature_list()
        super().__init__(tuple(self._signature(name) for name in names), path)
        self._cache: dict[str, TensorBuffer] = {
            spec.name: self._model.create_input_buffer_by_name(DECODE, spec.name)
            for spec in self._decode.cache
        }
        self._buffers: dict[str, tuple[dict[str, TensorBuffer], dict[str, TensorBuffer]]] = {}
        self.reset()

    def _run(self, roles: Roles, inputs: dict[str, np.ndarray]) -> None:
        sources, results = self._buffers_of(roles.signature)
        for name, values in inputs.items():
            sources[name].write(values)
        self._model.run_by_name(roles.signature.name, sources, results)

    def _read_logits(self, roles: Roles) -> Logits:
        spec = cast("TensorSpec", roles.logits)
        buffer = self._buffers_of(roles.signature)[1][spec.name]
        logits: Logits = buffer.read(math.prod(spec.shape), np.dtype(spec.dtype))
        return logits.astype(np.float32, copy=False)

    def _write_cache(self, spec: TensorSpec, values: np.ndarray) -> None:
        self._cache[spec.name].write(values)

    def _read_cache(self, spec: TensorSpec) -> np.ndarray:
        values = self._cache[spec.name].read(math.prod(spec.shape), np.dtype(spec.dtype))
        return np.asarray(values)

    def _buffers_of(
        self, signature: Signature
    ) -> tuple[dict[str, TensorBuffer], dict[str, TensorBuffer]]:
        """Inputs and outputs by name; made at a signature's first call."""
        name, create = signature.name, self._model
        if name not in self._buffers:
            self._buffers[name] = (
                {
                    spec.name: self._cache.get(spec.name)
                    or create.create_input_buffer_by_name(name, spec.name)
                    for spec in signature.inputs
                },
                {
                    spec.name: self._cache.get(spec.name)
                    or create.create_output_buffer_by_name(name, spec.name)
                    for spec in signature.outputs
                },
            )
        return self._buffers[name]

    def _signature(self, name: str) -> Signature:
        inputs = _specs(self._model.get_input_tensor_details(name))
        outputs = _specs(self._model.get_output_tensor_details(name))
        return Signature(name, token_count(inputs), inputs, outputs)


def _specs(details: dict[str, dict[str, object]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, tuple(cast("list[int]", item["shape"])), str(item["dtype"]))  # type: ignore[arg-type]
        for name, item in details.items()
    )
