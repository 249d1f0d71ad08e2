"""The self-test of a processor: a flatbuffer small enough that its logits are known.

An emulated core may compute garbage without a word (QEMU 7.2 with `-cpu max` does), so nothing is
believed before the kernels that a model uses, float and dynamic int8 matmuls, have given logits
that numpy computes in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hermes.errors import NativeToolError

if TYPE_CHECKING:
    from hermes.runners.process import Launcher

ROWS, WIDTH, VOCAB = 5, 192, 320
FLOAT_DIFFERENCE = 1e-3
"""Largest difference of a float logit; their standard deviation is 1."""
INT8_CORRELATION = 0.999
"""Processors quantize activations in three legitimate ways; garbage correlates with 0.8 or less."""
_FULLY_CONNECTED, _VERSION = 9, 5
_FLOAT32, _INT8 = 0, 9


@dataclass(frozen=True)
class Known:
    """The probe: its inputs [rows, width], and logits [rows, vocab] in float64 arithmetic."""

    inputs: NDArray[np.float32]
    weights: NDArray[np.float32]
    scales: NDArray[np.float32]
    quantized: NDArray[np.int8]

    @property
    def logits(self) -> NDArray[np.float64]:
        """Of the float matrix."""
        return self.inputs.astype(np.float64) @ self.weights.astype(np.float64).T

    @property
    def int8_logits(self) -> NDArray[np.float64]:
        """Of the int8 matrix with exact activations."""
        matrix = self.quantized.astype(np.float64) * self.scales.astype(np.float64)[:, None]
        return self.inputs.astype(np.float64) @ matrix.T


def known_probe() -> Known:
    """The same numbers on every machine."""
    draw = np.random.default_rng(8)
    inputs = draw.standard_normal((ROWS, WIDTH)).astype(np.float32)
    weights = (draw.standard_normal((VOCAB, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
    scales = (np.abs(weights).max(axis=1) / 127).astype(np.float32)
    return Known(inputs, weights, scales, np.rint(weights / scales[:, None]).astype(np.int8))


def check_processor(launcher: Launcher, where: str) -> dict[str, float]:
    """Run the probe there and compare.

    Returns:
        `float_difference` (largest) and `int8_correlation`.

    Raises:
        NativeToolError: it computes something else, or dies.
    """
    from hermes.runners.child import run_in_child

    known = known_probe()
    found, found_int8 = run_in_child(
        "hermes.deploy.probe:run_probe",
        probe_model(known),
        known.inputs,
        tool=f"LiteRT interpreter on {where}",
        timeout=300.0,
        launcher=launcher,
    )
    return judge(known, found, found_int8, where)


def judge(
    known: Known, found: NDArray[np.float32], found_int8: NDArray[np.float32], where: str
) -> dict[str, float]:
    """Compare with what is known; NaN is never right."""
    difference = float(np.abs(found - known.logits).max())
    correlation = float(np.corrcoef(found_int8.ravel(), known.int8_logits.ravel())[0, 1])
    if not (difference <= FLOAT_DIFFERENCE and correlation >= INT8_CORRELATION):
        raise NativeToolError(
            f"{where} computes garbage: known float logits differ by up to {difference:.3g}, "
            f"known int8 logits correlate with {correlation:.4f}",
            expected=f"at most {FLOAT_DIFFERENCE:g}, and at least {INT8_CORRELATION:g}",
            todo="nothing that it says about a model can be believed; name another core",
        )
    return {"float_difference": difference, "int8_correlation": correlation}


def run_probe(
    model: bytes, inputs: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The worker's side: float and int8 logits."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter: Any = Interpreter(model_content=model, num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], inputs)
    interpreter.invoke()
    found = [interpreter.get_tensor(item["index"]) for item in interpreter.get_output_details()]
    return found[0], found[1]


def probe_model(known: Known) -> bytes:
    """A flatbuffer: one input, and its product with the float and with the int8 matrix."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    def tensor(shape: tuple[int, ...], kind: int, buffer: int, name: str) -> Any:
        made = schema.TensorT()
        made.shape, made.type, made.buffer, made.name = list(shape), kind, buffer, name
        return made

    def product(matrix: int, output: int) -> Any:
        made = schema.OperatorT()
        made.opcodeIndex, made.inputs, made.outputs = 0, [0, matrix, -1], [output]
        made.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
        made.builtinOptions = schema.FullyConnectedOptionsT()
        return made

    def buffer(values: NDArray[Any] | None = None) -> Any:
        made = schema.BufferT()
        made.data = None if values is None else np.frombuffer(values.tobytes(), np.uint8)
        return made

    quantized = tensor((VOCAB, WIDTH), _INT8, 2, "int8")
    quantized.quantization = schema.QuantizationParametersT()
    quantized.quantization.scale = known.scales
    quantized.quantization.zeroPoint = np.zeros(VOCAB, np.int64)
    quantized.quantization.quantizedDimension = 0
    graph = schema.SubGraphT()
    graph.tensors = [
        tensor((ROWS, WIDTH), _FLOAT32, 0, "inputs"),
        tensor((VOCAB, WIDTH), _FLOAT32, 1, "float"),
        quantized,
        tensor((ROWS, VOCAB), _FLOAT32, 0, "float_logits"),
        tensor((ROWS, VOCAB), _FLOAT32, 0, "int8_logits"),
    ]
    graph.inputs, graph.outputs = [0], [3, 4]
    graph.operators = [product(1, 3), product(2, 4)]
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = _FULLY_CONNECTED
    code.version = _VERSION
    model = schema.ModelT()
    model.version, model.description = 3, "Hermes processor probe"
    model.operatorCodes, model.subgraphs = [code], [graph]
    model.buffers = [buffer(), buffer(known.weights), buffer(known.quantized)]
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
