"""Signatures in TensorFlow's own interpreter, for people who deploy through it.

Its signature runners copy every input and output, so the cache makes a round trip at each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hermes.runners.interface import Logits
from hermes.runners.roles import Roles, token_count
from hermes.runners.session import SignatureSession
from hermes.signatures import Signature, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping


class TensorFlowSignatures(SignatureSession):
    """The interpreter and the cache between its calls.

    Args:
        path: the .tflite file.
        threads: of the CPU kernels.
    """

    def __init__(self, path: str, threads: int) -> None:
        import tensorflow as tf

        interpreter = tf.lite.Interpreter(model_path=path, num_threads=threads)
        names = interpreter.get_signature_list()
        self._runners = {name: interpreter.get_signature_runner(name) for name in names}
        self._outputs: Mapping[str, np.ndarray] = {}
        self._cache: dict[str, np.ndarray] = {}
        super().__init__(tuple(self._signature(name) for name in names), path)
        self.reset()

    def _run(self, roles: Roles, inputs: dict[str, np.ndarray]) -> None:
        cache = {spec.name: self._cache[spec.name] for spec in roles.cache}
        self._outputs = self._runners[roles.signature.name](**inputs, **cache)
        for name, values in self._outputs.items():
            if name in self._cache:
                self._cache[name] = values

    def _read_logits(self, roles: Roles) -> Logits:
        logits = self._outputs[cast("TensorSpec", roles.logits).name]
        return logits.reshape(-1).astype(np.float32, copy=False)

    def _write_cache(self, spec: TensorSpec, values: np.ndarray) -> None:
        self._cache[spec.name] = values

    def _read_cache(self, spec: TensorSpec) -> np.ndarray:
        return self._cache[spec.name]

    def _signature(self, name: str) -> Signature:
        runner = self._runners[name]
        inputs, outputs = _specs(runner.get_input_details()), _specs(runner.get_output_details())
        return Signature(name, token_count(inputs), inputs, outputs)


def _specs(details: Mapping[str, Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name,
            tuple(int(length) for length in item["shape"]),
            cast("Any", np.dtype(item["dtype"]).name),
        )
        for name, item in details.items()
    )
