"""The child's side of a flatbuffer runner: its signatures as calls, whatever interprets them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from hermes.runners.interface import Logits
from hermes.runners.roles import Roles, decode_roles, fill_inputs, prefill_roles
from hermes.signatures import Signature, TensorSpec

STALE = 1000.0
"""What `reset` leaves in the cache: LiteRT-LM never clears it either, the mask hides old rows.

Finite, because a closed row's weight is exactly 0 and 0 x NaN would be NaN in any model.
"""
_STALE_INTEGER = 100


class SignatureSession(ABC):
    """Prefill and decode over one cache that is updated in place.

    Args:
        signatures: as the file describes them.
        where: the file, for messages.
    """

    def __init__(self, signatures: tuple[Signature, ...], where: str) -> None:
        self._signatures = signatures
        self._decode = decode_roles(signatures, where)
        self._prefill = {roles.length: roles for roles in prefill_roles(signatures)}

    def describe(self) -> tuple[Signature, ...]:
        """Every signature of the file as it says itself, in file order."""
        return self._signatures

    def reset(self) -> None:
        """Fill the cache with values that only the mask can hide."""
        for spec in self._decode.cache:
            stale = STALE if spec.dtype.startswith("float") else _STALE_INTEGER
            self._write_cache(spec, np.full(spec.shape, stale, spec.dtype))

    def prefill(self, ids: list[int], position: int, length: int) -> None:
        """Feed `ids` through the prefill signature of `length` rows."""
        if length not in self._prefill:
            raise ValueError(f"no prefill signature of {length} rows")
        roles = self._prefill[length]
        self._run(roles, fill_inputs(roles, ids, position))

    def step(self, token: int, position: int) -> Logits:
        """Feed one token through decode."""
        self._run(self._decode, fill_inputs(self._decode, [token], position))
        return self._read_logits(self._decode)

    def score_into(self, ids: list[int], path: str) -> None:
        """Step through a text and write the logits of each step to a file, float32 [T, vocab]."""
        self.reset()
        with open(path, "wb") as file:
            for position, token in enumerate(ids):
                self.step(token, position).tofile(file)

    def cache_rows(self, count: int) -> dict[str, Logits]:
        """The first rows of the cache, of a file in Hermes' own layout."""
        rows: dict[str, Logits] = {}
        for spec in self._decode.cache:
            name = spec.name.removeprefix("kv_cache_")
            tensor = self._read_cache(spec).reshape(spec.shape)[0]
            rows[name] = (tensor if name[0] == "k" else tensor.transpose(0, 2, 1))[:, :count]
        return rows

    @abstractmethod
    def _run(self, roles: Roles, inputs: dict[str, np.ndarray]) -> None:
        """One call of a signature."""

    @abstractmethod
    def _read_logits(self, roles: Roles) -> Logits:
        """Logits [vocab] of the last call."""

    @abstractmethod
    def _write_cache(self, spec: TensorSpec, values: np.ndarray) -> None:
        """Replace one cache tensor."""

    @abstractmethod
    def _read_cache(self, spec: TensorSpec) -> np.ndarray:
        """One cache tensor, flat or in its shape."""
