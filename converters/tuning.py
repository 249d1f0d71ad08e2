"""Find the cheapest storage that stays within a budget, matrix by matrix.

Every matmul of every layer is first tried alone: how far do the logits move if only it is stored in
fewer bits? These divergences add up well as long as they are small, so the assignment is chosen by
their sum, from the best bargain on, and then measured as a whole. While the whole misses the
budget, the worst bargains are taken back. Where the base recipe itself misses it, matmuls are
multiplied as floats instead, those first that gain most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from converters.budget import Budget
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
    search = _Search(model, base, sequences, on_progress)
    exact = budget.kl is not None and search.base_kl > budget.kl
    candidates = search.candidates(exact)
    ordered, count = _order(candidates, budget, search.base_kl, search.base_size, exact)
    if budget.kl is None:
        found = search.measure(ordered[:count])
    else:
        found, count = search.fit(ordered, count, budget.kl, exact)
    chosen = ordered[:count]
    size = search.base_size + sum(one.cost for one in chosen)
    if budget.size is not None and size > budget.size:
        raise UsageError(
            f"no assignment has {budget.size:,} bytes of weights",
            expected=f"at least {size:,}, with every matmul in 4 bits",
            todo="raise the budget, or shrink the model",
        )
    return Tuned(
        recipe=_recipe(base, search.rules, chosen, found),
        kl=found.kl,
        top1=found.top1,
        base_kl=search.base_kl,
        size=size,
        base_size=search.base_size,
        sensitivity=tuple(sorted(candidates, key=lambda one: -abs(one.kl))),
        changed=tuple(one.unit for one in chosen),
    )


class _Search:
    """Measures assignments on one text."""

    def __init__(
        self,
        model: RewritableModel,
        base: Recipe,
        sequences: Sequence[Sequence[int]],
        on_progress: OnProgress,
    ) -> None:
        on_progress(Progress("measuring the base recipe"))
        self._model = model
        self._sequences = sequences
        self._on_progress = on_progress
        self._twin = QuantizedTwin(model, base.calibration.directions)
        self._wanted = list(self._twin.log_probabilities(sequences))
        self.rules = {name: base.rule_for(name) for name in _matrices(model)}
        self.base_kl = self._divergence(self.rules).kl
        self.base_size = _size(model, self.rules)

    def _divergence(self, stored: Mapping[str, QuantizationRule]) -> Divergence:
        with self._twin.quantized(stored):
            return self._twin.divergence(self._wanted, self._sequences)

    def measure(self, chosen: Sequence[Candidate]) -> Divergence:
        """All rules together, some of them changed."""
        changes = {name: rule for one in chosen for name, rule in one.rules.items()}
        return self._divergence({**self.rules, **changes})

    def candidates(self, exact: bool) -> list[Candidate]:
        """Every matmul alone: in four bits, or what it gains by being multiplied as floats."""
        change = _multiplied_as_floats if exact else _in_four_bits
        units, candidates = _units(self._model), []
        for index, (unit, names) in enumerate(units.items()):
            self._on_progress(Progress("trying matmuls alone", index, len(units), "matmuls", unit))
            now = {name: self.rules[name] for name in names}
            changed = {name: change(rule) for name, rule in now.items()}
            cost = _size(self._model, changed) - _size(self._model, now)
            # What a matmul costs as it is, is what multiplying it exactly takes away.
            kl = -self._divergence(now).kl if exact else self._divergence(changed).kl
            candidates.append(Candidate(unit, changed, kl, cost))
        return candidates

    def fit(
        self, ordered: Sequence[Candidate], count: int, kl: float, exact: bool
    ) -> tuple[Divergence, int]:
        """How many of the ordered candidates meet the budget when they are measured together."""
        step, last = max(1, len(ordered) // 16), len(ordered) if exact else 0
        while True:
            found = self.measure(ordered[:count])
            if found.kl <= kl:
                return found, count
            if count == last:
                raise UsageError(
                    f"no assignment has a mean KL of {kl:g}",
                    expected=f"at least {found.kl:.3g}, what the best one found has on this text",
                    todo="raise the budget, or start from another --base",
                )
            count = min(last, count + step) if exact else max(last, count - step)
            self._on_progress(
                Progress(f"measured {found.kl:.3g} nats: trying {count} of {len(ordered)}")
            )


def _matrices(model: RewritableModel) -> list[str]:
    return [name for name, shape in parameter_shapes(model.config).items() if len(shape) == 2]


def _in_four_bits(rule: QuantizationRule) -> QuantizationRule:
    return replace(rule, weights="int4", granularity="block32", activations="int8")


def _multiplied_as_floats(rule: QuantizationRule) -> QuantizationRule:
    return replace(rule, activations="float32")


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


def _order(
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
    on_progress(Progress("opening the checkpoint"))
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
