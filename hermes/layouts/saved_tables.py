"""Rotary tables and masks that training code saved: compared with what the model will use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig, RopeScaling

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 64
_TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
_MAX_HEAD = 2048


def table_problem(tensor: LazyTensor, config: HermesConfig) -> str | None:
    """Why a saved rotary table contradicts the configuration, or None."""
    half = config.head_dim // 2
    kind = tensor.name.rpartition(".")[2]
    if tensor.name.endswith("rope_freqs.weight"):
        return _factors_problem(tensor, config)
    if not tensor.shape or tensor.shape[-1] > _MAX_HEAD:
        return f"{tensor.name} {list(tensor.shape)}: not a rotary table of this model"
    if tensor.shape[-1] not in (half, 2 * half):
        return (
            f"{tensor.name} has rows of {tensor.shape[-1]}, head_dim {config.head_dim} wants "
            f"{half} or {2 * half}"
        )
    if "inv_freq" in kind or kind == "freqs":
        seen, wanted = tensor.read().flatten(), _frequencies(config)
    else:
        seen, wanted = _saved_rows(tensor, kind, config)
    error = _relative_error(seen, wanted)
    if error <= _TOLERANCES.get(tensor.dtype, 1e-4):
        return None
    return (
        f"{tensor.name} contradicts the configuration (rope_theta {config.rope_theta}"
        f"{', scaled' if config.rope_scaling else ''}): off by {error:.2g}{_guess(tensor, kind)}"
    )


def mask_problem(tensor: LazyTensor) -> str | None:
    """Why a saved mask is not the causal one, or None."""
    import torch

    if len(tensor.shape) < 2 or tensor.shape[-1] != tensor.shape[-2]:
        return f"{tensor.name} {list(tensor.shape)}: not a causal mask"
    length = tensor.shape[-1]
    if math.prod(tensor.shape[:-2]) != 1:
        return f"{tensor.name} {list(tensor.shape)}: more than one mask"
    rows = tensor.read(0, min(_ROWS, length)) if len(tensor.shape) == 2 else tensor.read()
    rows = rows.reshape(-1, length)[:_ROWS]
    lower = torch.ones(len(rows), length, dtype=torch.bool).tril()
    filled = rows != 0
    if torch.equal(filled, lower) or torch.equal(filled, ~lower):
        return None
    return f"{tensor.name}: a mask that is not causal; other attention patterns are not implemented"


def _frequencies(config: HermesConfig) -> Tensor:
    import torch

    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies: Tensor = config.rope_theta**-exponents
    return frequencies / _factors(frequencies, config.rope_scaling)


def _factors(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """By how much the scaling divides every frequency."""
    import torch

    if scaling is None:
        return torch.ones_like(frequencies)
    if scaling.kind == "linear":
        return torch.full_like(frequencies, scaling.factor)
    turns = frequencies * scaling.original_max_seq_len / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / (kept + (1 - kept) / scaling.factor)


def _factors_problem(tensor: LazyTensor, config: HermesConfig) -> str | None:
    import torch

    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain: Tensor = config.rope_theta**-exponents
    wanted = _factors(plain, config.rope_scaling)
    if tensor.shape == tuple(wanted.shape):
        error = _relative_error(tensor.read(), wanted)
        if error <= _TOLERANCES.get(tensor.dtype, 1e-4):
            return None
    return (
        f"{tensor.name} scales the rotary frequencies, the configuration does not say so: give "
        "rope_scaling (rope_type llama3 with its four numbers) with --config"
    )


def _saved_rows(tensor: LazyTensor, kind: str, config: HermesConfig) -> tuple[Tensor, Tensor]:
    """The first rows of a cos, sin or complex table and what they should be."""
    import torch

    width = tensor.shape[-1]
    flat = tensor.read(0, min(_ROWS, tensor.rows)) if len(tensor.shape) == 2 else tensor.read()
    seen = flat.reshape(-1, width)[:_ROWS]
    angles = torch.arange(len(seen), dtype=torch.float64)[:, None] * _frequencies(config)
    if seen.is_complex():
        return torch.view_as_real(seen), torch.stack((angles.cos(), angles.sin()), dim=-1)
    wanted = (angles.sin() if "sin" in kind else angles.cos()) * config.rope_amplitude
    if width == config.head_dim:
        halves, pairs = wanted.repeat(1, 2), wanted.repeat_interleave(2, dim=1)
        wanted = min(halves, pairs, key=lambda form: _relative_error(seen, form))
    return seen, wanted


def _relative_error(seen: Tensor, wanted: Tensor) -> float:
    if seen.numel() != wanted.numel():
        return math.inf
    difference = (seen.double().flatten() - wanted.double().flatten()).abs()
    scale = wanted.double().flatten().abs().clamp(min=1e-3)
    return float((difference / scale).max() if seen.ndim == 1 else difference.max())


def _guess(tensor: LazyTensor, kind: str) -> str:
    """The base that an unscaled frequency table was made with."""
    if "inv_freq" not in kind or tensor.numel < 2:
        return ""
    second = float(tensor.read().flatten()[1])
    if not 0 < second < 1:
        return ""
    return f"; its second entry fits rope_theta {second**-tensor.numel:.6g}"
