"""Recipe: everything that may be chosen about an export.

A recipe knows names, bits and numbers, and nothing about any converter. It is read from TOML by
`hermes.recipe_file`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from hermes.errors import UsageError

WeightType = Literal["float32", "float16", "int8", "int4"]
Granularity = Literal["channel", "tensor", "block32"]
Activations = Literal["int8", "float32"]
Rounding = Literal["nearest", "calibrated"]


@dataclass(frozen=True)
class ExportShapes:
    """Static shapes.

    Attributes:
        context: slots of the KV cache, shared by prompt and answer.
        prefill: lengths of the prefill signatures. LiteRT-LM feeds a prompt with the longest that
            fits first. Length 1 lets a prompt fill the context to its end, since the runtime
            refuses a signature that is longer than the room left.
    """

    context: int = 1280
    prefill: tuple[int, ...] = (1, 8, 32, 128)

    def problems(self) -> list[str]:
        """Everything that cannot be exported."""
        found = []
        if not 2 <= self.context <= 2**20:
            found.append(f"export.context is {self.context}, expected 2 to {2**20}")
        if not self.prefill:
            found.append("export.prefill is empty, expected at least one length")
        for length in self.prefill:
            if not 1 <= length <= self.context:
                found.append(f"export.prefill has {length}, expected 1 to context {self.context}")
        if len(set(self.prefill)) != len(self.prefill):
            found.append(f"export.prefill repeats a length: {list(self.prefill)}")
        return found

    def fitted(self) -> ExportShapes:
        """The same ladder without the lengths that do not fit the context."""
        return replace(self, prefill=tuple(n for n in self.prefill if n <= self.context))


ATTENTION_WIDTHS = (*range(128, 1025, 128), 1536, 2048, 3072, 4096, 6144)
"""Slots of the cache that attention may look at; those that the context does not exceed are left
out. Half a step of 128 slots costs 4 % of a short decode step, a width more next to nothing."""


@dataclass(frozen=True)
class GraphOptions:
    """Choices of the exported graph that do not change its numbers.

    Attributes:
        fuse_qkv: one matmul for the query, key and value projections.
        fuse_gate_up: one matmul for the gate and up projections.
        attention_widths: attention looks at the first so many slots of the cache while no later
            one is written, and at all of them otherwise; empty for always all.
        norm_gains: norms multiply by their gains; off where a rewrite has folded them. Set by
            `Recipe`, not by the file.
        mix_down_input: the feed-forward's product is multiplied by a Hadamard matrix in blocks;
            on where a rewrite put the inverse into the down projections. Set by `Recipe`.
        scale_queries: queries are multiplied by one over the root of the head width; off where a
            rewrite has folded that. Set by `Recipe`.
    """

    fuse_qkv: bool = True
    fuse_gate_up: bool = True
    attention_widths: tuple[int, ...] = ATTENTION_WIDTHS
    norm_gains: bool = True
    mix_down_input: bool = False
    scale_queries: bool = True


DERIVED_GRAPH_OPTIONS = ("norm_gains", "mix_down_input", "scale_queries")
"""Options that follow from the rewrites and are not written into recipe files."""


@dataclass(frozen=True)
class QuantizationRule:
    """How the parameters whose Hermes names match a pattern are stored.

    Attributes:
        tensors: shell pattern over the Hermes names of matrices (`layers.*.mlp.down_proj.weight`);
            norm gains and biases are always float32.
        weights: stored element type.
        granularity: one scale per output channel, one per tensor, or one per 32 neighbouring
            columns of a row (int4 only).
        activations: what integer weights are multiplied by: activations quantized per token at run
            time, or floats, for which the runtime unpacks the weights when it loads them.
        rounding: to nearest, or such that errors cancel on the calibration tokens.
    """

    tensors: str
    weights: WeightType = "int8"
    granularity: Granularity = "channel"
    activations: Activations = "int8"
    rounding: Rounding = "nearest"

    @property
    def integer(self) -> bool:
        """Stored as integers with scales."""
        return self.weights in ("int8", "int4")

    @property
    def block(self) -> int:
        """Columns that share a scale; 0 where a whole row does."""
        return 32 if self.granularity == "block32" else 0

    @property
    def unpacked(self) -> bool:
        """The graph turns the matrix into floats before it multiplies."""
        return self.weights == "float16" or (self.integer and self.activations == "float32")

    def value_bytes(self, count: int) -> int:
        """Bytes of so many values."""
        halves = {"float32": 8, "float16": 4, "int8": 2, "int4": 1}[self.weights]
        return -(-count * halves // 2)

    def scale_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix's scales: float32 by row, float16 by block."""
        if not self.integer:
            return 0
        return 2 * rows * (columns // self.block) if self.block else 4 * rows

    def problems(self) -> list[str]:
        """Combinations that no kernel has."""
        found = []
        if self.block and (self.weights != "int4" or self.activations != "int8"):
            found.append("granularity block32 is for int4 weights with int8 activations")
        if self.weights == "int4" and self.granularity == "tensor":
            found.append("int4 weights need granularity channel or block32")
        return [f"rule {self.tensors}: {problem}" for problem in found]


@dataclass(frozen=True)
class Calibration:
    """Tokens whose activations the recipe's rewrites and roundings look at.

    Attributes:
        sequences: pieces of the calibration text; 0 for no calibration. Many short ones, because
            the first token of a sequence is special in models of this family.
        tokens: of each piece.
        directions: that rounding looks at, the leading ones of all these tokens' inputs. For 8-bit
            weights 16 to 64 differ by chance only (docs/export-cost.md), and each costs time.
    """

    sequences: int = 0
    tokens: int = 8
    directions: int = 16

    def problems(self) -> list[str]:
        """Counts that mean nothing or too much."""
        found = []
        if not 0 <= self.sequences <= 1024:
            found.append(f"calibration.sequences is {self.sequences}, expected 0 to 1024")
        if not 1 <= self.tokens <= 1024:
            found.append(f"calibration.tokens is {self.tokens}, expected 1 to 1024")
        if not 1 <= self.directions <= 1024:
            found.append(f"calibration.directions is {self.directions}, expected 1 to 1024")
        return found


@dataclass(frozen=True)
class Limits:
    """Bars of the verification ladder.

    Attributes:
        float_logits: largest absolute logit difference of a float stage from its neighbour.
        kl_mean: mean KL divergence (nats) of the quantized next-token distribution from the float
            model's.
        top1: smallest share of positions where both prefer the same token.
        positions: positions of text the two above are measured over.
        near_tie: logit margin below which two greedy choices count as a tie in the runtime rung.
        device_kl: mean KL divergence of int8 on another processor from int8 on this one.
        device_correlation: smallest correlation of their logits.
        clear_margin: logit margin above which both must make the same choice.
    """

    float_logits: float = 1e-3
    kl_mean: float = 0.05
    top1: float = 0.85
    positions: int = 256
    near_tie: float = 1e-3
    device_kl: float = 0.02
    device_correlation: float = 0.995
    clear_margin: float = 1.0

    def problems(self) -> list[str]:
        """Every bar that nothing or everything would pass."""
        found = []
        for name in ("float_logits", "kl_mean", "near_tie", "device_kl", "clear_margin"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                found.append(f"limits.{name} is {value}, expected a finite number from 0 on")
        for name in ("top1", "device_correlation"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                found.append(f"limits.{name} is {value}, expected 0 to 1")
        if self.positions < 1:
            found.append(f"limits.positions is {self.positions}, expected at least 1")
        return found


@dataclass(frozen=True)
class Recipe:
    """One named way to export a model.

    Attributes:
        name: for reports and the bundle's metadata.
        description: one line.
        export: static shapes.
        graph: choices of the graph.
        rewrites: float-exact rewrites of `hermes.rewrite`, in order.
        calibration: tokens to look at.
        quantization: rules, the first that matches a matrix counts.
        limits: bars of the ladder.
    """

    name: str
    description: str = ""
    export: ExportShapes = field(default_factory=ExportShapes)
    graph: GraphOptions = field(default_factory=GraphOptions)
    rewrites: tuple[str, ...] = ()
    calibration: Calibration = field(default_factory=Calibration)
    quantization: tuple[QuantizationRule, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        graph = replace(
            self.graph,
            norm_gains="fold_norm_gains" not in self.rewrites,
            mix_down_input="mix_down_input" in self.rewrites,
            scale_queries="fold_attention_scale" not in self.rewrites,
        )
        object.__setattr__(self, "graph", graph)

    def rule_for(self, parameter: str) -> QuantizationRule:
        """The first rule that matches a Hermes parameter name; float32 where none does."""
        for rule in self.quantization:
            if fnmatchcase(parameter, rule.tensors):
                return rule
        return QuantizationRule("*", "float32")

    def check_rules(self, parameters: Iterable[str]) -> None:
        """Refuse a rule that matches none of the model's parameters: it is a typing error."""
        names = list(parameters)
        unused = [
            rule.tensors
            for rule in self.quantization
            if not any(fnmatchcase(name, rule.tensors) for name in names)
        ]
        if unused:
            raise UsageError(
                f"recipe {self.name}: quantization rules match no parameter: {', '.join(unused)}",
                expected="patterns over Hermes names such as layers.*.mlp.down_proj.weight",
                todo="correct or remove these rules",
            )

    def with_shapes(self, context: int | None, prefill: Iterable[int] | None) -> Recipe:
        """The recipe with the command line's shapes; a given ladder is taken as it is."""
        shapes = self.export if context is None else replace(self.export, context=context)
        lengths = tuple(prefill or ())
        shapes = replace(shapes, prefill=lengths) if lengths else shapes.fitted()
        raise_for(shapes.problems(), f"recipe {self.name}")
        return replace(self, export=shapes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for reports and hashes."""
        return asdict(self)


def raise_for(problems: list[str], where: str) -> None:
    """Refuse a recipe with all that is wrong with it."""
    if problems:
        raise UsageError(
            f"{where} has {len(problems)} problem(s)",
            problems=problems,
            todo="correct these fields",
        )
