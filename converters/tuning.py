"""Find the cheapest storage that stays within a budget, matrix by matrix.

Every matmul of every layer is first tried alone: how far do the logits move if only it is stored in
fewer bits? These divergences add up well as long as they are small, so the assignment is chosen by
their sum, from the best bargain on, and then measured as a whole. While the whole misses the
budget, the worst bargains are taken back. Where the base recipe itself misses it, matmuls are
multiplied as floats instead, those first that gain most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from converters.simulation import Divergence, QuantizedTwin
from converters.source import (
    SourceOptions,
    calibration_sequences,
    open_source,
    recipe_for,
    rewrite_source,
)
from hermes.errors import TargetError, UsageError
from hermes.parameters import HEAD, parameter_shapes
from hermes.progress import OnProgress, Progress, silent
from hermes.recipe import Calibration, QuantizationRule, Recipe
from hermes.recipe_file import load_recipe, write_recipe
from hermes.rewrite import RewritableModel

UNITS = (
    "self_attn.[qkv]_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.[gu]*_proj.weight",
    "mlp.down_proj.weight",
)
"""Patterns within a layer: projections that may share a matmul share a rule."""


@dataclass(frozen=True)
class Budget:
    """What must hold: a mean KL in nats, or a file size in bytes; the other one is minimised."""

    kl: float | None = None
    size: int | None = None


@dataclass(frozen=True)
class Candidate:
    """One matmul in fewer bits, or multiplied more exactly, than the base recipe has it.

    Attributes:
        unit: pattern of its parameters' names, `layers.3.mlp.down_proj.weight`.
        rules: parameter name -> rule.
        kl: divergence that it alone adds to the base's (negative if it takes some away).
        cost: bytes that it adds to the base's (negative if it saves some).
    """

    unit: str
    rules: Mapping[str, QuantizationRule]
    kl: float
    cost: int


@dataclass(frozen=True)
class Tuned:
    """The result.

    Attributes:
        recipe: the assignment as a recipe.
        kl: mean KL in nats, measured on the tuning text with all rules together.
        top1: share of positions with the same most likely token.
        base_kl: of the base recipe, on the same text.
        size: bytes of all matrices.
        base_size: the same of the base recipe.
        sensitivity: every candidate that was tried, most sensitive first.
        changed: units that are not as in the base.
    """

    recipe: Recipe
    kl: float
    top1: float
    base_kl: float
    size: int
    base_size: int
    sensitivity: tuple[Candidate, ...]
    changed: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "description": self.recipe.description,
            "kl": self.kl,
            "top1": self.top1,
            "base_kl": self.base_kl,
            "bytes": self.size,
            "base_bytes": self.base_size,
            "changed": list(self.changed),
            "sensitivity": [
                {"unit": one.unit, "kl": one.kl, "bytes": one.cost} for one in self.sensitivity
            ],
        }


def tune(
    model: RewritableModel,
    base: Recipe,
    budget: Budget,
    sequences: Sequence[Sequence[int]],
    on_progress: OnProgress = silent,
) -> Tuned:
    """Choose a rule for every matmul.

    Args:
        model: the model after the base recipe's rewrites.
        base: what is changed where it pays.
        budget: what must hold.
        sequences: token ids of the tuning text.
        on_progress: told which matmul is tried.

    Raises:
        UsageError: no assignment meets the budget; says which is nearest.
    """
    twin = QuantizedTwin(model)
    wanted = list(twin.log_probabilities(sequences))
    rules = {name: base.rule_for(name) for name in _matrices(model)}

    def divergence(stored: Mapping[str, QuantizationRule]) -> Divergence:
        with twin.quantized(stored):
            return twin.divergence(wanted, sequences)

    on_progress(Progress("measuring the base recipe"))
    base_kl, base_size = divergence(rules).kl, _size(model, rules)
    exact = budget.kl is not None and base_kl > budget.kl
    change = _multiplied_as_floats if exact else _in_four_bits
    candidates = _try_all(model, rules, change, divergence, exact, on_progress)
    ordered, count = _choose(candidates, budget, base_kl, base_size, exact)
    step = max(1, len(ordered) // 16)
    while True:
        chosen = ordered[:count]
        changes = {name: rule for one in chosen for name, rule in one.rules.items()}
        found = divergence({**rules, **changes})
        size = base_size + sum(one.cost for one in chosen)
        if budget.kl is None or found.kl <= budget.kl:
            break
        if count == (len(ordered) if exact else 0):
            raise UsageError(
                f"no assignment has a mean KL of {budget.kl:g}",
                expected=f"at least {found.kl:.3g}, what the best one found has on this text",
                todo="raise the budget, or start from another --base",
            )
        count = min(len(ordered), count + step) if exact else max(0, count - step)
        on_progress(Progress(f"measured {found.kl:.3g} nats: trying {count} of {len(ordered)}"))
    if budget.size is not None and size > budget.size:
        raise UsageError(
            f"no assignment has {budget.size:,} bytes of weights",
            expected=f"at least {size:,}, with every matmul in 4 bits",
            todo="raise the budget, or shrink the model",
        )
    return Tuned(
        recipe=_recipe(base, rules, chosen, found),
        kl=found.kl,
        top1=found.top1,
        base_kl=base_kl,
        size=size,
        base_size=base_size,
        sensitivity=tuple(sorted(candidates, key=lambda one: -abs(one.kl))),
        changed=tuple(one.unit for one in chosen),
    )


def _matrices(model: RewritableModel) -> list[str]:
    return [name for name, shape in parameter_shapes(model.config).items() if len(shape) == 2]


def _in_four_bits(rule: QuantizationRule) -> QuantizationRule:
    return replace(rule, weights="int4", granularity="block32", activations="int8")


def _multiplied_as_floats(rule: QuantizationRule) -> QuantizationRule:
    return replace(rule, activations="float32")


def _try_all(
    model: RewritableModel,
    rules: Mapping[str, QuantizationRule],
    change: Callable[[QuantizationRule], QuantizationRule],
    divergence: Callable[[Mapping[str, QuantizationRule]], Divergence],
    exact: bool,
    on_progress: OnProgress,
) -> list[Candidate]:
    units = _units(model)
    candidates = []
    for index, (unit, names) in enumerate(units.items()):
        on_progress(Progress("trying matmuls alone", index, len(units), "matmuls", unit))
        now = {name: rules[name] for name in names}
        changed = {name: change(rule) for name, rule in now.items()}
        cost = _size(model, changed) - _size(model, now)
        # What a matmul costs as it is, is what multiplying it exactly takes away.
        kl = -divergence(now).kl if exact else divergence(changed).kl
        candidates.append(Candidate(unit, changed, kl, cost))
    return candidates


def _units(model: RewritableModel) -> dict[str, list[str]]:
    """Pattern -> the parameters it matches; only those whose columns come in whole blocks."""
    shapes = parameter_shapes(model.config)
    patterns = [f"layers.{n}.{unit}" for n in range(model.config.num_layers) for unit in UNITS]
    if not model.config.tie_embeddings:
        patterns.append(HEAD)
    matched = {
        pattern: [name for name in shapes if fnmatchcase(name, pattern)] for pattern in patterns
    }
    return {
        pattern: names
        for pattern, names in matched.items()
        if all(shapes[name][1] % 32 == 0 for name in names)
    }


def _choose(
    candidates: Sequence[Candidate], budget: Budget, base_kl: float, base_size: int, exact: bool
) -> tuple[list[Candidate], int]:
    """The best bargains first, and how many of them meet the budget by their sums."""
    if exact:
        ordered = sorted(candidates, key=lambda one: one.kl)
    else:
        ordered = sorted(candidates, key=lambda one: one.kl / -one.cost)
    kl, size = base_kl, base_size
    for count, one in enumerate(ordered):
        if budget.kl is None:
            met = budget.size is not None and size <= budget.size
        else:
            met = kl <= budget.kl if exact else kl + one.kl > budget.kl
        if met:
            return ordered, count
        kl, size = kl + one.kl, size + one.cost
    return ordered, len(ordered)


def _size(model: RewritableModel, rules: Mapping[str, QuantizationRule]) -> int:
    """Bytes of these matrices in the file, with their scales."""
    total = 0
    for name, rule in rules.items():
        rows, columns = parameter_shapes(model.config)[name]
        total += rule.value_bytes(rows * columns) + rule.scale_bytes(rows, columns)
    return total


def _recipe(
    base: Recipe,
    rules: Mapping[str, QuantizationRule],
    chosen: Sequence[Candidate],
    found: Divergence,
) -> Recipe:
    own = [
        replace(rule, tensors=one.unit)
        for one in chosen
        for rule in [next(iter(one.rules.values()))]
    ]
    changed = {name for one in chosen for name in one.rules}
    kept = [
        rule
        for rule in base.quantization
        if any(base.rule_for(name) is rule for name in rules if name not in changed)
    ]
    # Another text may be harder than this one.
    limits = replace(base.limits, kl_mean=2 * found.kl, top1=max(0.0, 1 - 2 * (1 - found.top1)))
    return replace(base, quantization=(*own, *kept), limits=limits)


def parse_budget(kl: str | None, size: str | None) -> Budget:
    """`KL=0.01` or a number of bytes, exactly one of them."""
    if (kl is None) == (size is None):
        raise UsageError(
            "--budget and --bytes" if kl is not None else "no budget",
            expected="one of --budget KL=0.01 and --bytes 90MB",
        )
    match = re.fullmatch(r"KL=([0-9.eE+-]+)", kl or "")
    units = re.fullmatch(r"([0-9.]+)\s*([kMG]?)B?", size or "")
    try:
        if match is not None:
            return Budget(kl=float(match[1]))
        if units is not None:
            return Budget(size=int(float(units[1]) * _UNITS[units[2]]))
    except ValueError:
        pass
    raise UsageError(
        f"budget {kl or size!r}",
        expected="--budget KL=0.01 (nats) or --bytes 90000000, 90MB",
        todo="correct the budget",
    )


_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class TuneOptions:
    """One tuning.

    Attributes:
        source: the checkpoint, and the text whose first tokens are looked at.
        base: name or file of the recipe to start from.
        budget: what must hold.
        positions: tokens of the text.
        target: recipe file to write.
        force: replace it.
    """

    source: SourceOptions
    base: str
    budget: Budget
    positions: int
    target: Path
    force: bool = False


SEQUENCE = 64
"""Tokens of one piece of the tuning text."""


def tune_checkpoint(options: TuneOptions, on_progress: OnProgress = silent) -> Tuned:
    """Tune on the calibration text and write the recipe."""
    target = options.target
    if target.suffix != ".toml":
        raise UsageError(
            f"the recipe is called {target.name}", expected="a name that ends in .toml"
        )
    if target.exists() and not options.force:
        raise TargetError(f"{target} exists", todo="choose another name, or pass --force")
    source = open_source(options.source)
    base = recipe_for(options.base, source.mapped, None, ())
    text = Calibration(-(-options.positions // SEQUENCE), SEQUENCE)
    sequences = calibration_sequences(source, replace(base, calibration=text))
    tuned = tune(rewrite_source(source, base), base, options.budget, sequences, on_progress)
    wanted = (
        f"a mean KL of at most {options.budget.kl:g}"
        if options.budget.kl is not None
        else f"at most {options.budget.size:,} bytes of weights"
    )
    recipe = replace(
        tuned.recipe,
        name=target.stem,
        # The shapes are the base's own, not those that fit this model.
        export=load_recipe(options.base).export,
        description=f"{base.name} tuned to {wanted} on {source.calibration.name}: "
        f"{len(tuned.changed)} matmuls changed",
    )
    write_recipe(recipe, target)
    return replace(tuned, recipe=recipe)
