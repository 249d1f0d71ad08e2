"""The form of a layout table: names on both sides and the operation between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hermes.layouts.operations import Operation, Pairing, Rotary, Same, SplitRows

ConfigFamily = str
"""The spelling of configurations: hermes, huggingface, nanovlm, ..."""


@dataclass(frozen=True)
class Rule:
    """Foreign names to Hermes names; `{}` stands for the layer number on both sides."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operation: Operation = field(default_factory=Same)

    @property
    def per_layer(self) -> bool:
        """Whether the rule repeats for every layer."""
        return "{}" in self.sources[0]


@dataclass(frozen=True)
class Layout:
    """One training codebase's names and conventions.

    Attributes:
        name: what `--layout` takes.
        title: whose layout it is, for reports.
        rules: every parameter of the model.
        pairing: which elements of a head rotate together.
        families: spellings of the configuration that come with it, best first.
        model_types: the configuration's model types that tell it from tables of the same names.
        ignored: (pattern of a whole name, reason) of entries that carry no weights.
        refused: (pattern of a whole name, reason) of entries whose maths we lack.
        constants: fields that its training code fixes and its configuration does not name.
        hints: values that its code usually has, shown when a field is asked for.
        past_training: what its code does at positions past the trained maximum, where that cannot
            be exported; shown when a longer context is asked for.
    """

    name: str
    title: str
    rules: tuple[Rule, ...]
    pairing: Pairing = "halves"
    families: tuple[ConfigFamily, ...] = ("huggingface",)
    model_types: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    constants: Mapping[str, object] = field(default_factory=dict)
    hints: Mapping[str, object] = field(default_factory=dict)
    past_training: str = ""

    def sources(self) -> dict[str, Rule]:
        """Every source template with its rule."""
        return {source: rule for rule in self.rules for source in rule.sources}


_ROLES: dict[str, tuple[str, Operation]] = {
    "q": ("self_attn.q_proj", Rotary("num_heads")),
    "k": ("self_attn.k_proj", Rotary("num_kv_heads")),
    "v": ("self_attn.v_proj", Same()),
    "o": ("self_attn.o_proj", Same()),
    "gate": ("mlp.gate_proj", Same()),
    "up": ("mlp.up_proj", Same()),
    "down": ("mlp.down_proj", Same()),
}
_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
_NORMS: dict[str, tuple[str, Operation]] = {
    "attention_norm": ("input_layernorm", Same()),
    "mlp_norm": ("post_attention_layernorm", Same()),
    "q_norm": ("self_attn.q_norm", Rotary("one")),
    "k_norm": ("self_attn.k_norm", Rotary("one")),
}


def decoder_rules(
    *, embedding: str, final_norm: str, head: str, layer: str, **roles: str
) -> tuple[Rule, ...]:
    """The rules of a decoder from its module names.

    `layer` is the prefix of a block with `{}` for its number; `roles` name modules inside it:
    attention_norm, q, k, v, o, mlp_norm, gate, up, down, optionally q_norm, k_norm, and qkv or
    gate_up in the place of separate projections.
    """
    rules = [Rule((f"{embedding}.weight",), ("embed_tokens.weight",))]
    for role, name in roles.items():
        source = f"{layer}{name}"
        if role in _NORMS:
            target, operation = _NORMS[role]
            rules.append(Rule((f"{source}.weight",), (f"layers.{{}}.{target}.weight",), operation))
            continue
        parts = [_ROLES[part] for part in _FUSED.get(role, (role,))]
        operations = tuple(operation for _, operation in parts)
        for kind in ("weight", "bias"):
            targets = tuple(f"layers.{{}}.{target}.{kind}" for target, _ in parts)
            operation = SplitRows(operations) if role in _FUSED else operations[0]
            rules.append(Rule((f"{source}.{kind}",), targets, operation))
    rules.append(Rule((f"{final_norm}.weight",), ("norm.weight",)))
    rules.append(Rule((f"{head}.weight",), ("lm_head.weight",)))
    return tuple(rules)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


def template(name: str) -> str:
    """The name with every number between dots replaced by `{}`."""
    return _NUMBER.sub("{}", name)
