"""The float forms of a model that a ladder compares with: whole, or layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.parameters import parameter_shapes
from hermes.rewrite import RewritableModel
from hermes.rewrite.twin import follow_graph
from hermes.runners.interface import Scorer
from hermes.runners.layerwise import LayerwiseScorer
from hermes.runners.reference import ReferenceRunner

if TYPE_CHECKING:
    from hermes.model import HermesForCausalLM

_BLOCK_VALUES = 1 << 17
_READERS = 2


@dataclass(frozen=True)
class FloatModels:
    """The oracle and its rewritten twin.

    Attributes:
        reference: the oracle.
        rewritten: with rewritten weights; None if nothing was rewritten.
        module: the model that is exported, whole in memory; None if it is too big for that.
        reason: why it is too big, empty if it is not.
    """

    reference: Scorer
    rewritten: Scorer | None
    module: HermesForCausalLM | None
    reason: str = ""


def open_float_models(
    original: RewritableModel,
    rewritten: RewritableModel,
    prefill_lengths: tuple[int, ...],
    memory: int | None = None,
) -> FloatModels:
    """Hold the float models in memory if they fit, else read them layer by layer.

    Args:
        original: the model as mapped.
        rewritten: after the recipe's rewrites, which may be none.
        prefill_lengths: of the exported form.
        memory: bytes that may be used; what is free if None.
    """
    free = available_memory() if memory is None else memory
    reason = too_big_for_float(rewritten.config, free)
    if reason:
        oracle = LayerwiseScorer(original.config, original.weights)
        twin = None
        if rewritten.done:
            twin = LayerwiseScorer(
                rewritten.config,
                rewritten.weights,
                lambda layer: follow_graph(layer, rewritten),
            )
        return FloatModels(oracle, twin, None, reason)
    model = reference_model(original.config, original.weights)
    reference = ReferenceRunner(model, prefill_lengths)
    if not rewritten.done:
        return FloatModels(reference, None, model)
    for recorded in list(rewritten.inputs.values())[:1]:
        recorded()  # one pass records everything, and two readers would make two
    built = reference_model(rewritten.config, rewritten.weights)
    for layer in built.layers:
        follow_graph(layer, rewritten)
    return FloatModels(reference, ReferenceRunner(built, prefill_lengths), built)


def available_memory() -> int:
    """Bytes that can be used without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def too_big_for_float(config: HermesConfig, available: int) -> str:
    """Why the rungs that hold a whole float model cannot run; empty if they can.

    The reference, its rewritten twin and the exportable module's fused copy are in memory together.
    """
    count = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    needed = 3 * 4 * count
    if needed <= available:
        return ""
    return (
        f"{count / 1e9:.2f} billion parameters need {needed / 1e9:.1f} GB in float32, "
        f"{available / 1e9:.1f} GB are free"
    )


def reference_model(config: HermesConfig, weights: Mapping[str, LazyTensor]) -> HermesForCausalLM:
    """The reference with these weights in float32, loaded strictly."""
    import torch

    from hermes.parameters import EMBEDDING, HEAD

    with ThreadPoolExecutor(_READERS) as pool:
        values = pool.map(read_whole, weights.values())
        state = {name: torch.from_numpy(rows) for name, rows in zip(weights, values, strict=True)}
    if config.tie_embeddings:
        state[HEAD] = state[EMBEDDING]
    model = _without_weights(config)
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def _without_weights(config: HermesConfig) -> HermesForCausalLM:
    """The reference with its rotary tables, which are computed and not loaded, and no other data.

    On the meta device `arange` and random numbers import PyTorch's compiler, which takes seconds.
    So nothing is drawn, and positions are counted where they are used.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    from hermes.model import build_model

    class NothingDrawn(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., Any],
            types: object,
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            if getattr(func, "__module__", None) == torch.nn.init.__name__:
                return None
            here = {"device": "cpu"} if func is torch.arange else {}
            return func(*args, **here, **(kwargs or {}))

    with torch.device("meta"), NothingDrawn():
        return build_model(config)


def read_whole(tensor: LazyTensor) -> NDArray[np.float32]:
    """All rows as float32, fetched in blocks: rewrites are fastest where a block fits the cache.

    What `held_in_memory` keeps is not copied.
    """
    if isinstance(tensor.reader, _Held):
        return tensor.reader.whole
    whole = np.empty(tensor.shape, dtype=np.float32)
    step = max(1, _BLOCK_VALUES * tensor.rows // max(1, tensor.numel))
    for start in range(0, tensor.rows, step):
        stop = min(start + step, tensor.rows)
        whole[start:stop] = tensor.floats(start, stop)
    return whole


def held_in_memory(weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The same tensors, each kept as float32 once it has been read.

    The reference, the calibration and the rewrites all read them, and unpacking costs the most.
    """
    return {
        name: tensor.derived(_Held(tensor), dtype="float32") for name, tensor in weights.items()
    }


class _Held:
    """The reader of a tensor that is read once, whole."""

    def __init__(self, tensor: LazyTensor) -> None:
        self._tensor = tensor
        self._one_reader = Lock()
        self._values: NDArray[np.float32] | None = None

    @property
    def whole(self) -> NDArray[np.float32]:
        """All rows."""
        with self._one_reader:
            if self._values is None:
                self._values = read_whole(self._tensor)
            return self._values

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        return self.whole[start:stop]
