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
from hermes.hadamard import hadamard
from hermes.parameters import EMBEDDING, HEAD
from hermes.rewrite import fold
from hermes.rewrite.inputs import Inputs
from hermes.rewrite.model import BLOCK_VALUES, Numbers, RewritableModel, by_columns, by_rows

NAME = "rotate_residual"
SEED = 20241
_READERS = tuple(reader for readers in fold.READERS.values() for reader in readers)
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_DENSE_WIDTH = 64
"""Smallest dense factor: a matrix product of this size runs at the processor's full speed."""


class Rotation:
    """An orthogonal matrix Q of any width: random signs, then a Kronecker product.

    Q = diag(signs) (H (x) D): H is a Hadamard matrix, applied as sums and differences, and D a
    dense matrix of moderate size, itself a Hadamard matrix times a random orthogonal one of the
    width's odd part. So no width x width matrix is formed, and applying Q costs
    width x (size of D + log2 of the size of H).

    Args:
        width: of the vectors.
        seed: of the signs and the odd factor.
    """

    def __init__(self, width: int, seed: int = SEED) -> None:
        generator = np.random.default_rng(seed)
        self.width = width
        self._signs = generator.integers(0, 2, width) * 2.0 - 1.0
        power = width & -width
        odd = width // power
        within = min(power, 1 << max(0, math.ceil(math.log2(_DENSE_WIDTH / odd))))
        self._outer = power // within
        self._dense: Numbers = hadamard(within)
        if odd > 1:
            self._dense = np.kron(self._dense, _random_orthogonal(odd, generator))
        # The Hadamard matrix's norm goes with the signs.
        self._signs /= math.sqrt(self._outer)
        self._in_dtype = functools.cache(self._cast)

    def _cast(self, dtype: DTypeLike) -> tuple[Numbers, Numbers]:
        return self._signs.astype(dtype), self._dense.astype(dtype)

    def rows(self, values: Numbers) -> Numbers:
        """[R, width] times Q, in the dtype of the values."""
        signs, dense = self._in_dtype(values.dtype)
        shape = (-1, self._outer, len(dense))
        parts, result = values.reshape(shape), np.empty(values.shape, dtype=values.dtype)
        results, signs = result.reshape(shape), signs.reshape(self._outer, 1, -1)
        step = max(1, BLOCK_VALUES // self.width)
        for start in range(0, len(values), step):
            # With the Hadamard matrix's axis in front, its sums run over long stretches of memory.
            part = parts[start : start + step].swapaxes(0, 1)
            front = np.multiply(part, signs, order="C")
            mixed = (front.reshape(-1, len(dense)) @ dense).reshape(1, self._outer, -1)
            mixed = _hadamard_sums(mixed, front.reshape(mixed.shape))
            results[start : start + step] = mixed.reshape(front.shape).swapaxes(0, 1)
        return result

    def columns(self, values: Numbers) -> Numbers:
        """The transpose of Q times [width, C], in the dtype of the values."""
        signs, dense = self._in_dtype(values.dtype)
        signed = (values * signs[:, None]).reshape(self._outer, len(dense), -1)
        mixed = np.matmul(dense.T, signed).reshape(1, self._outer, -1)
        return _hadamard_sums(mixed, signed.reshape(mixed.shape)).reshape(values.shape)


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
    inputs = {name: _rotated(model.inputs[name], made) for name in readers}
    return model.changed(NAME, changed, inputs=inputs)


def _rotated(inputs: Inputs, made: Callable[[], Rotation]) -> Inputs:
    return functools.cache(lambda: made().rows(inputs()))


def _hadamard_sums(values: Numbers, spare: Numbers) -> Numbers:
    """Sylvester's matrix of ones and minus ones along axis 1 of [R, N, C]; uses up both arrays."""
    count, height = values.shape[1], 1
    while height < count:
        pairs = (len(values), count // (2 * height), 2, height * values.shape[2])
        source, target = values.reshape(pairs), spare.reshape(pairs)
        np.add(source[:, :, 0], source[:, :, 1], out=target[:, :, 0])
        np.subtract(source[:, :, 0], source[:, :, 1], out=target[:, :, 1])
        values, spare = spare, values
        height *= 2
    return values


def _random_orthogonal(size: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Haar-distributed: QR of a Gaussian matrix with the signs of R's diagonal (Mezzadri 2007)."""
    q, r = np.linalg.qr(generator.standard_normal((size, size)))
    signed: NDArray[np.float64] = q * np.sign(np.diagonal(r))
    return signed
