"""LogitsRunner over the exportable module: what the graph will compute, still in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import hermes.exportable
from hermes.config import HermesConfig
from hermes.exportable import ExportableModel, batched_matmul, cache_write
from hermes.recipe import ExportShapes, GraphOptions
from hermes.runners.interface import Logits
from hermes.runners.roles import runtime_inputs
from hermes.runners.session import STALE
from hermes.signatures import cache_specs, graph_weights


class ExportableRunner:
    """The two modules (with and without logits) over one cache.

    Like the graph, a call looks at the first slots only while no later one is written
    (`GraphOptions.attention_widths`): the slots it leaves out would weigh exactly 0.

    Args:
        config: the model.
        shapes: context and prefill lengths.
        options: graph choices.
        state: Hermes parameter name -> float32 tensor.
    """

    def __init__(
        self,
        config: HermesConfig,
        shapes: ExportShapes,
        options: GraphOptions,
        state: Mapping[str, Tensor],
    ) -> None:
        self.name = "exportable module"
        self.capacity = shapes.context
        self.prefill_lengths = tuple(sorted(shapes.prefill))
        self.vocab_size = config.vocab_size
        self._widths = (*sorted(options.attention_widths), shapes.context)
        self._specs = cache_specs(config, shapes.context)
        values = {
            weight.name: _joined([state[part] for part in weight.parts])
            for weight in graph_weights(config, options)
        }
        biases = {w.name for w in graph_weights(config, options) if w.kind == "bias"}
        self._weights = {name: value for name, value in values.items() if name not in biases}
        self._modules = {
            with_logits: ExportableModel(
                config,
                shapes.context,
                options,
                with_logits=with_logits,
                biases={name: values[name] for name in biases},
            ).eval()
            for with_logits in (False, True)
        }
        self.reset()

    def reset(self) -> None:
        """Fill the cache with stale rows, which only the mask hides."""
        self._cache = {
            spec.name.removeprefix("kv_cache_"): torch.full(spec.shape, STALE)
            for spec in self._specs
        }

    def prefill(self, ids: Sequence[int], position: int, length: int) -> None:
        """One prefill of `length` rows."""
        self._run(ids, position, length, with_logits=False)

    def step(self, token: int, position: int) -> Logits:
        """One decode; logits [vocab]."""
        outputs = self._run([token], position, 1, with_logits=True)
        logits: Logits = outputs["logits"][0, 0].numpy()
        return logits

    def cache_rows(self, count: int) -> dict[str, Logits]:
        """Keys and values [kv_heads, count, head_dim] of every layer, `k_0`, `v_0`, `k_1`, ..."""
        return {
            name: (tensor[0] if name.startswith("k_") else tensor[0].transpose(1, 2))[:, :count]
            .clone()
            .numpy()
            for name, tensor in self._cache.items()
        }

    def __enter__(self) -> ExportableRunner:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to release; runners that own a process do."""

    def _run(
        self, ids: Sequence[int], position: int, length: int, *, with_logits: bool
    ) -> dict[str, Tensor]:
        if position + length > self.capacity:
            raise ValueError(f"{length} rows at {position} do not fit {self.capacity} slots")
        width = next(width for width in self._widths if position + length <= width)
        width = min(width, self.capacity)
        tokens, positions, mask = runtime_inputs(ids, position, length, width)
        seen = {name: _first_slots(name, whole, width) for name, whole in self._cache.items()}
        with torch.inference_mode(), _plain_bodies():
            outputs: dict[str, Tensor] = self._modules[with_logits](
                torch.from_numpy(tokens),
                torch.from_numpy(positions),
                torch.from_numpy(mask),
                seen,
                self._weights,
            )
            for name, slots in seen.items():
                written = outputs[f"kv_cache_{name}"]
                if written is not slots:  # a body that copies
                    slots.copy_(written)
        return outputs


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts; a single part stays where it is."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0].contiguous()


def _first_slots(name: str, cache: Tensor, width: int) -> Tensor:
    """The first slots of a cache tensor, in its own memory."""
    return cache.narrow(2 if name.startswith("k_") else 3, 0, width)


def _write_in_place(cache: Tensor, update: Tensor, position: Tensor, axis: int) -> Tensor:
    """`cache_write` into the cache itself, which nobody else reads."""
    last = cache.shape[axis] - update.shape[axis]
    start = min(max(int(position), 0), last)
    cache.narrow(axis, start, update.shape[axis]).copy_(update)
    return cache


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.transpose(2, 3)


@contextmanager
def _plain_bodies() -> Iterator[None]:
    """The two custom operators without the copy and the dispatch that tracing needs.

    A copy of the whole cache at each layer of each step is most of a step's time. What somebody has
    replaced already is left alone.
    """
    module = hermes.exportable
    if (module.cache_write, module.batched_matmul) != (cache_write, batched_matmul):
        yield
        return
    try:
        module.cache_write, module.batched_matmul = _write_in_place, _multiply  # type: ignore[assignment]
        yield
    finally:
        module.cache_write, module.batched_matmul = cache_write, batched_matmul
