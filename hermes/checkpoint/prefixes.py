"""Names that training wrappers put around or into parameter names."""

from __future__ import annotations

from collections.abc import Mapping

from hermes.checkpoint.source import LazyTensor, same_values
from hermes.errors import BadInputError

_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DataParallel or DistributedDataParallel",
    "_forward_module": "Lightning Fabric",
    "_fsdp_wrapped_module": "FSDP",
    "_fpw_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}


def strip_wrappers(
    tensors: Mapping[str, LazyTensor],
) -> tuple[dict[str, LazyTensor], list[tuple[str, str]], list[str]]:
    """Remove wrapper components anywhere in the names.

    Returns:
        the tensors by bare name, (key, reason) of equal duplicates left out, and notes.

    Raises:
        BadInputError: two different tensors end up with the same name; all such pairs are named.
    """
    kept: dict[str, LazyTensor] = {}
    ignored: list[tuple[str, str]] = []
    removed: dict[str, int] = {}
    collisions: list[str] = []
    for key, tensor in tensors.items():
        name, wrappers = bare_name(key)
        for wrapper in wrappers:
            removed[wrapper] = removed.get(wrapper, 0) + 1
        if name not in kept:
            kept[name] = tensor
        elif same_values(kept[name], tensor):
            ignored.append((key, f"equal to {kept[name].name}"))
        else:
            collisions.append(f"{kept[name].name} and {key} are both {name} and differ")
    if collisions:
        raise BadInputError(
            "wrapped and unwrapped weights are mixed in one file",
            problems=collisions,
            expected="every parameter once",
            todo="save the state_dict of one model only, unwrapped",
        )
    notes = [f"wrapper '{name}.' removed from {count} names" for name, count in removed.items()]
    return kept, ignored, notes


def bare_name(key: str) -> tuple[str, list[str]]:
    """The name without wrapper components, and the components removed."""
    parts, kept, removed = key.split("."), list[str](), list[str]()
    index = 0
    while index < len(parts):
        # PEFT nests the model two attributes deep; the model's own root may follow.
        if parts[index : index + 2] == ["base_model", "model"] and index + 2 < len(parts):
            removed.append("base_model.model")
            index += 2
        elif parts[index] in _WRAPPERS and index + 1 < len(parts):
            removed.append(parts[index])
            index += 1
        else:
            kept.append(parts[index])
            index += 1
    return ".".join(kept), removed
