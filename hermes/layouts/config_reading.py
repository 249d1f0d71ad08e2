"""A configuration of any family we know, as facts; every field of it is accounted for."""

from __future__ import annotations

from collections.abc import Mapping

from hermes.layouts.config_facts import Facts
from hermes.layouts.config_fields import (
    FAMILY_MARKS,
    FIELD_OF,
    IRRELEVANT_PREFIXES,
    NEUTRAL_VALUES,
    REASONS,
    ROTARY_WORDS,
    SPELLINGS,
    SUSPICIOUS,
    TRAINING,
    WITHOUT_EFFECT,
)
from hermes.layouts.config_rope import read_rotary

MODEL_TYPES = frozenset(
    {"hermes", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm", "smollm2", "smollm3"}
)
"""Hugging Face and GGUF model types whose maths Hermes has."""

_GGUF_TYPES = frozenset({"llama", "qwen2", "qwen3", "smollm3"})
"""GGUF architectures of which we know whether llama.cpp's converter reordered their rows."""

_WINDOW_WORDS = {"sliding_window", "use_sliding_window", "layer_types", "model_type"}
_EMPTY = (None, False, "", 0)


def config_family(config: Mapping[str, object]) -> str:
    """Which codebase's spelling a configuration has; Hugging Face's if nothing else fits."""
    marks = {family: len(words & config.keys()) for family, words in FAMILY_MARKS.items()}
    best = max(marks, key=lambda family: marks[family])
    return best if marks[best] else "huggingface"


def read_config(config: Mapping[str, object], origin: str) -> Facts:
    """Facts of one configuration.

    Nothing is defaulted here: a field that the configuration lacks is absent from the facts.
    """
    facts = Facts(config_family(config))
    for name, words in SPELLINGS.items():
        for word in words:
            if word in config:
                _read_field(name, word, config[word], origin, facts)
    read_rotary(config, origin, facts)
    _read_window(config, origin, facts)
    _check_model_type(config, origin, facts)
    if facts.family == "nanovlm":
        facts.warnings.append(
            "nanoVLM's code divides all rotary frequencies anew with every position past "
            "lm_max_position_embeddings; that is not static, so contexts end there"
        )
    unused: list[str] = []
    for word, value in config.items():
        _account(word, value, origin, facts, unused)
    if unused:
        facts.warnings.append(f"{origin}: not used: {', '.join(unused)}")
    return facts


def _read_field(name: str, word: str, value: object, origin: str, facts: Facts) -> None:
    source = f"{origin}: {word}"
    if name == "eos_token_id" and isinstance(value, list):
        # The first one ends text; the bundle's stop tokens are the union, elsewhere.
        facts.set(name, value[0] if value else None, f"{source}[0]")
    elif isinstance(value, list):
        if value and all(item == value[0] for item in value):
            facts.set(name, value[0], source)
        else:
            facts.refuse(word, f"{source} differs between layers: {str(value)[:80]}")
    elif word == "vocab_size" and value == -1:
        pass  # Meta's params.json leaves it to the tokenizer; the table's shape tells
    elif value is None and name not in ("pad_token_id", "bos_token_id", "eos_token_id"):
        pass  # the same as absent
    else:
        facts.set(name, value, source)
        if word == "attention_bias" and facts.family in ("huggingface", "gguf"):
            # transformers' Llama, Qwen3 and SmolLM3 give all four projections a bias, or none.
            facts.set("output_bias", value, source)


def _read_window(config: Mapping[str, object], origin: str, facts: Facts) -> None:
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        odd = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if odd:
            facts.refuse("layer_types", f"{origin}: layer_types {', '.join(odd)}")
        if "sliding_attention" not in kinds:
            return
    elif kinds is not None:
        facts.problem("layer_types", f"{origin}: layer_types is {kinds!r}, expected a list")
    if window is None or config.get("use_sliding_window") is False:
        return
    if type(window) is not int or window < 1:
        facts.problem("sliding_window", f"{origin}: sliding_window is {window!r}")
    else:
        facts.window = (window, f"{origin}: sliding_window")


def _check_model_type(config: Mapping[str, object], origin: str, facts: Facts) -> None:
    kind = config.get("model_type")
    known = _GGUF_TYPES if facts.family == "gguf" else MODEL_TYPES
    if kind in known or (kind is None and facts.family != "gguf") or facts.family == "nanovlm":
        return
    facts.refuse(
        "model_type", f"{origin}: model_type {kind!r} is not one of {', '.join(sorted(known))}"
    )


def _account(word: str, value: object, origin: str, facts: Facts, unused: list[str]) -> None:
    """Refuse a field that changes the maths, mention one that we do not know."""
    if word in FIELD_OF or word in ROTARY_WORDS or word in _WINDOW_WORDS:
        return
    if word in NEUTRAL_VALUES:
        if not any(_same(value, neutral) for neutral in NEUTRAL_VALUES[word]):
            reason = REASONS.get(word, "this changes what the model computes")
            facts.refuse(word, f"{origin}: {word} is {_short(value)}: {reason}")
        return
    if word in WITHOUT_EFFECT or word.startswith(IRRELEVANT_PREFIXES):
        return
    if any(_same(value, empty) for empty in _EMPTY) or value in ([], {}):
        return
    if SUSPICIOUS.search(word) and not TRAINING.fullmatch(word):
        facts.refuse(word, f"{origin}: {word} is {_short(value)}: this field is not implemented")
    else:
        unused.append(f"{word} = {_short(value)}")


def _same(value: object, neutral: object) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return value == neutral


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
