"""Recipes as TOML files; the named ones live in `assets/recipes/`."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from hermes.assets import assets_folder
from hermes.errors import UsageError
from hermes.recipe import (
    DERIVED_GRAPH_OPTIONS,
    Calibration,
    ExportShapes,
    GraphOptions,
    Limits,
    QuantizationRule,
    Recipe,
    raise_for,
)

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
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}", todo="correct the recipe") from error
    return read_recipe_text(text, str(path))


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
    raise_for(problems, where)
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


def recipe_folder() -> Path:
    """Where the named recipes lie."""
    return assets_folder() / "recipes"


def recipe_names() -> list[str]:
    """Names that `load_recipe` knows."""
    return sorted(path.stem for path in recipe_folder().glob("*.toml"))


def recipe_text(recipe: Recipe) -> str:
    """The TOML that `read_recipe_text` turns into an equal recipe."""
    import tomli_w

    facts = asdict(recipe)
    facts["graph"] = {k: v for k, v in facts["graph"].items() if k not in DERIVED_GRAPH_OPTIONS}
    text: str = tomli_w.dumps(_plain(facts))
    return text


def read_recipe_text(text: str, where: str) -> Recipe:
    """A recipe from TOML; `where` names its place in messages."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: not valid TOML: {error}", todo="correct the recipe") from error
    return parse_recipe(values, where, default_name=Path(where).stem)


def write_recipe(recipe: Recipe, target: Path) -> None:
    """Put the file in place when it is complete."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(recipe_text(recipe))
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    """Tuples as lists, and no None, which TOML does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
