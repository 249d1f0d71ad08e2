"""Recipe: everything that may be chosen about an export, read from TOML.

A recipe knows names, bits and numbers, and nothing about any converter. Named recipes live in
`assets/recipes/`.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from hermes.assets import assets_folder
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
    prefill: tuple[int, ...] = (1, 8, 32, 128, 512)

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


@dataclass(frozen=True)
class GraphOptions:
    """Choices of the exported graph that do not change its numbers.

    Attributes:
        fuse_qkv: one matmul for the query, key and value projections.
        fuse_gate_up: one matmul for the gate and up projections.
        norm_gains: norms multiply by their gains; off where a rewrite has folded them. Set by
            `Recipe`, not by the file.
        mix_down_input: the feed-forward's product is multiplied by a Hadamard matrix in blocks;
            on where a rewrite put the inverse into the down projections. Set by `Recipe`.
        scale_queries: queries are multiplied by one over the root of the head width; off where a
            rewrite has folded that. Set by `Recipe`.
    """

    fuse_qkv: bool = True
    fuse_gate_up: bool = True
    norm_gains: bool = True
    mix_down_input: bool = False
    scale_queries: bool = True


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
    """

    sequences: int = 0
    tokens: int = 8

    def problems(self) -> list[str]:
        """Counts that mean nothing or too much."""
        found = []
        if not 0 <= self.sequences <= 1024:
            found.append(f"calibration.sequences is {self.sequences}, expected 0 to 1024")
        if not 1 <= self.tokens <= 1024:
            found.append(f"calibration.tokens is {self.tokens}, expected 1 to 1024")
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
    device_kl: float = 0.01
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
        _raise_for(shapes.problems(), f"recipe {self.name}")
        return replace(self, export=shapes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for reports and hashes."""
        return asdict(self)


_Section = TypeVar("_Section", ExportShapes, GraphOptions, Calibration, QuantizationRule, Limits)
_SECTIONS = (
    "name",
    "description",
    "export",
    "graph",
    "rewrites",
    "calibration",
    "quantization",
    "limits",
)
_CHOICES = {
    "weights": ("float32", "float16", "int8", "int4"),
    "granularity": ("channel", "tensor", "block32"),
    "activations": ("int8", "float32"),
    "rounding": ("nearest", "calibrated"),
}


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read a recipe by name (one of `assets/recipes/`) or by the path of a TOML file."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = recipe_folder() / f"{name_or_path}.toml"
    if not path.is_file():
        raise UsageError(
            f"no recipe {name_or_path}",
            expected=f"a .toml file or one of {', '.join(recipe_names())}",
            todo="choose with --recipe",
        )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}", todo="correct the recipe") from error
    return parse_recipe(values, str(path), default_name=path.stem)


def parse_recipe(values: Mapping[str, Any], where: str, default_name: str) -> Recipe:
    """Turn TOML values into a Recipe; unknown fields and wrong types are refused together."""
    problems = [f"unknown field {key}" for key in values if key not in _SECTIONS]
    shapes = _section(ExportShapes, values.get("export", {}), "export", problems)
    graph = _section(GraphOptions, values.get("graph", {}), "graph", problems)
    limits = _section(Limits, values.get("limits", {}), "limits", problems)
    calibration = _section(Calibration, values.get("calibration", {}), "calibration", problems)
    rewrites = values.get("rewrites", [])
    if not (isinstance(rewrites, list) and all(isinstance(name, str) for name in rewrites)):
        problems.append(f"rewrites is {rewrites!r}, expected a list of names")
    rules = []
    for index, entry in enumerate(_entries(values, problems)):
        rule = _section(QuantizationRule, entry, f"quantization[{index}]", problems)
        if rule is not None:
            rules.append(rule)
            problems.extend(rule.problems())
    for part in (shapes, calibration, limits):
        problems.extend(part.problems() if part is not None else ())
    for key in ("name", "description"):
        if not isinstance(values.get(key, ""), str):
            problems.append(f"{key} is {values[key]!r}, expected str")
    _raise_for(problems, where)
    return Recipe(
        name=str(values.get("name", default_name)),
        description=str(values.get("description", "")),
        export=cast(ExportShapes, shapes),
        graph=cast(GraphOptions, graph),
        rewrites=tuple(rewrites),
        calibration=cast(Calibration, calibration),
        quantization=tuple(rules),
        limits=cast(Limits, limits),
    )


def _entries(values: Mapping[str, Any], problems: list[str]) -> list[object]:
    entries = values.get("quantization", [])
    if isinstance(entries, list):
        return entries
    problems.append(f"quantization is {entries!r}, expected [[quantization]] tables")
    return []


def _section(
    kind: type[_Section], values: object, where: str, problems: list[str]
) -> _Section | None:
    if not isinstance(values, Mapping):
        problems.append(f"{where} is {values!r}, expected a table")
        return None
    types = {item.name: str(item.type) for item in fields(kind)}
    found = [f"unknown field {where}.{key}" for key in values if key not in types]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in types:
            continue
        converted = _convert(value, types[key])
        if converted is None or (key in _CHOICES and converted not in _CHOICES[key]):
            wanted = " or ".join(_CHOICES.get(key, (types[key],)))
            found.append(f"{where}.{key} is {value!r}, expected {wanted}")
        else:
            arguments[key] = converted
    if kind is QuantizationRule and "tensors" not in values:
        found.append(f"{where} has no tensors pattern")
    problems.extend(found)
    return None if found else kind(**arguments)


def _convert(value: object, wanted: str) -> object | None:
    if wanted == "bool":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    if wanted == "int":
        return value if isinstance(value, int) else None
    if wanted == "float":
        return float(value) if isinstance(value, (int, float)) else None
    if re.match(r"tuple\[int", wanted):
        integers = isinstance(value, list) and all(
            isinstance(item, int) and not isinstance(item, bool) for item in value
        )
        return tuple(cast("list[int]", value)) if integers else None
    return value if isinstance(value, str) else None


def _raise_for(problems: list[str], where: str) -> None:
    if problems:
        raise UsageError(
            f"{where} has {len(problems)} problem(s)",
            problems=problems,
            todo="correct these fields",
        )


def recipe_folder() -> Path:
    """Where the named recipes lie."""
    return assets_folder() / "recipes"


def recipe_names() -> list[str]:
    """Names that `load_recipe` knows."""
    return sorted(path.stem for path in recipe_folder().glob("*.toml"))
