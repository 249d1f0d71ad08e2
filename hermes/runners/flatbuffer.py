"""LogitsRunner over a .tflite file: its signatures in the LiteRT interpreter, in a child process.

`CompiledModel` is the interface LiteRT-LM itself uses: one buffer per cache tensor is input and
output of every signature, so the cache is updated in place and never copied. Logits are
bit-identical to `Interpreter`'s signature runners. The weight cache path ":memory" keeps one packed
copy of the weights for all signatures instead of one each, and writes no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np

from hermes.errors import BadInputError
from hermes.runners.child import Child
from hermes.runners.interface import Logits
from hermes.signatures import DECODE, MASK_CLOSED, Signature, TensorSpec

if TYPE_CHECKING:
    from ai_edge_litert.compiled_model import CompiledModel
    from ai_edge_litert.tensor_buffer import TensorBuffer

STALE = 1000.0
"""What `reset` leaves in the cache: LiteRT-LM never clears it either, the mask hides old rows.

Finite, because a closed row's weight is exactly 0 and 0 x NaN would be NaN in any model.
"""


class FlatbufferRunner:
    """A .tflite file's prefill and decode signatures.

    Args:
        path: a flatbuffer whose names are those of `hermes.signatures`.
        threads: of the CPU kernels.
        timeout: seconds for loading and for each call.
        memory_limit: resident bytes of the child.

    Raises:
        BadInputError: the file has no usable `decode`.
        NativeToolError: the interpreter died, hung or refused the file.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        threads: int = 1,
        timeout: float = 600.0,
        memory_limit: int | None = None,
    ) -> None:
        if not Path(path).is_file():
            raise BadInputError(f"{path}: no such file", expected="a .tflite file")
        self.name = "flatbuffer"
        self._child = Child(
            "hermes.runners.flatbuffer:Signatures",
            str(path),
            threads,
            tool="LiteRT interpreter",
            timeout=timeout,
            memory_limit=memory_limit,
        )
        try:
            self.signatures: tuple[Signature, ...] = self._child.call("describe")
            found = {signature.name: signature for signature in self.signatures}
            if DECODE not in found:
                raise BadInputError(
                    f"{path}: signatures {', '.join(found) or '(none)'}", expected="decode"
                )
            shapes = {spec.name: spec.shape for spec in found[DECODE].inputs}
            outputs = {spec.name: spec.shape for spec in found[DECODE].outputs}
            missing = {"tokens", "input_pos", "mask"} - set(shapes) | {"logits"} - set(outputs)
            if missing:
                raise BadInputError(f"{path}: decode has no {', '.join(sorted(missing))}")
        except BaseException:
            self._child.close()
            raise
        self.capacity = shapes["mask"][-1]
        self.vocab_size = outputs["logits"][-1]
        lengths = [item.length for item in self.signatures if item.name.startswith("prefill")]
        self.prefill_lengths = tuple(sorted(lengths))

    def reset(self) -> None:
        """Fill the whole cache with `STALE`."""
        self._child.call("reset")

    def prefill(self, ids: Sequence[int], position: int, length: int) -> None:
        """One call of the prefill signature with `length` rows."""
        self._check_room(position, length)
        self._child.call("prefill", [int(token) for token in ids], position, length)

    def step(self, token: int, position: int) -> Logits:
        """One call of decode; logits [vocab]."""
        self._check_room(position, 1)
        return cast("Logits", self._child.call("step", int(token), position))

    def score(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Logits [vocab] after each id, by decode steps."""
        self.reset()
        for position, token in enumerate(ids):
            yield self.step(token, position)

    def cache_rows(self, count: int) -> dict[str, Logits]:
        """Keys and values [kv_heads, count, head_dim] of every layer, `k_0`, `v_0`, `k_1`, ..."""
        return cast("dict[str, Logits]", self._child.call("cache_rows", count))

    def _check_room(self, position: int, length: int) -> None:
        # The slice operator would clamp its start and overwrite earlier rows; LiteRT-LM refuses.
        if position + length > self.capacity:
            raise ValueError(f"{length} rows at {position} do not fit {self.capacity} slots")

    @property
    def peak_memory(self) -> int:
        """Largest resident size of the interpreter's process, bytes."""
        return self._child.peak_memory

    def close(self) -> None:
        """End the interpreter's process."""
        self._child.close()

    def __enter__(self) -> FlatbufferRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.close(kill=error is not None)


class Signatures:
    """The child's side: the compiled model and its buffers."""

    def __init__(self, path: str, threads: int) -> None:
        from ai_edge_litert.compiled_model import CompiledModel
        from ai_edge_litert.hardware_accelerator import HardwareAccelerator
        from ai_edge_litert.options import CpuOptions, Options

        cpu = CpuOptions(num_threads=threads, xnnpack_weight_cache_path=":memory")
        options = Options(hardware_accelerators=HardwareAccelerator.CPU, cpu_options=cpu)
        self._model: CompiledModel = CompiledModel.from_file(path, options=options)
        self._buffers: dict[str, dict[str, TensorBuffer]] = {}
        self._cache: dict[str, TensorBuffer] = {}
        self._signatures = {name: self._signature(name) for name in self._names()}

    def describe(self) -> tuple[Signature, ...]:
        """Every signature of the file as it says itself, in file order."""
        return tuple(self._signatures.values())

    def reset(self) -> None:
        """Fill the cache with values that only the mask can hide."""
        for spec in self._signatures[DECODE].inputs:
            if spec.name in self._cache_buffers():
                stale = np.full(spec.shape, STALE, spec.dtype)
                self._cache[spec.name].write(stale)

    def prefill(self, ids: list[int], position: int, length: int) -> None:
        """Feed `ids` through the prefill signature of `length` rows."""
        for signature in self._signatures.values():
            if signature.name.startswith("prefill") and signature.length == length:
                self._run(signature, ids, position)
                return
        raise ValueError(f"no prefill signature of {length} rows")

    def step(self, token: int, position: int) -> Logits:
        """Feed one token through decode."""
        signature = self._signatures[DECODE]
        buffers = self._run(signature, [token], position)
        (size,) = [spec.shape[-1] for spec in signature.outputs if spec.name == "logits"]
        logits: Logits = buffers["logits"].read(size, np.float32)
        return logits

    def cache_rows(self, count: int) -> dict[str, Logits]:
        """The first rows of the cache in Hermes' own layout."""
        rows: dict[str, Logits] = {}
        for spec in self._signatures[DECODE].inputs:
            name = spec.name.removeprefix("kv_cache_")
            if name != spec.name:
                values = self._cache[spec.name].read(math.prod(spec.shape), np.float32)
                tensor = np.asarray(values).reshape(spec.shape)[0]
                rows[name] = (tensor if name[0] == "k" else tensor.transpose(0, 2, 1))[:, :count]
        return rows

    def _run(self, signature: Signature, ids: list[int], position: int) -> dict[str, TensorBuffer]:
        buffers = self._signature_buffers(signature)
        tokens, positions, mask = runtime_inputs(
            ids, position, signature.length, self._context(signature)
        )
        buffers["tokens"].write(tokens)
        buffers["input_pos"].write(positions)
        buffers["mask"].write(mask)
        inputs = {spec.name: buffers[spec.name] for spec in signature.inputs}
        outputs = {spec.name: buffers[spec.name] for spec in signature.outputs}
        self._model.run_by_name(signature.name, inputs, outputs)
        return buffers

    def _signature_buffers(self, signature: Signature) -> dict[str, TensorBuffer]:
        if signature.name not in self._buffers:
            buffers = dict(self._cache_buffers())
            for spec in signature.inputs:
                if spec.name not in buffers:
                    buffers[spec.name] = self._model.create_input_buffer_by_name(
                        signature.name, spec.name
                    )
            for spec in signature.outputs:
                if spec.name not in buffers:
                    buffers[spec.name] = self._model.create_output_buffer_by_name(
                        signature.name, spec.name
                    )
            self._buffers[signature.name] = buffers
        return self._buffers[signature.name]

    def _cache_buffers(self) -> dict[str, TensorBuffer]:
        if not self._cache:
            for spec in self._signatures[DECODE].inputs:
                if spec.name.startswith("kv_cache_"):
                    self._cache[spec.name] = self._model.create_input_buffer_by_name(
                        DECODE, spec.name
                    )
            self.reset()
        return self._cache

    def _names(self) -> list[str]:
        return list(self._model.get_signature_list())

    def _signature(self, name: str) -> Signature:
        inputs = _specs(self._model.get_input_tensor_details(name))
        outputs = _specs(self._model.get_output_tensor_details(name))
        (length,) = [spec.shape[-1] for spec in inputs if spec.name == "tokens"] or (0,)
        return Signature(name, length, inputs, outputs)

    def _context(self, signature: Signature) -> int:
        (context,) = [spec.shape[-1] for spec in signature.inputs if spec.name == "mask"]
        return context


def runtime_inputs(
    ids: Sequence[int], position: int, length: int, context: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [1, T], positions [T] and mask [1, 1, T, S] as LiteRT-LM fills them (observed).

    Rows after the last real one have token 0, position 0 and a closed mask row.
    """
    if not 0 < len(ids) <= length:
        raise ValueError(f"{len(ids)} tokens for {length} rows")
    tokens = np.zeros((1, length), np.int32)
    positions = np.zeros(length, np.int32)
    mask = np.full((1, 1, length, context), MASK_CLOSED, np.float32)
    tokens[0, : len(ids)] = ids
    positions[: len(ids)] = np.arange(position, position + len(ids))
    for row in range(len(ids)):
        mask[0, 0, row, : position + row + 1] = 0.0
    return tokens, positions, mask


def _specs(details: dict[str, dict[str, object]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, tuple(cast("list[int]", item["shape"])), str(item["dtype"]))  # type: ignore[arg-type]
        for name, item in details.items()
    )
