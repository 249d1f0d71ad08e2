"""What an export will cost, computed from shapes before any work.

The constants are measurements of the pinned toolchain (docs/export-cost.md); the rest is arithmetic
on the model's shapes, so nothing here needs torch or opens a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.errors import ResourceError
from hermes.parameters import layer_shapes
from hermes.recipe import Recipe
from hermes.signatures import GraphWeight, cache_specs, graph_weights

MB = 10**6
TRACER_BYTES = 365 * MB
"""torch and the converter loaded, and four layers of every signature traced."""
GRAPH_LAYER_BYTES = 0.12 * MB
"""Python objects of one layer of one signature, while a graph is stamped or a header packed."""
BINDER_BYTES = 80 * MB
"""numpy and the flatbuffer schema loaded, one block of rows on its way into the file."""
VOCABULARY_ENTRY_BYTES = 900
"""Of the tokenizer and its table."""
KERNELS_BYTES = 85 * MB
"""LLVM loaded, where weights are rotated, mixed or rounded by inputs."""
THREADS = 2
"""That bind weights; each holds one matrix whose columns are rotated, as float32."""
ROUNDING_BYTES = 35 * MB
"""What each takes beside that where it rounds by inputs: chunks of rows on their way, and what the
inputs lead to."""
HELD_INPUTS = 2
"""Calibration inputs of all matrices that are in memory: of the model before and after its
rewrites."""
HEAD_ROWS = 8192
FLOAT_MODELS = 3
"""Held whole by the ladder: the reference before and after the rewrites, and the exported form."""
VERIFIER_BYTES = 350 * MB
"""torch loaded for the reference."""
PACKED_SHARE = 0.79
"""Of the file's bytes, what LiteRT-LM packs for each subgraph beside the mapped file when it keeps
no cache of packed weights (3.63 GB took 9.4 GB with two of them and 20.6 GB with six)."""
TOLERANCE = 0.25
"""By how much a prediction of memory may be off; what may fit after all is never refused."""
STAMPED_LAYERS = 4

IMPORT_SECONDS = 2.0
TRACE_SECONDS = 4.0
LAYER_SECONDS = 0.006
"""Of one layer of one subgraph, traced or stamped, and packed."""
VALUE_SECONDS = 7e-9
"""To hash, read, rewrite, quantize and write a value."""
WALK_SECONDS = 1e-9
"""More to see it multiplied by the calibration inputs."""
DIRECTION_SECONDS = 0.22e-9
"""More for every direction of the inputs that its rounding looks at."""


@dataclass(frozen=True)
class Cost:
    """Predicted or measured.

    Attributes:
        peak_memory: resident bytes of the processes that work at a time, what they share once.
        seconds: wall time on a quiet machine.
        temporary_bytes: of intermediate files beside the target at the worst moment. A cache on
            another disk holds a copy of the model there.
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
    memory: int | None = None,
) -> Cost:
    """The cost of exporting a mapped model.

    Args:
        config: of the checkpoint; a recipe that folds gains unties the head.
        weights: Hermes parameter name -> tensor, for their stored types.
        recipe: shapes, rewrites and rules.
        kept: the graph of this architecture was made before.
        stamped: the layers are alike, so that four are traced.
        verify: the ladder is climbed.
        memory: bytes that are free; float models that are too big for it are read layer by layer,
            and the rungs that need them whole are left out. None: they are not too big.
    """
    if "fold_norm_gains" in recipe.rewrites:
        config = replace(config, tie_embeddings=False)
    stored = graph_weights(config, recipe.graph)
    values = sum(math.prod(weight.shape) for weight in stored)
    model_bytes = sum(_stored_bytes(weight, recipe) for weight in stored)
    kv_bytes = sum(4 * math.prod(spec.shape) for spec in cache_specs(config, recipe.export.context))
    # A prefill of length 1 shares decode's subgraph.
    graphs = len([length for length in recipe.export.prefill if length > 1]) + 1
    packed = 1 + PACKED_SHARE * graphs
    peaks = [_binding_memory(config, weights, recipe)]
    value_seconds = VALUE_SECONDS
    if recipe.calibration.sequences:
        value_seconds += WALK_SECONDS + DIRECTION_SECONDS * recipe.calibration.directions
    seconds = IMPORT_SECONDS + values * value_seconds
    temporary = 0
    if not kept:
        graph_layers = config.num_layers * graphs
        peaks.append(int(TRACER_BYTES + GRAPH_LAYER_BYTES * graph_layers))
        peaks[0] += int(GRAPH_LAYER_BYTES * graph_layers)
        layers = STAMPED_LAYERS if stamped else config.num_layers
        seconds += TRACE_SECONDS + LAYER_SECONDS * (graph_layers + layers * graphs)
    if verify:
        whole = memory is None or FLOAT_MODELS * 4 * values <= memory
        peaks.append(VERIFIER_BYTES + 4 * (FLOAT_MODELS * values if whole else 3 * _layer(config)))
        peaks.append(int(packed * model_bytes))
        if whole:
            # The interpreter runs one signature of the float form at a time.
            peaks.append(int((1 + PACKED_SHARE) * 4 * values))
        temporary = 4 * values if whole else model_bytes
        seconds += IMPORT_SECONDS * 5 + recipe.limits.positions * 6 * values / 20e9
    return Cost(
        peak_memory=max(peaks),
        seconds=round(seconds, 1),
        temporary_bytes=temporary,
        bundle_bytes=model_bytes,
        kv_bytes=kv_bytes,
        # In an app the runtime keeps its packed weights in a cache folder, once for all signatures.
        phone_memory=int((1 + PACKED_SHARE) * model_bytes) + 2 * kv_bytes,
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


def _layer(config: HermesConfig) -> int:
    """Values of one layer, or of as many rows of the head as are read at a time."""
    layer = sum(math.prod(shape) for shape in layer_shapes(config).values())
    return max(layer, HEAD_ROWS * config.hidden_size)


def _binding_memory(config: HermesConfig, weights: Mapping[str, LazyTensor], recipe: Recipe) -> int:
    """Rotated columns need their whole matrix, and calibration the inputs of every matrix."""
    held = [0]
    if "rotate_residual" in recipe.rewrites:
        for name, tensor in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                held.append(4 * tensor.numel)
    calibrated = any(rule.rounding == "calibrated" for rule in recipe.quantization)
    compiled = calibrated or {"rotate_residual", "mix_down_input"} & set(recipe.rewrites)
    tokens = recipe.calibration.sequences * recipe.calibration.tokens
    row = config.num_layers * (5 * config.hidden_size + config.intermediate_size)
    return int(
        BINDER_BYTES
        + VOCABULARY_ENTRY_BYTES * config.vocab_size
        + sum(sorted(held)[-THREADS:])
        + (KERNELS_BYTES if compiled else 0)
        + (THREADS * ROUNDING_BYTES if calibrated else 0)
        + HELD_INPUTS * 4 * tokens * row
    )
