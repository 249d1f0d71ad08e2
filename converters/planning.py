"""`hermes plan`: what a conversion would do and cost, before any work."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converters.graph import graph_folder, graph_key
from converters.source import SourceOptions, open_mapped, recipe_for
from hermes.checkpoint.source import LazyTensor
from hermes.config import HermesConfig
from hermes.layouts import MappedModel
from hermes.plan import STAMPED_LAYERS, Cost, Machine, predict_cost, require_machine
from hermes.recipe import Recipe
from hermes.recipe_file import load_recipe


@dataclass(frozen=True)
class Plan:
    """What would happen.

    Attributes:
        recipe: with the shapes that would be exported.
        cost: predicted.
        graph: `kept`, `stamped` or `traced`.
        fitting: options in words -> the cost with them.
    """

    recipe: Recipe
    cost: Cost
    graph: str
    fitting: Mapping[str, Cost]

    def require(self, folder: Path) -> None:
        """Raise `ResourceError` if the machine cannot do it; the bundle goes into `folder`."""
        require_machine(self.cost, this_machine(folder), self.fitting)


def make_plan(
    config: HermesConfig,
    weights: Mapping[str, LazyTensor],
    recipe: Recipe,
    *,
    verify: bool,
    keep_graph: bool = True,
) -> Plan:
    """Predict, and look for cheaper ways."""
    graph = _graph(config, recipe, keep_graph)
    memory = this_machine(Path()).memory

    def cost(one: Recipe, climbing: bool) -> Cost:
        kept, stamped = graph == "kept", graph == "stamped"
        return predict_cost(
            config,
            weights,
            one,
            kept=kept,
            stamped=stamped,
            verify=climbing,
            memory=memory,
        )

    fitting = {}
    if verify:
        fitting["--no-verify"] = cost(recipe, False)
    if not recipe.quantization:
        smaller = replace(load_recipe("int8"), export=recipe.export)
        fitting["--recipe int8"] = cost(smaller, verify)
        fitting["--recipe int8 --no-verify"] = cost(smaller, False)
    return Plan(recipe, cost(recipe, verify), graph, fitting)


def describe_plan(
    options: SourceOptions,
    recipe_name: str,
    context: int | None,
    prefill: tuple[int, ...],
    *,
    verify: bool,
    folder: Path,
) -> tuple[dict[str, Any], Plan]:
    """Open the checkpoint and say what would be made of it; JSON values, and the plan.

    `folder` is where the bundle would go.
    """
    checkpoint, mapped = open_mapped(options)
    recipe = recipe_for(recipe_name, mapped, context, prefill)
    plan = make_plan(mapped.config, mapped.weights, recipe, verify=verify)
    machine = this_machine(folder)
    facts = {
        "checkpoint": str(checkpoint.path),
        **_describe_mapping(mapped),
        "notes": checkpoint.notes,
        "recipe": recipe.to_dict(),
        "graph": plan.graph,
        "cost": plan.cost.to_dict(),
        "other_ways": {words: cost.to_dict() for words, cost in plan.fitting.items()},
        "machine": {"free_memory": machine.memory, "free_disk": machine.disk},
    }
    return facts, plan


def this_machine(folder: Path) -> Machine:
    """Memory that is free now, and disk in the nearest folder that exists."""
    import psutil

    place = folder.resolve()
    while not place.is_dir():
        place = place.parent
    return Machine(psutil.virtual_memory().available, shutil.disk_usage(place).free)


def _graph(config: HermesConfig, recipe: Recipe, keep: bool) -> str:
    """How the graph would be made; the same reasons as `converters.stamp.refusal`."""
    if "fold_norm_gains" in recipe.rewrites:
        config = replace(config, tie_embeddings=False)
    key = graph_key(config, recipe.export, recipe.graph)
    if keep and (graph_folder() / f"{key}.tflite").is_file():
        return "kept"
    alike = config.num_layers > STAMPED_LAYERS and not config.no_rope_layers
    return "stamped" if alike else "traced"


def _describe_mapping(mapped: MappedModel) -> dict[str, Any]:
    return {
        "layout": {"name": mapped.layout, "evidence": mapped.evidence},
        "config": {
            name: {"value": value, "source": mapped.config_sources.get(name, "")}
            for name, value in mapped.config.to_dict().items()
        },
        "keys": {
            "used": len(mapped.used),
            "ignored": [list(entry) for entry in mapped.ignored],
            "warnings": mapped.warnings,
        },
    }
