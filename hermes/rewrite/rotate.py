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
from typing import TYPE_CHECKING

from hermes.checkpoint.source import LazyTensor
from hermes.parameters import EMBEDDING, HEAD
from hermes.rewrite import fold
from hermes.rewrite.model import RewritableModel, by_columns, by_rows

if TYPE_CHECKING:
    from torch import Tensor

NAME = "rotate_residual"
SEED = 20241
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_LARGEST_HADAMARD = 64
"""A Kronecker factor this big costs no more to apply than the odd factor; see `Rotation`."""


class Rotation:
    """An orthogonal matrix Q of any width: random signs, then a Kronecker product.

    The factors are Hadamard matrices of the width's power of two and one random orthogonal matrix
    of its odd part, so applying Q costs width x (sum of factors) and no width^2 matrix is formed.

    Args:
        width: of the vectors.
        seed: of the signs and the odd factor.
    """

    def __init__(self, width: int, seed: int = SEED) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        self.width = width
        self.signs = torch.randint(0, 2, (width,), generator=generator).double() * 2 - 1
        self.factors = [_hadamard(size) for size in _power_factors(width)]
        odd = width // (width & -width)
        if odd > 1:
            self.factors.append(_random_orthogonal(odd, generator))

    def apply(self, rows: Tensor) -> Tensor:
        """rows [R, width] times Q, float64."""
        shape = rows.shape
        rows = (rows * self.signs).reshape(-1, *[len(factor) for factor in self.factors])
        for axis, factor in enumerate(self.factors, start=1):
            rows = (rows.movedim(axis, -1) @ factor).movedim(-1, axis)
        return rows.reshape(shape)


def rotate_residual(model: RewritableModel, seed: int = SEED) -> RewritableModel:
    """x -> x Q for the whole residual stream; needs the gains folded.

    Readers (rows of q, k, v, gate, up, head) and the embedding become W Q. Writers (o and down)
    become the transpose of Q times W, and so do their biases.
    """
    model.require(fold.NAME, NAME)
    model.refuse_again(NAME)
    # Made when the first weight is read: planning and tracing need no torch.
    made = functools.cache(lambda: Rotation(model.config.hidden_size, seed))

    def rotated(rows: Tensor) -> Tensor:
        return made().apply(rows)

    changed: dict[str, LazyTensor] = {}
    for name in (EMBEDDING, HEAD):
        changed[name] = by_rows(model.weights[name], rotated)
    for layer in range(model.config.num_layers):
        prefix = f"layers.{layer}."
        for reader in (name for names in fold.READERS.values() for name in names):
            changed[prefix + reader] = by_rows(model.weights[prefix + reader], rotated)
        for writer in _WRITERS:
            weight, bias = f"{prefix}{writer}.weight", f"{prefix}{writer}.bias"
            # The transpose of Q times W is the transpose of (transpose of W) times Q.
            for name in (weight, bias):
                if name in model.weights:
                    changed[name] = by_columns(model.weights[name], rotated)
    return model.changed(NAME, changed)


def _power_factors(width: int) -> list[int]:
    """The power of two in `width` as factors of at most `_LARGEST_HADAMARD`."""
    power, factors = width & -width, []
    while power > 1:
        factors.append(min(power, _LARGEST_HADAMARD))
        power //= factors[-1]
    return factors


def _hadamard(size: int) -> Tensor:
    """Sylvester's orthogonal Hadamard matrix."""
    import torch

    matrix: Tensor = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / math.sqrt(size)


def _random_orthogonal(size: int, generator: object) -> Tensor:
    """Haar-distributed: QR of a Gaussian matrix with the signs of R's diagonal (Mezzadri 2007)."""
    import torch

    gaussian = torch.randn(size, size, dtype=torch.float64, generator=generator)  # type: ignore[call-overload]
    q, r = torch.linalg.qr(gaussian)
    result: Tensor = q * torch.sign(torch.diagonal(r))
    return result
