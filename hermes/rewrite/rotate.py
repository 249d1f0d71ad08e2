"""Rotate the residual stream by an orthogonal matrix, so that no channel stands out.

Models of this family put activations of 10,000 and more into a few channels of a few tokens. An
int8 activation scale is shared by all channels of a token, so the others are rounded away. In a
rotated basis the same vector has no such channel. With gains of 1 a norm commutes with a rotation,
so the matrix is absorbed into everything that writes to the stream or reads from it (QuaRot,
Ashkboos et al. 2024; SpinQuant, Liu et al. 2024).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hermes.checkpoint.source import LazyTensor
from hermes.hadamard import transform_columns, transform_rows
from hermes.parameters import EMBEDDING, HEAD
from hermes.rewrite import fold
from hermes.rewrite.inputs import Inputs
from hermes.rewrite.model import Numbers, RewritableModel, by_columns, by_rows

NAME = "rotate_residual"
SEED = 20241
_READERS = tuple(reader for readers in fold.READERS.values() for reader in readers)
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")


class Rotation:
    """An orthogonal matrix Q of any width: random signs, then a Kronecker product.

    Q = diag(signs) (D (x) H): H is the Hadamard matrix of the width's power of two, D a random
    orthogonal one of the width's odd part. So no width x width matrix is formed, and applying H
    costs additions only.

    Args:
        width: of the vectors.
        seed: of the signs and the odd factor.
    """

    def __init__(self, width: int, seed: int = SEED) -> None:
        generator = np.random.default_rng(seed)
        self.width = width
        self._size = width & -width
        self._signs = generator.integers(0, 2, width) * 2.0 - 1.0
        odd = width // self._size
        # H is applied unscaled.
        factor = _random_orthogonal(odd, generator) if odd > 1 else np.ones((1, 1))
        self._odd: Numbers = factor / math.sqrt(self._size)
        self._in_dtype = functools.cache(self._cast)

    def _cast(self, dtype: DTypeLike) -> tuple[Numbers, Numbers]:
        return self._signs.astype(dtype), self._odd.astype(dtype)

    def rows(self, values: Numbers) -> Numbers:
        """[R, width] times Q, in the dtype of the values."""
        return transform_rows(values, *self._in_dtype(values.dtype))

    def columns(self, values: Numbers) -> Numbers:
        """The transpose of Q times [width, C], in the dtype of the values."""
        return transform_columns(values, *self._in_dtype(values.dtype))


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
