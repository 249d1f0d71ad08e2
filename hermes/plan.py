"""What an export will cost, computed from shapes before any work.

The constants are measurements of the pinned toolchain (docs/export-cost.md); the rest is arithmetic
on the model's shapes, so nothing here needs torch or opens a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from hermes.checkpoint.source import ITEM_SIZES, LazyTensor
from hermes.config import HermesConfig
from hermes.errors import ResourceError
from hermes.recipe import Recipe
from hermes.signatures import GraphWeight, cache_specs, graph_weights

MB = 10**6
TRACER_BYTES = 720 * MB
"""torch, litert-torch and jax loaded, and four layers of three signatures traced."""
TRACED_LAYER_BYTES = 3.3 * MB
"""Of each further layer in each traced signature, where layers are not stamped."""
BINDER_BYTES = 300 * MB
"""torch and the flatbuffer schema loaded, one block of rows on its way into the file."""
HEADER_LAYER_BYTES = 0.3 * MB
"""Python objects of one layer of one signature while the header is packed."""
READER_FACTOR = 2.5
"""Resident memory of LiteRT-LM over the bytes of its file: it keeps the mapped file and a packed
copy (1.51 GB of weights took 3.6 GB, 3.63 GB took 9.4 GB)."""
TOLERANCE = 0.25
"""By how much a prediction of memory may be off; what may fit after all is never refused."""
STAMPED_LAYERS = 4

IMPORT_SECONDS = 4.0
SIGNATURE_SECONDS = 3.5
HEADER_SECONDS = 0.01
VALUES_PER_SECOND = {False: 110e6, True: 45e6}
"""Values read, rewritten, quantized and written per second; True where they are rotated."""


@dataclass(frozen=True)
class Cost:
    """Predicted or measured.

    Attributes:
        peak_memory: largest resident size of the command's processes, bytes.
        seconds: wall time on a quiet machine.
        temporary_bytes: of intermediate files beside the target at the worst moment.
        bundle_bytes: of the finished file, without its tokenizer.
        kv_bytes: of the cache for the whole context.
        phone_memory: resident bytes of the runtime with the whole context.
    """

    peak_memory: int
    seconds: float
    temporary_bytes: int
    bundle_bytes: int
    kv_bytes: int
    phone_memory: int

    def to_dict(self) -> dict[str, float]:
        """Plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Machine:
    """What the command may use: free memory and free disk where the bundle goes, bytes."""

    memory: int
    disk: int


def predict_cost(
    config: HermesConfig,
    weights: Mapping[str, LazyTensor],
    recipe: Recipe,
    *,
    kept: bool,
    stamped: bool,
    verify: bool,
) -> Cost:
    """The cost of exporting a mapped model.

    Args:
        config: of the checkpoint; a recipe that folds gains unties the head.
        weights: Hermes parameter name -> tensor, for their stored types.
        recipe: shapes, rewrites and rules.
        kept: the graph of this architecture was made before.
        stamped: the layers are alike, so that four are traced.
        verify: the ladder is climbed.
    """
    if "fold_norm_gains" in recipe.rewrites:
        config = replace(config, tie_embeddings=False)
    stored = graph_weights(config, recipe.graph)
    values = sum(math.prod(weight.shape) for weight in stored)
    model_bytes = sum(_stored_bytes(weight, recipe) for weight in stored)
    kv_bytes = sum(4 * math.prod(spec.shape) for spec in cache_specs(config, recipe.export.context))
    signatures = len(recipe.export.prefill) + 1
    memory = [_binding_memory(config, weights, recipe, signatures)]
    seconds = IMPORT_SECONDS + HEADER_SECONDS * config.num_layers * signatures
    seconds += values / VALUES_PER_SECOND["rotate_residual" in recipe.rewrites]
    temporary = model_bytes
    if not kept:
        layers = STAMPED_LAYERS if stamped else config.num_layers
        traced = min(signatures, 3)
        more = max(0, layers - STAMPED_LAYERS) * traced * TRACED_LAYER_BYTES
        memory.append(int(TRACER_BYTES + more))
        seconds += IMPORT_SECONDS + SIGNATURE_SECONDS * traced * layers / STAMPED_LAYERS
    if verify:
        # The reference before and after the rewrites, and the tensors one of them is filled from.
        memory.append(BINDER_BYTES + 3 * 4 * values)
        memory.append(int(4 * values * READER_FACTOR))
        temporary = model_bytes + 4 * values
        seconds += IMPORT_SECONDS * 5 + recipe.limits.positions * 6 * values / 20e9
    return Cost(
        peak_memory=max(memory),
        seconds=round(seconds, 1),
        temporary_bytes=temporary,
        bundle_bytes=model_bytes,
        kv_bytes=kv_bytes,
        phone_memory=int(READER_FACTOR * model_bytes) + 2 * kv_bytes,
    )


def require_machine(cost: Cost, machine: Machine, fitting: Mapping[str, Cost]) -> None:
    """Refuse what cannot end well.

    Args:
        cost: of what is asked for.
        machine: what is free.
        fitting: options in words -> what the export would cost with them.

    Raises:
        ResourceError: too little memory or disk; names the options that would fit.
    """
    problems = _shortages(cost, machine)
    if not problems:
        return
    ways = [words for words, other in fitting.items() if not _shortages(other, machine)]
    raise ResourceError(
        "this export does not fit this machine",
        problems=problems,
        todo=" or ".join(f"use {way}" for way in ways) if ways else "use a larger machine",
    )


def _shortages(cost: Cost, machine: Machine) -> list[str]:
    found = []
    if cost.peak_memory > machine.memory * (1 + TOLERANCE):
        found.append(
            f"it needs about {cost.peak_memory / 1e9:.2f} GB of memory, "
            f"{machine.memory / 1e9:.2f} GB are free"
        )
    disk = cost.temporary_bytes + cost.bundle_bytes
    if disk > machine.disk:
        found.append(
            f"it needs {disk / 1e9:.2f} GB of disk ({cost.temporary_bytes / 1e9:.2f} GB of them "
            f"for a while), {machine.disk / 1e9:.2f} GB are free"
        )
    return found


def _stored_bytes(weight: GraphWeight, recipe: Recipe) -> int:
    count = math.prod(weight.shape)
    if weight.kind != "matrix":
        return 4 * count
    rule, (rows, columns) = recipe.rule_for(weight.parts[0]), weight.shape
    # Scales by row have an int64 zero point beside them.
    zero_points = 8 * rows if rule.integer and not rule.block else 0
    return rule.value_bytes(count) + rule.scale_bytes(rows, columns) + zero_points


def _binding_memory(
    config: HermesConfig, weights: Mapping[str, LazyTensor], recipe: Recipe, signatures: int
) -> int:
    """Rotated columns need their whole matrix: as stored, and as float32."""
    held = 0
    if "rotate_residual" in recipe.rewrites:
        for name, tensor in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                held = max(held, tensor.numel * (ITEM_SIZES.get(tensor.dtype, 4) + 4))
    return int(BINDER_BYTES + held + HEADER_LAYER_BYTES * config.num_layers * signatures)
