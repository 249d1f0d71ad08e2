"""Quantization in the float model: what a rule does to the logits, without writing a file.

The runtime's kernels multiply integer weights by activations that are quantized per token, and
accumulate exactly; so rounding both in a float model gives the same numbers up to float rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from converters.float_models import reference_model
from converters.quantize import quantize_rows, restored_rows
from converters.rounding import ErrorFeedback
from hermes.recipe import QuantizationRule
from hermes.rewrite import RewritableModel
from hermes.rewrite.twin import follow_graph

if TYPE_CHECKING:
    from torch import Tensor, nn

_LOOKED_UP = re.compile(r"embed_tokens\.weight$")


@dataclass(frozen=True)
class Divergence:
    """Mean KL in nats, and the share of positions with the same most likely token."""

    kl: float
    top1: float


class QuantizedTwin:
    """The rewritten float model, whose matrices can be quantized one by one and restored.

    Args:
        model: after the rewrites; held in memory as float32.
        directions: see `Calibration`.
    """

    def __init__(self, model: RewritableModel, directions: int) -> None:
        self._model = model
        self._directions = directions
        self.weights = model.weights
        self._reference = reference_model(model.config, model.weights)
        for layer in self._reference.layers:
            follow_graph(layer, model)

    def log_probabilities(self, sequences: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """[T, vocab] float32 of each sequence."""
        import torch

        for ids in sequences:
            with torch.inference_mode():
                logits = self._reference(torch.tensor([list(ids)]))["logits"][0]
                yield logits.float().log_softmax(-1)

    def divergence(
        self, wanted: Sequence[Tensor], sequences: Sequence[Sequence[int]]
    ) -> Divergence:
        """How far the model now is from earlier `log_probabilities`."""
        total, same, count = 0.0, 0, 0
        for before, now in zip(wanted, self.log_probabilities(sequences), strict=True):
            total += float((before.exp() * (before - now)).sum())
            same += int((before.argmax(-1) == now.argmax(-1)).sum())
            count += len(now)
        return Divergence(total / count, same / count)

    @contextmanager
    def quantized(self, rules: Mapping[str, QuantizationRule]) -> Iterator[None]:
        """Within the block the named parameters are stored as their rules say."""
        import torch

        kept: dict[str, Tensor] = {}
        hooks = []
        try:
            for name, rule in rules.items():
                module = self._reference.get_submodule(name.removesuffix(".weight"))
                parameter = self._reference.get_parameter(name)
                kept[name] = parameter.data
                parameter.data = torch.from_numpy(self._restored(name, rule))
                if rule.integer and not rule.unpacked and not _LOOKED_UP.search(name):
                    hooks.append(module.register_forward_pre_hook(_rounded_input))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name, data in kept.items():
                self._reference.get_parameter(name).data = data

    def _restored(self, name: str, rule: QuantizationRule) -> np.ndarray:
        rows = self._model.weights[name].floats()
        seen = self._model.inputs.get(name) if rule.rounding == "calibrated" else None
        feedback = None
        if seen is not None:
            feedback = ErrorFeedback(seen(), self._directions)
        amplitude = float(np.abs(rows).max())
        return restored_rows(quantize_rows(rows, rule, amplitude, feedback), rule, rows.shape)


def _rounded_input(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (rounded_activations(inputs[0]),)


def rounded_activations(x: Tensor) -> Tensor:
    """[..., C] rounded to 8 bits per row, asymmetric, with zero representable (XNNPACK's qd8)."""
    low = x.amin(-1, keepdim=True).clamp(max=0)
    high = x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-20)
    zero = (-128 - low / scale).round().clamp(-128, 127)
    rounded: Tensor = ((x / scale + zero).round().clamp(-128, 127) - zero) * scale
    return rounded
