"""Rotary fields of foreign configurations, in the spellings of transformers 4 and 5 and of Meta."""

from __future__ import annotations

from collections.abc import Mapping

from hermes.config import RopeScaling
from hermes.layouts.config_facts import Facts

_SCALING_WORDS = {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
}


def read_rotary(config: Mapping[str, object], origin: str, facts: Facts) -> None:
    """Collect rope_theta, rope_scaling, pairing and no_rope_layers."""
    for word in ("rope_scaling", "rope_parameters"):
        value = config.get(word)
        if isinstance(value, Mapping) and value:
            _read_parameters(value, f"{origin}: {word}", word, config, facts)
        elif value not in (None, {}):
            facts.problem(word, f"{origin}: {word} is {value!r}, expected an object or null")
        elif word in config and word == "rope_scaling":
            facts.set("rope_scaling", None, f"{origin}: {word}", quiet=True)
    if config.get("use_scaled_rope") and "rope_scaling" not in facts.values:
        facts.problem(
            "use_scaled_rope",
            f"{origin}: use_scaled_rope is set, its four numbers are in Meta's code: give "
            "rope_scaling with --config (rope_type llama3; factor 8 for Llama 3.1, 32 for 3.2; "
            "low_freq_factor 1, high_freq_factor 4, original_max_position_embeddings 8192)",
        )
    _read_pairing(config, origin, facts)
    _read_unrotated(config, origin, facts)


def _read_parameters(
    value: Mapping[str, object],
    origin: str,
    word: str,
    config: Mapping[str, object],
    facts: Facts,
) -> None:
    if "kind" in value:  # Hermes' own spelling
        try:
            facts.set("rope_scaling", RopeScaling(**value), origin)  # type: ignore[arg-type]
        except TypeError:
            facts.problem(word, f"{origin}: unknown or missing fields in {dict(value)}")
        return
    if all(isinstance(item, Mapping) for item in value.values()):
        flat = _one_for_all_layers(value, config)
        if flat is None:
            facts.refuse(
                word, f"{origin}: different rotary parameters per layer type {sorted(value)}"
            )
            return
        value = flat
    if "rope_theta" in value:
        facts.set("rope_theta", value["rope_theta"], f"{origin}.rope_theta")
    if value.get("partial_rotary_factor", 1) not in (1, None):
        facts.refuse(
            word,
            f"{origin}: partial_rotary_factor {value['partial_rotary_factor']} (a part of "
            "every head rotates)",
        )
    kind = value.get("rope_type", value.get("type", "default"))
    if kind in ("default", None):
        facts.set("rope_scaling", None, f"{origin}.rope_type")
    elif kind in ("linear", "llama3"):
        _read_scaling(value, str(kind), origin, word, facts)
    else:
        facts.refuse(word, f"{origin}: rope_type {kind!r} is not implemented")


def _one_for_all_layers(
    nested: Mapping[str, object], config: Mapping[str, object]
) -> Mapping[str, object] | None:
    """The parameters that every layer uses, or None if layers differ."""
    used = config.get("layer_types")
    kinds = set(used) if isinstance(used, list) else set(nested)
    chosen = [value for kind, value in nested.items() if kind in kinds]
    if len(chosen) < len(kinds) or any(value != chosen[0] for value in chosen):
        return None
    first = chosen[0]
    return first if isinstance(first, Mapping) else None


def _read_scaling(
    value: Mapping[str, object], kind: str, origin: str, word: str, facts: Facts
) -> None:
    unknown = sorted(set(value) - _SCALING_WORDS)
    if unknown:
        facts.refuse(word, f"{origin}: {', '.join(unknown)} with rope_type {kind}")
        return
    names = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_seq_len",
    }
    needed = tuple(names) if kind == "llama3" else ("factor",)
    missing = [name for name in needed if name not in value]
    if missing:
        facts.problem(word, f"{origin}: rope_type {kind} without {', '.join(missing)}")
        return
    numbers = {names[name]: value[name] for name in needed}
    scaling = RopeScaling(kind, **numbers)  # type: ignore[arg-type]
    facts.problems += [(word, f"{origin}: {problem}") for problem in scaling.problems()]
    facts.set("rope_scaling", scaling, origin)


def _read_pairing(config: Mapping[str, object], origin: str, facts: Facts) -> None:
    if "rope_pairing" in config:
        pairing = config["rope_pairing"]
        if pairing not in ("halves", "interleaved"):
            facts.problem(
                "rope_pairing",
                f"{origin}: rope_pairing is {pairing!r}, expected 'halves' or 'interleaved'",
            )
        else:
            facts.set("rope_pairing", pairing, f"{origin}: rope_pairing")
    elif isinstance(config.get("rope_interleaved"), bool):
        pairing = "interleaved" if config["rope_interleaved"] else "halves"
        facts.set("rope_pairing", pairing, f"{origin}: rope_interleaved")


def _read_unrotated(config: Mapping[str, object], origin: str, facts: Facts) -> None:
    """SmolLM3 lists a 1 for every layer that rotates; Hermes lists the layers that do not."""
    value = config.get("no_rope_layers")
    where = f"{origin}: no_rope_layers"
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        if facts.family == "hermes":
            facts.set("no_rope_layers", tuple(value), where)
        elif all(item in (0, 1) for item in value):
            layers = facts.int_value("num_layers")
            if layers is not None and layers != len(value):
                facts.problem(
                    "no_rope_layers", f"{where} has {len(value)} entries for {layers} layers"
                )
            unrotated = tuple(index for index, rotates in enumerate(value) if not rotates)
            facts.set("no_rope_layers", unrotated, where)
        else:
            facts.problem("no_rope_layers", f"{where} is {value}, expected a list of 0 and 1")
    elif value not in (None, []):
        facts.problem("no_rope_layers", f"{where} is {str(value)[:60]}, expected a list of 0 and 1")
    elif type(config.get("no_rope_layer_interval")) is int and _has_interval(config):
        interval, layers = config["no_rope_layer_interval"], facts.int_value("num_layers")
        if layers is None or not isinstance(interval, int) or interval < 1:
            facts.problem("no_rope_layer_interval", f"{origin}: no_rope_layer_interval {interval}")
        else:
            unrotated = tuple(i for i in range(layers) if (i + 1) % interval == 0)
            facts.set("no_rope_layers", unrotated, f"{origin}: no_rope_layer_interval")


def _has_interval(config: Mapping[str, object]) -> bool:
    return config.get("model_type") in ("smollm3", None)
