"""The weightless graph of a model: kept from an earlier export, stamped, or traced in full.

It depends on the architecture, the shapes, the graph options and the code that makes it, and on no
weight; so it is kept under the user's cache folder by the hash of all these.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from converters.kept import fetch
from converters.kept import keep as write_kept
from hermes.config import HermesConfig
from hermes.recipe import ExportShapes, GraphOptions
from hermes.runners.child import measure_in_child

TRACE_TIMEOUT = 3600.0
_PACKAGES = ("torch", "litert-torch", "litert-converter", "ai-edge-litert")
_SOURCES = (
    "hermes/exportable.py",
    "hermes/hadamard.py",
    "hermes/parameters.py",
    "hermes/rotary.py",
    "hermes/signatures.py",
    "converters/branches.py",
    "converters/direct.py",
    "converters/flatbuffer.py",
    "converters/flatbuffer_read.py",
    "converters/flatbuffer_edit.py",
    "converters/graph.py",
    "converters/layer_block.py",
    "converters/lengths.py",
    "converters/lowerings.py",
    "converters/packing.py",
    "converters/skeleton.py",
    "converters/stablehlo.py",
    "converters/stablehlo_rules.py",
    "converters/stamp.py",
)
_NOT_IN_THE_GRAPH = ("max_seq_len", "pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class Graph:
    """A weightless graph and how it came about.

    Attributes:
        path: the .tflite file.
        made: `kept`, `stamped` or `traced`.
        reason: why it was not stamped, if it was traced in full.
        tracer: why torch.export traced it, if it did; see `converters.direct`.
        lengths: why torch.export traced every prefill length, if it derived none from others.
        seconds: spent on it.
        peak_memory: of the tracing process, bytes; 0 for a kept graph.
    """

    path: Path
    made: str
    reason: str = ""
    tracer: str = ""
    lengths: str = ""
    seconds: float = 0.0
    peak_memory: int = 0


def obtain_graph(
    config: HermesConfig,
    shapes: ExportShapes,
    options: GraphOptions,
    folder: Path,
    *,
    keep: bool = True,
    on_line: Callable[[str], None] | None = None,
) -> Graph:
    """Place the graph of this architecture in `folder`.

    Args:
        config: the model.
        shapes: context and prefill lengths.
        options: graph choices.
        folder: where the file goes.
        keep: use and fill the cache of kept graphs.
        on_line: called with what the tracer prints.

    Raises:
        NativeToolError: the tracer died, hung or raised.
    """
    target = folder / "graph.tflite"
    kept = graph_folder() / f"{graph_key(config, shapes, options)}.tflite"
    data = fetch(kept) if keep else None
    if data is not None:
        target.write_bytes(data)
        return Graph(target, "kept")
    run = measure_in_child(
        "converters.graph:make_graph",
        config,
        shapes,
        options,
        target,
        tool="litert-torch converter",
        timeout=TRACE_TIMEOUT,
        on_line=on_line,
    )
    if keep:
        write_kept(kept, target.read_bytes())
    reasons: Reasons = run.value
    made = "traced" if reasons.full else "stamped"
    return Graph(
        target,
        made,
        reasons.full,
        reasons.tracer,
        reasons.lengths,
        run.seconds,
        run.peak_memory,
    )


class Reasons(NamedTuple):
    """Why a slower way was taken, or ''.

    Attributes:
        full: all layers were traced.
        tracer: torch.export traced them.
        lengths: it traced every prefill length.
    """

    full: str = ""
    tracer: str = ""
    lengths: str = ""


def make_graph(
    config: HermesConfig, shapes: ExportShapes, options: GraphOptions, target: Path
) -> Reasons:
    """Write the graph, the quick way where it is proven."""
    from converters.branches import branch_attention
    from converters.lengths import share_decode

    longer = replace(shapes, prefill=tuple(n for n in shapes.prefill if n > 1))
    reasons = _repeated_or_traced(config, longer, options, target)
    if longer != shapes:
        share_decode(target)
    branch_attention(target, shapes, options)
    return reasons


def _repeated_or_traced(
    config: HermesConfig, shapes: ExportShapes, options: GraphOptions, target: Path
) -> Reasons:
    from converters.stamp import TRACED_LAYERS, StampRefusedError, refusal, stamp_layers

    reason = refusal(config)
    if reason is None:
        few = replace(config, num_layers=TRACED_LAYERS)
        short = target.with_name("layers.tflite")
        traced = _trace(few, shapes, options, short)
        try:
            with _without_collection():
                stamp_layers(short, few, config, shapes, options, target)
            return traced
        except StampRefusedError as error:
            reason = str(error)
        finally:
            short.unlink(missing_ok=True)
    return _trace(config, shapes, options, target)._replace(full=reason)


def _trace(
    config: HermesConfig, shapes: ExportShapes, options: GraphOptions, target: Path
) -> Reasons:
    from converters.direct import record_skeleton
    from converters.stablehlo import NoRuleError

    try:
        record_skeleton(config, shapes, options, target)
        return Reasons()
    except NoRuleError as error:
        return Reasons(tracer=str(error), lengths=_export(config, shapes, options, target))


def _export(config: HermesConfig, shapes: ExportShapes, options: GraphOptions, target: Path) -> str:
    """torch.export of as few lengths as prove the others; says why all were traced, or ''."""
    from converters.lengths import LengthsRefusedError, derive_lengths, shapes_to_trace
    from converters.skeleton import trace_skeleton

    traced = target.with_name("lengths.tflite")
    with _without_collection():
        trace_skeleton(config, shapes_to_trace(shapes), options, traced)
    try:
        derive_lengths(traced, config, shapes, target)
    except LengthsRefusedError as error:
        trace_skeleton(config, shapes, options, target)
        return str(error)
    finally:
        traced.unlink(missing_ok=True)
    return ""


@contextmanager
def _without_collection() -> Iterator[None]:
    """A trace keeps nearly every object it makes to its end: looking for garbage costs a tenth."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def graph_key(config: HermesConfig, shapes: ExportShapes, options: GraphOptions) -> str:
    """Hash of everything that decides the graph's bytes."""
    architecture = {k: v for k, v in config.to_dict().items() if k not in _NOT_IN_THE_GRAPH}
    root = Path(__file__).resolve().parent.parent
    facts = {
        "architecture": architecture,
        "shapes": asdict(shapes),
        "options": asdict(options),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "sources": [hashlib.sha256((root / name).read_bytes()).hexdigest() for name in _SOURCES],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def graph_folder() -> Path:
    """Where graphs are kept: `$XDG_CACHE_HOME/hermes/graphs` or `~/.cache/hermes/graphs`."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "hermes" / "graphs"
