"""Facts of configurations and shapes to one HermesConfig, with the source of every field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from hermes.config import HermesConfig
from hermes.errors import BadInputError
from hermes.layouts.config_facts import Facts
from hermes.layouts.config_fields import FIELD_OF
from hermes.layouts.config_reading import read_config
from hermes.layouts.operations import Pairing
from hermes.layouts.shapes import Evidence
from hermes.layouts.table import Layout

_FROM_SHAPES = {
    "vocab_size": "the embedding table",
    "hidden_size": "the embedding table",
    "intermediate_size": "down_proj",
    "num_layers": "the file",
}
_FLAGS = ("attention_bias", "output_bias", "mlp_bias", "qk_norm")
_DEMANDED = {
    "num_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
}
_NEUTRAL = {
    "rope_scaling": None,
    "rope_amplitude": 1.0,
    "no_rope_layers": (),
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Fields whose absence means that the model does not have the thing."""


@dataclass
class Resolved:
    """A configuration, or the reasons why there is none."""

    values: dict[str, object] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    pairing: Pairing = "halves"
    config: HermesConfig | None = None
    problems: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    demanded: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def merged_facts(
    base: Mapping[str, object] | None, origin: str, override: Mapping[str, object] | None
) -> Facts:
    """The checkpoint's own configuration with the user's on top, field by field."""
    stronger = read_config(override, "--config") if override else Facts()
    if base is None:
        return stronger
    weaker = read_config(_without(base, override or {}), origin)
    if not override:
        return weaker
    weaker.values.update(stronger.values)
    weaker.problems += stronger.problems
    weaker.refused += stronger.refused
    weaker.warnings += stronger.warnings
    weaker.window = stronger.window or weaker.window
    return weaker


def _without(base: Mapping[str, object], override: Mapping[str, object]) -> dict[str, object]:
    """The base less the fields that the override names, in whatever spelling."""
    words = set(override)
    named = {FIELD_OF[word] for word in words if word in FIELD_OF}
    if words & {"rope_scaling", "rope_parameters", "use_scaled_rope"}:
        words |= {"rope_scaling", "rope_parameters", "use_scaled_rope"}
    return {
        word: value
        for word, value in base.items()
        if word not in words and FIELD_OF.get(word) not in named
    }


def resolve(facts: Facts, evidence: Evidence, layout: Layout) -> Resolved:
    """Join facts and shapes; contradictions, gaps and unknown maths are collected, not raised."""
    result = Resolved(
        problems=[message for _, message in facts.problems],
        refused=[message for _, message in facts.refused],
        warnings=list(facts.warnings),
    )
    known = {item.name for item in fields(HermesConfig)}
    for name, (value, source) in facts.values.items():
        if name in known:
            result.values[name], result.sources[name] = value, source
    _constants(result, layout)
    _sizes(result, evidence)
    _heads(result, evidence)
    _flags(result, evidence)
    _tying(result, evidence)
    _pairing(result, facts, layout)
    for name, value in _NEUTRAL.items():
        if name not in result.values:
            result.values[name], result.sources[name] = value, "absent, so the model has none"
    _padding(result)
    result.demanded = [
        f"{name} ({word} in a config.json)" + _hint(layout, name)
        for name, word in _DEMANDED.items()
        if result.values.get(name) is None
    ]
    _window(result, facts)
    _build(result)
    return result


def _hint(layout: Layout, name: str) -> str:
    return f"; {layout.title}'s code has {layout.hints[name]}" if name in layout.hints else ""


def _constants(result: Resolved, layout: Layout) -> None:
    """What the layout's own training code never reads from a configuration."""
    for name, constant in layout.constants.items():
        said = result.values.get(name)
        if said is None:
            result.values[name] = constant
            result.sources[name] = f"constant in the code of {layout.title}"
        elif said != constant:
            result.warnings.append(
                f"{name} {said} from {result.sources[name]} is used; the published code of "
                f"{layout.title} always computes with {constant}"
            )


def _sizes(result: Resolved, evidence: Evidence) -> None:
    for name, what in _FROM_SHAPES.items():
        seen = getattr(evidence, name)
        if not seen:
            continue
        said = result.values.get(name)
        if said is None:
            result.values[name], result.sources[name] = seen, f"shape of {what}"
            if name == "num_layers":
                result.sources[name] = "layer numbers in the tensors' names"
        elif said != seen:
            result.problems.append(
                f"{name} is {said!r} in {result.sources[name]}, {what} has {seen}"
            )


def _heads(result: Resolved, evidence: Evidence) -> None:
    """Head count, kv head count and width; two of them follow from the third and the shapes."""
    rows, key_rows = evidence.query_rows, evidence.key_rows
    heads, width = result.values.get("num_heads"), result.values.get("head_dim") or None
    if width is None and evidence.head_dim:
        width = evidence.head_dim
        result.values["head_dim"], result.sources["head_dim"] = width, "shape of q_norm"
    if not rows:
        return
    if heads is None and _divides(width, rows):
        assert isinstance(width, int)
        heads = rows // width
        result.values["num_heads"], result.sources["num_heads"] = heads, "q_proj rows / head_dim"
    elif width is None and _divides(heads, rows):
        assert isinstance(heads, int)
        width = rows // heads
        result.values["head_dim"], result.sources["head_dim"] = width, "q_proj rows / num_heads"
    elif isinstance(heads, int) and isinstance(width, int) and heads * width != rows:
        result.problems.append(
            f"num_heads {heads} x head_dim {width} is {heads * width}, q_proj has {rows} rows"
        )
    elif heads is not None and width is None:
        result.problems.append(f"num_heads {heads!r} does not divide the {rows} rows of q_proj")
    elif heads is None and width is not None:
        result.problems.append(f"head_dim {width!r} does not divide the {rows} rows of q_proj")
    if key_rows and _divides(width, key_rows):
        assert isinstance(width, int)
        _key_heads(result, key_rows // width, key_rows)
    elif key_rows and isinstance(width, int) and width > 0:
        result.problems.append(f"head_dim {width} does not divide the {key_rows} rows of k_proj")


def _key_heads(result: Resolved, seen: int, rows: int) -> None:
    said = result.values.get("num_kv_heads")
    if said is None:
        result.values["num_kv_heads"] = seen
        result.sources["num_kv_heads"] = "k_proj rows / head_dim"
    elif said != seen:
        result.problems.append(
            f"num_kv_heads is {said!r} in {result.sources['num_kv_heads']}, the {rows} rows of "
            f"k_proj are {seen} heads"
        )


def _divides(part: object, whole: int) -> bool:
    return type(part) is int and part > 0 and whole % part == 0


def _flags(result: Resolved, evidence: Evidence) -> None:
    for name in _FLAGS:
        seen, said = getattr(evidence, name), result.values.get(name)
        if said is None:
            result.values[name] = seen
            result.sources[name] = f"tensors {'present' if seen else 'absent'}"
        elif said is False and seen:
            result.problems.append(
                f"{name} is false in {result.sources[name]}, the file has such tensors"
            )


def _tying(result: Resolved, evidence: Evidence) -> None:
    """Without a stored head only a tied one is possible; a stored one is compared later."""
    if "tie_embeddings" not in result.values:
        result.values["tie_embeddings"] = not evidence.has_head
        result.sources["tie_embeddings"] = "head " + (
            "stored" if evidence.has_head else "not stored"
        )


def _pairing(result: Resolved, facts: Facts, layout: Layout) -> None:
    result.pairing, source = layout.pairing, f"convention of the {layout.name} layout"
    value, where = facts.values.get("rope_pairing", (None, ""))
    if value == "halves" or value == "interleaved":
        result.pairing, source = value, where
    result.sources["rope_pairing"] = f"{result.pairing}, {source}"


def _padding(result: Resolved) -> None:
    """Padding only matters to the training loss: an id outside the table is left out."""
    pad, size = result.values.get("pad_token_id"), result.values.get("vocab_size")
    if isinstance(pad, int) and isinstance(size, int) and not 0 <= pad < size:
        result.warnings.append(
            f"pad_token_id {pad} from {result.sources['pad_token_id']} is outside the vocabulary "
            f"of {size} and not used"
        )
        result.values["pad_token_id"] = None


def _window(result: Resolved, facts: Facts) -> None:
    length = result.values.get("max_seq_len")
    if facts.window is None or not isinstance(length, int):
        return
    window, source = facts.window
    if window < length:
        result.refused.append(
            f"{source} is {window}, shorter than the context of {length}: windowed attention is "
            f"not implemented; contexts up to {window} are exact, so "
            f'--config with {{"max_position_embeddings": {window}}} is a way'
        )


def _build(result: Resolved) -> None:
    known = {item.name for item in fields(HermesConfig)}
    absent = sorted(name for name in known if name not in result.values)
    # HermesConfig has defaults for training from scratch; none may slip into a foreign model.
    if result.problems or result.demanded or absent:
        return
    try:
        result.config = HermesConfig.from_dict(result.values)
    except BadInputError as error:
        result.problems += list(error.problems) or [error.found]


def demand(result: Resolved) -> str:
    """What to do about fields that nothing tells."""
    example = {
        "num_attention_heads": 9,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    }
    names = {_DEMANDED[item.split(" ")[0]] for item in result.demanded}
    shown = {name: value for name, value in example.items() if name in names}
    return (
        "write the values that the model was trained with into a JSON file and pass it with "
        f"--config FILE, in the form {json.dumps(shown)}"
    )
