"""Plain data out of pickled objects whose classes were not loaded."""

from __future__ import annotations

from collections.abc import Mapping

from hermes.checkpoint.tensor_pickle import ForeignObject, PickledTensor

MODEL_FIELDS = frozenset(
    {
        "hidden_size",
        "num_hidden_layers",
        "num_layers",
        "num_attention_heads",
        "num_heads",
        "lm_hidden_dim",
        "lm_n_heads",
        "nn_embed",
        "n_embd",
        "n_embed",
        "dim",
        "n_layer",
        "n_layers",
        "n_head",
        "n_heads",
        "d_model",
        "rope_theta",
    }
)
"""A dict with one of these keys describes a model."""

_MAX_DEPTH = 4


def plain_value(value: object) -> object:
    """Numbers, text, lists and dicts; other objects become dicts of their attributes."""
    return _plain(value, 0, {})


def _plain(value: object, depth: int, done: dict[int, object]) -> object:
    """`done` makes an object that is referred to many times cost once."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if id(value) in done:
        return done[id(value)]
    label = value.class_name if isinstance(value, ForeignObject) else type(value).__name__
    done[id(value)] = f"<{label}>"
    if isinstance(value, ForeignObject):
        value = value.attributes or None
    plain: object = f"<{label}>"
    if depth > _MAX_DEPTH or isinstance(value, PickledTensor):
        return plain
    if isinstance(value, Mapping):
        plain = {str(key): _plain(item, depth + 1, done) for key, item in value.items()}
    elif isinstance(value, (list, tuple, set)):
        plain = [_plain(item, depth + 1, done) for item in value]
    done[id(value)] = plain
    return plain


def module_entries(module: ForeignObject) -> dict[object, object] | None:
    """The state_dict of a pickled torch module, or None for any other object."""
    if not isinstance(module.attributes.get("_modules"), Mapping):
        return None
    entries: dict[object, object] = {}
    pending: list[tuple[str, ForeignObject]] = [("", module)]
    seen: set[int] = set()
    while pending:
        prefix, node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        hidden = node.attributes.get("_non_persistent_buffers_set")
        hidden = hidden if isinstance(hidden, (set, list)) else ()
        for kind in ("_parameters", "_buffers"):
            held = node.attributes.get(kind)
            for name, value in held.items() if isinstance(held, Mapping) else ():
                if isinstance(value, PickledTensor) and name not in hidden:
                    entries[f"{prefix}{name}"] = value
        children = node.attributes.get("_modules")
        for name, child in children.items() if isinstance(children, Mapping) else ():
            if isinstance(child, ForeignObject):
                pending.append((f"{prefix}{name}.", child))
    return entries
