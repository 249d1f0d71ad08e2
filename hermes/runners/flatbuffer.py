"""LogitsRunner over a .tflite file: its signatures in an interpreter, in a child process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hermes.errors import BadInputError
from hermes.runners.child import Child
from hermes.runners.closing import Closing
from hermes.runners.interface import Logits
from hermes.runners.process import Launcher
from hermes.runners.roles import decode_roles, prefill_roles
from hermes.signatures import Signature


@dataclass(frozen=True)
class Interpreter:
    """Something that runs flatbuffers.

    Attributes:
        name: for reports.
        target: `module:Class` of its `SignatureSession`.
        launcher: another Python to run it, e.g. one for another processor.
    """

    name: str
    target: str
    launcher: Launcher | None = None


_STEP_SECONDS = 5.0
"""What a step of a text that is scored in one call may take, on average."""
LITERT = Interpreter("LiteRT", "hermes.runners.compiled_model:CompiledSignatures")


class FlatbufferRunner(Closing):
    """A .tflite file's prefill and decode signatures.

    Args:
        path: a flatbuffer whose tensors have names that LiteRT-LM knows.
        threads: of the CPU kernels.
        timeout: seconds for loading and for each call.
        memory_limit: resident bytes of the child.
        interpreter: what runs it.

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
        interpreter: Interpreter = LITERT,
    ) -> None:
        if not Path(path).is_file():
            raise BadInputError(f"{path}: no such file", expected="a .tflite file")
        self.name = "flatbuffer" if interpreter is LITERT else f"flatbuffer in {interpreter.name}"
        self._child = Child(
            interpreter.target,
            str(path),
            threads,
            tool=f"{interpreter.name} interpreter",
            timeout=timeout,
            memory_limit=memory_limit,
            launcher=interpreter.launcher,
        )
        try:
            self.signatures: tuple[Signature, ...] = self._child.call("describe")
            decode = decode_roles(self.signatures, str(path))
            prefill = prefill_roles(self.signatures)
        except BaseException:
            self._child.close()
            raise
        self._timeout = timeout
        self.capacity = decode.capacity
        self.vocab_size = decode.logits.shape[-1] if decode.logits is not None else 0
        self.prefill_lengths = tuple(roles.length for roles in prefill)

    def reset(self) -> None:
        """Fill the whole cache with stale values."""
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
        """Logits [vocab] after each id, by decode steps; one is computed ahead of the caller."""
        self._check_room(0, len(ids))
        self._child.call("reset")
        calls = ((int(token), position) for position, token in enumerate(ids))
        yield from cast("Iterator[Logits]", self._child.stream("step", calls))

    def score_into(self, ids: Sequence[int], path: Path) -> None:
        """Write what `score` gives to a file, float32 [T, vocab], without a word in between."""
        self._check_room(0, len(ids))
        limit = max(self._timeout, _STEP_SECONDS * len(ids))
        given = [int(token) for token in ids]
        self._child.call("score_into", given, str(path), timeout=limit)

    def cache_rows(self, count: int) -> dict[str, Logits]:
        """Keys and values [kv_heads, count, head_dim] of every layer, `k_0`, `v_0`, `k_1`, ..."""
        return cast("dict[str, Logits]", self._child.call("cache_rows", count))

    def _check_room(self, position: int, length: int) -> None:
        if position + length > self.capacity:
            raise ValueError(f"{length} rows at {position} do not fit {self.capacity} slots")

    @property
    def peak_memory(self) -> int:
        """Largest resident size of the interpreter's process, bytes."""
        return self._child.peak_memory

    def close(self, kill: bool = False) -> None:
        """End the interpreter's process."""
        self._child.close(kill)
