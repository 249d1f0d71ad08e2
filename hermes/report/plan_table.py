"""What `hermes plan` found, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes.report.wording import size


def plan_lines(facts: Mapping[str, Any]) -> list[str]:
    """One statement a line: the model, its keys, the export, its cost."""
    layout, keys, recipe = facts["layout"], facts["keys"], facts["recipe"]
    lines = [f"{facts['checkpoint']}: layout {layout['name']}"]
    lines += [f"  because {reason}" for reason in layout["evidence"]]
    lines.append("config")
    for name, entry in facts["config"].items():
        source = f"  ({entry['source']})" if entry["source"] else ""
        lines.append(f"  {name} = {entry['value']}{source}")
    lines.append(f"keys: {keys['used']} used, {len(keys['ignored'])} ignored")
    lines += [f"  ignored {name}: {reason}" for name, reason in keys["ignored"]]
    lines += [f"  warning: {warning}" for warning in keys["warnings"]]
    lines += [f"  note: {note}" for note in facts["notes"]]
    shapes = recipe["export"]
    ladder = ", ".join(str(length) for length in shapes["prefill"])
    lines.append(f"recipe {recipe['name']}: context {shapes['context']}, prefill {ladder}")
    lines.append(f"graph: {_GRAPHS[facts['graph']]}")
    lines += ["predicted cost", *(f"  {line}" for line in _cost(facts["cost"]))]
    machine = facts["machine"]
    free = f"{size(machine['free_memory'])} of memory and {size(machine['free_disk'])} of disk"
    lines.append(f"this machine has {free} free")
    for words, cost in facts["other_ways"].items():
        lines.append(
            f"with {words}: {size(cost['peak_memory'])} of memory, {cost['seconds']:.0f} s, "
            f"{size(cost['bundle_bytes'])}"
        )
    return lines


_GRAPHS = {
    "kept": "kept from an earlier export of this architecture",
    "stamped": "four layers are traced and repeated",
    "traced": "all layers are traced",
}


def _cost(cost: Mapping[str, Any]) -> list[str]:
    return [
        f"peak memory {size(cost['peak_memory'])}",
        f"wall time about {cost['seconds']:.0f} s",
        f"temporary files {size(cost['temporary_bytes'])}",
        f"bundle {size(cost['bundle_bytes'])} and the tokenizer",
        f"KV cache {size(cost['kv_bytes'])} for the whole context",
        f"memory on the phone about {size(cost['phone_memory'])}",
    ]
