"""LoRA matrices merged into the weights they change: W + scale x B A (Hu et al. 2021)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hermes.checkpoint.source import Checkpoint, LazyTensor
from hermes.errors import BadInputError, UnsupportedModelError
from hermes.layouts.finite import checked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ADAPTER_WORDS = frozenset({"lora_alpha", "use_rslora", "alpha_pattern", "r"})
"""Fields of --config that belong to an adapter and not to the model."""

_NAME = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B)"
    r"(\.(?P<adapter>(?!weight$)[^.]+))?(\.weight)?"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.[^.]+\.(?P<kind>weight|bias)")
_DORA = re.compile(r".+\.lora_magnitude_vector(\..+)?")
_BASE_CHANGED = ("pissa", "olora", "corda", "loftq")


@dataclass
class _Pair:
    a: LazyTensor | None = None
    b: LazyTensor | None = None
    embedding: bool = False


@dataclass
class Merged:
    """A checkpoint without adapter tensors, and what was done.

    Attributes:
        checkpoint: with merged weights under the base's names.
        parts: name of a merged tensor -> names of the adapter tensors in it.
        notes: statements for the report.
    """

    checkpoint: Checkpoint
    parts: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def merge_adapters(checkpoint: Checkpoint, override: Mapping[str, object]) -> Merged:
    """Merge what is unmerged; a checkpoint without adapter tensors comes back unchanged.

    Raises:
        BadInputError: no base weight, no alpha, several adapters, shapes that do not fit.
        UnsupportedModelError: another kind of adapter.
    """
    names = list(checkpoint.tensors)
    if not any(_NAME.fullmatch(name) or _SAVED.fullmatch(name) for name in names):
        if checkpoint.adapter is not None and "lora_alpha" in checkpoint.adapter:
            raise BadInputError(
                f"{checkpoint.path}: an adapter configuration, but no lora_A and lora_B tensors",
                todo="bring the adapter's weights, or remove its configuration",
            )
        return Merged(checkpoint)
    settings = dict(checkpoint.adapter or {}) | dict(override)
    _check_kind(checkpoint, settings)
    tensors, pairs, ignored = _sorted_out(checkpoint)
    merged = Merged(replace(checkpoint, tensors=tensors, ignored=ignored, adapter=None))
    problems: list[str] = []
    for module, pair in pairs.items():
        try:
            _merge(merged, module, pair, settings)
        except BadInputError as error:
            problems.append(error.found)
    if problems:
        raise BadInputError(
            f"{checkpoint.path}: an adapter that cannot be merged",
            problems=problems[:20],
            expected="lora_A and lora_B, the base weights they belong to, and lora_alpha",
            todo="bring base and adapter together; give lora_alpha with --config if no "
            "adapter_config.json is at hand",
        )
    merged.notes.append(f"adapter merged into {len(pairs)} weights, in float32")
    return merged


def _check_kind(checkpoint: Checkpoint, settings: Mapping[str, object]) -> None:
    wrong: list[str] = []
    if str(settings.get("peft_type", "LORA")).rpartition(".")[2] != "LORA":
        wrong.append(f"peft_type {settings['peft_type']}")
    for name in ("use_dora", "fan_in_fan_out", "lora_bias", "layer_replication"):
        if settings.get(name):
            wrong.append(f"{name} {settings[name]}")
    if settings.get("bias", "none") != "none":
        wrong.append(f"bias {settings['bias']!r}")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGED):
        wrong.append(f"init_lora_weights {start!r}, which changes the base weights")
    wrong += [name for name in checkpoint.tensors if _DORA.fullmatch(name)][:3]
    if wrong:
        raise UnsupportedModelError(
            f"{checkpoint.path}: an adapter that is not plain LoRA",
            problems=wrong,
            todo="merge it where it was trained (merge_and_unload) and save the result",
        )


def _sorted_out(
    checkpoint: Checkpoint,
) -> tuple[dict[str, LazyTensor], dict[str, _Pair], list[tuple[str, str]]]:
    """Base tensors by bare name, matrix pairs by module, and what was replaced."""
    tensors: dict[str, LazyTensor] = {}
    pairs: dict[str, _Pair] = {}
    adapters: set[str] = set()
    saved: dict[str, LazyTensor] = {}
    ignored = list(checkpoint.ignored)
    for name, tensor in checkpoint.tensors.items():
        found, kept = _NAME.fullmatch(name), _SAVED.fullmatch(name)
        if found:
            adapters.add(found["adapter"] or "")
            pair = pairs.setdefault(found["module"], _Pair())
            pair.embedding = "embedding" in found["kind"]
            setattr(pair, found["kind"][-1].lower(), tensor)
        elif kept:
            saved[f"{kept['module']}.{kept['kind']}"] = tensor
        else:
            bare = name.replace(".base_layer.", ".").replace(".original_module.", ".")
            tensors[bare] = tensor
    if len(adapters) > 1:
        raise BadInputError(
            f"{checkpoint.path}: several adapters: {', '.join(sorted(adapters))}",
            expected="one",
            todo="save the one to export alone",
        )
    for name, tensor in saved.items():
        if name in tensors:
            ignored.append((tensors[name].name, "replaced by the adapter's own"))
        tensors[name] = tensor
    return tensors, pairs, ignored


def _merge(merged: Merged, module: str, pair: _Pair, settings: Mapping[str, object]) -> None:
    name, tensors = f"{module}.weight", merged.checkpoint.tensors
    base, a, b = tensors.get(name), pair.a, pair.b
    if base is None:
        raise BadInputError(f"{module}: adapter matrices without the base weight")
    if a is None or b is None:
        raise BadInputError(f"{module}: only one of lora_A and lora_B")
    rows, columns = (b.shape[:1], a.shape[1:]) if not pair.embedding else (a.shape[1:], b.shape[:1])
    if base.shape != (*rows, *columns) or a.shape[:1] != b.shape[1:]:
        raise BadInputError(
            f"{module}: A {list(a.shape)} and B {list(b.shape)} do not fit {list(base.shape)}"
        )
    if _shares_a_tied_table(module, tensors):
        raise BadInputError(
            f"{module}: an adapter on a table that embedding and head share means either of two "
            "models; merge it where it was trained"
        )
    scale = _scale(module, a.shape[0], settings)
    tensors[name] = _sum(base, checked(a), checked(b), scale, pair.embedding)
    merged.parts[base.name] = [a.name, b.name]


def _shares_a_tied_table(module: str, tensors: Mapping[str, LazyTensor]) -> bool:
    last = module.rpartition(".")[2]
    heads = [name for name in tensors if name.rpartition(".")[0].endswith(("lm_head", "head"))]
    return last in ("embed_tokens", "token_embedding", "embedding") and not heads


def _scale(module: str, rank: int, settings: Mapping[str, object]) -> float:
    alpha = settings.get("lora_alpha")
    patterns = settings.get("alpha_pattern")
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise BadInputError(
            f"{module}: lora_alpha is {alpha!r}, the scale of the merge is not known"
        )
    said = settings.get("r")
    if said is not None and said != rank and not settings.get("rank_pattern"):
        raise BadInputError(f"{module}: rank {rank} of its matrices, r is {said!r} in the config")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _sum(
    base: LazyTensor, a: LazyTensor, b: LazyTensor, scale: float, embedding: bool
) -> LazyTensor:
    def read(start: int, stop: int) -> NDArray[np.float32]:
        rows = base.floats(start, stop)
        if embedding:
            return rows + scale * (a.floats()[:, start:stop].T @ b.floats().T)
        return rows + scale * (b.floats(start, stop) @ a.floats())

    return base.derived(read, dtype="float32")
