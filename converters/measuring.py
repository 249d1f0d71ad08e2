"""Everything `hermes bench` says, as JSON values: runs, ratios, bytes per token, the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from converters.bundle import read_bundle
from converters.traffic import decode_traffic
from hermes.runners.benchmark import Speed
from hermes.runners.benchmark_bandwidth import read_bandwidth
from hermes.runners.benchmark_calls import CallPlan, ModelPlace, time_calls
from hermes.runners.benchmark_paired import (
    METRICS,
    BenchmarkPlan,
    BundleRuns,
    measure_paired,
    paired_ratio,
)
from hermes.runners.benchmark_profile import profile_signature
from hermes.signatures import DECODE


def bench_facts(
    paths: Sequence[Path],
    plan: BenchmarkPlan,
    *,
    profile: bool = False,
    on_run: Callable[[Path, Speed], None] = lambda path, speed: None,
) -> dict[str, Any]:
    """Measure bundles in turns; of two also the ratios, first divided by second.

    Raises:
        BadInputError: no such file, or no bundle.
        NativeToolError: the runtime died, hung or refused a bundle.
    """
    traffic = [decode_traffic(path) for path in paths]
    runs = measure_paired(paths, plan, on_run)
    bandwidth = read_bandwidth(plan.threads)
    bundles: list[dict[str, Any]] = []
    for one, read in zip(runs, traffic, strict=True):
        read_bytes = read.mean(plan.prompt, plan.generate)
        bound = bandwidth / read_bytes if read_bytes else 0.0
        entry: dict[str, Any] = {metric: asdict(one.spread(metric)) for metric in METRICS}
        entry |= {
            "path": str(one.path),
            "bytes": one.path.stat().st_size,
            "weight_bytes": read.weights,
            "cache_bytes": read_bytes - read.weights,
            "whole_cache_bytes": read.cache,
            "operators": read.operators,
            "bound": bound,
            "share_of_bound": one.spread("decode").median / bound if bound else 0.0,
        }
        if profile:
            entry["profile"] = bundle_profile(one.path, DECODE, plan.threads)
        bundles.append(entry)
    facts: dict[str, Any] = {"plan": asdict(plan), "bandwidth": bandwidth, "bundles": bundles}
    if len(runs) == 2:
        facts["ratios"] = ratios(runs[0], runs[1])
    return facts


def ratios(one: BundleRuns, other: BundleRuns) -> dict[str, Any]:
    """Per metric, the spread of the turns' ratios."""
    return {metric: asdict(paired_ratio(one, other, metric)) for metric in METRICS}


def call_facts(paths: Sequence[Path], plan: CallPlan) -> dict[str, Any]:
    """Time calls of one signature of bundles in turns.

    Raises:
        BadInputError: no such file, or no bundle.
        NativeToolError: the library died, hung or refused a bundle.
    """
    places = [_place(path) for path in paths]
    rows = [[asdict(times) for times in row] for row in time_calls(places, plan)]
    return {"plan": asdict(plan), "bundles": [str(path) for path in paths], "calls": rows}


def _place(path: Path) -> ModelPlace:
    section = read_bundle(path).section("TFLiteModel")
    return ModelPlace(path, section.offset, section.size)


def bundle_profile(path: Path, signature: str, threads: int) -> dict[str, Any]:
    """Where one call of a signature spends its time."""
    return asdict(profile_signature(*_place(path), signature, threads))
