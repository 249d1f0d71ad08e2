"""Rotary tables as the exported graph looks them up, without torch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hermes.config import HermesConfig


def rope_rows(
    config: HermesConfig, context: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rotary tables for a lookup by position: cos and signed sin, both [C, D] float32.

    The first half of the sine row is negated, so a rotation is `x * cos + swapped(x) * sin` with
    the halves of x swapped. Angles are float32 products as in training code, because at position
    1000 the rounding of the angle is part of what the model was trained with.
    """
    half = config.head_dim // 2
    steps = np.arange(half, dtype=np.float32) * np.float32(2) / np.float32(config.head_dim)
    rates = np.float32(1) / np.power(np.float32(config.rope_theta), steps)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        rates = rates / np.float32(scaling.factor)
    elif scaling is not None:
        wavelengths = 2 * math.pi / rates.astype(np.float64)
        ratio = scaling.original_max_seq_len / wavelengths - scaling.low_freq_factor
        blend = np.clip(ratio / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
        rates = (rates * ((1 - blend) / scaling.factor + blend)).astype(np.float32)
    angles = np.arange(context, dtype=np.float32)[:, None] * rates[None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    amplitude = np.float32(config.rope_amplitude)
    return (
        np.concatenate([cos, cos], axis=1) * amplitude,
        np.concatenate([-sin, sin], axis=1) * amplitude,
    )
