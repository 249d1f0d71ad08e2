"""Rotate the residual stream by an orthogonal matrix, so that no channel stands out.

Models of this family put activations of 10,000 and more into a few channels of a few tokens. An
int8 activation scale is shared by all channels of a token, so the others are rounded away. In a
rotated basis the same vector has no such channel. With gains of 1 a norm commutes with a rotation,
so the matrix is absorbed into everything that writes to the stream or reads from it (QuaRot,
Ashkboos et al. 2024; SpinQuant, Liu et al. 2024).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hermes.checkpoint.source import LazyTensor
from hermes.hadamard import hadamard
from hermes.parameters import EMBEDDING, HEAD
from hermes.rewrite import fold
from hermes.rewrite.inputs import Inputs
from hermes.rewrite.model import BLOCK_VALUES, Numbers, RewritableModel, by_columns, by_rows

NAME = "rotate_residual"
SEED = 20241
_READERS = tuple(reader for readers in fold.READERS.values() for reader in readers)
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_LEAST_WIDTH = 36


class Rotation:
    """An orthogonal matrix Q of any width: random signs, then a Kronecker product.

    Q = diag(signs) (H (x) D): H is a Hadamard matrix and D a Hadamard matrix times a random
    orthogonal one of the width's odd part, both about as wide as the width's root. So no
    width x width matrix is formed, and applying Q costs width x (size of D + size of H).

    Args:
        width: of the vectors.
        seed: of the signs and the odd factor.
    """

    def __init__(self, width: int, seed: int = SEED) -> None:
        generator = np.random.default_rng(seed)
        self.width = width
        self._signs = generator.integers(0, 2, width) * 2.0 - 1.0
        odd, within = _inner_factor(width)
        self._outer: Numbers = hadamard(width // (odd * within))
        self._inner: Numbers = hadamard(within)
        if odd > 1:
            self._inner = np.kron(self._inner, _random_orthogonal(odd, generator))
        self._in_dtype = functools.cache(self._cast)

    def _cast(self, dtype: DTypeLike) -> tuple[Numbers, Numbers, Numbers]:
        return self._signs.astype(dtype), self._outer.astype(dtype), self._inner.astype(dtype)

    def rows(self, values: Numbers) -> Numbers:
        """[R, width] times Q, in the dtype of the values."""
        signs, outer, inner = self._in_dtype(values.dtype)
        result = np.empty(values.shape, dtype=values.dtype)
        step = max(1, BLOCK_VALUES // self.width)
        for start in range(0, len(values), step):
            signed = values[start : start + step] * signs
            mixed = signed.reshape(-1, len(inner)) @ inner
            shape = (len(signed), len(outer), len(inner))
            np.matmul(outer, mixed.reshape(shape), out=result[start : start + step].reshape(shape))
        return result

    def columns(self, values: Numbers) -> Numbers:
        """The transpose of Q times [width, C], in the dtype of the values."""
        signs, outer, inner = self._in_dtype(values.dtype)
        signed = (values * signs[:, None]).reshape(len(outer), len(inner), -1)
        mixed = np.matmul(inner.T, signed).reshape(len(outer), -1)
        result: Numbers = (outer @ mixed).reshape(values.shape)
        return result


def _inner_factor(width: int) -> tuple[int, int]:
    """(odd part, power of two) of the inner factor; the outer one is at most twice as wide.

    Products of matrices narrower than `_LEAST_WIDTH` do not run at the processor's full speed.
    """
    power = width & -width
    odd, within = width // power, 1
    while within < power and odd * within < max(_LEAST_WIDTH, power // within // 2):
        within *= 2
    return odd, within


def rotate_residual(model: RewritableModel, seed: int = SEED) -> RewritableModel:
    """x -> x Q for the whole residual stream; needs the gains folded.

    Readers (rows of q, k, v, gate, up, head) and the embedding become W Q. Writers (o and down)
    become the transpose of Q times W, and so do their biases.
    """
    model.require(fold.NAME, NAME)
    model.refuse_again(NAME)
    # Made when the first weight is read: planning needs no matrix.
    made = functools.cache(lambda: Rotation(model.config.hidden_size, seed))

    def rows(values: Numbers) -> Numbers:
        return made().rows(values)

    def columns(values: Numbers) -> Numbers:
        # A bias is one column.
        return made().columns(values)

    changed: dict[str, LazyTensor] = {}
    for name in (EMBEDDING, HEAD):
        changed[name] = by_rows(model.weights[name], rows, model.dtype)
    for layer in range(model.config.num_layers):
        prefix = f"layers.{layer}."
        for reader in _READERS:
            changed[prefix + reader] = by_rows(model.weights[prefix + reader], rows, model.dtype)
        for writer in _WRITERS:
            weight, bias = f"{prefix}{writer}.weight", f"{prefix}{writer}.bias"
            for name in (weight, bias):
                if name in model.weights:
                    changed[name] = by_columns(model.weights[name], columns, model.dtype)
    readers = [name for name in model.inputs if name == HEAD or name.endswith(_READERS)]
    # What several matrices read is rotated once.
    rotated = {seen: _rotated(seen, made) for seen in {model.inputs[name] for name in readers}}
    inputs = {name: rotated[model.inputs[name]] for name in readers}
    return model.changed(NAME, changed, inputs=inputs)


def _rotated(inputs: Inputs, made: Callable[[], Rotation]) -> Inputs:
    return functools.cache(lambda: made().rows(inputs()))


def _random_orthogonal(size: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Haar-distributed: QR of a Gaussian matrix with the signs of R's diagonal (Mezzadri 2007)."""
    q, r = np.linalg.qr(generator.standard_normal((size, size)))
    signed: NDArray[np.float64] = q * np.sign(np.diagonal(r))
    return signed
