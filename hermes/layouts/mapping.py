"""A foreign checkpoint as a Hermes model: every name, shape and field accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hermes.checkpoint.source import WEIGHT_DTYPES, Checkpoint, LazyTensor, same_values
from hermes.config import HermesConfig
from hermes.errors import BadInputError, UnsupportedModelError
from hermes.layouts.adapters import ADAPTER_WORDS, merge_adapters
from hermes.layouts.config_reading import config_family
from hermes.layouts.config_resolve import Resolved, demand, merged_facts, resolve
from hermes.layouts.finite import checked, narrowed
from hermes.layouts.leftovers import Leftovers, sort_leftovers
from hermes.layouts.matching import Match, choose
from hermes.layouts.operations import Context
from hermes.layouts.registry import LAYOUTS
from hermes.layouts.saved_tables import mask_problem, table_problem
from hermes.layouts.shapes import Evidence, gather
from hermes.layouts.table import Rule
from hermes.parameters import EMBEDDING, HEAD, parameter_shapes

_MOST_LINES = 24
_OPTIONAL = (".bias", "q_norm.weight", "k_norm.weight")


@dataclass
class MappedModel:
    """A checkpoint in Hermes' names and conventions; tensors are still lazy.

    Attributes:
        config: complete and checked.
        config_sources: field -> where its value came from.
        weights: Hermes names in model order; `read` gives converted rows and refuses NaN.
        layout: name of the table used.
        evidence: why that table.
        used: name in the file -> the Hermes names it fed.
        ignored: (name in the file, reason) of what was left out.
        warnings: what a careful reader should know.
    """

    config: HermesConfig
    config_sources: dict[str, str]
    weights: dict[str, LazyTensor]
    layout: str
    evidence: list[str]
    used: dict[str, list[str]]
    ignored: list[tuple[str, str]]
    warnings: list[str] = field(default_factory=list)


def map_checkpoint(
    checkpoint: Checkpoint, *, layout: str = "auto", config: Mapping[str, object] | None = None
) -> MappedModel:
    """Find the layout, read the configuration and map every tensor.

    Args:
        checkpoint: as opened.
        layout: a table's name, or `auto`.
        config: fields that override the checkpoint's own, in any known spelling.

    Raises:
        BadInputError: missing, surplus or mis-shaped tensors, contradictions, fields that only
            the user can know; all of them in one error.
        UnsupportedModelError: maths that Hermes lacks, together with everything above.
    """
    given = dict(config or {})
    settings = {word: given.pop(word) for word in ADAPTER_WORDS & given.keys()}
    merged = merge_adapters(checkpoint, settings)
    checkpoint, config = merged.checkpoint, given or None
    described = checkpoint.config if checkpoint.config is not None else config
    family = config_family(described) if described is not None else None
    model_type = described.get("model_type") if described is not None else None
    names = list(checkpoint.tensors)
    match, evidence = choose(LAYOUTS, names, family, layout, model_type, str(checkpoint.path))
    facts = merged_facts(checkpoint.config, checkpoint.config_origin, config)
    shapes = gather(match, checkpoint.tensors)
    resolved = resolve(facts, shapes, match.layout)
    leftovers = sort_leftovers(match.unmatched, checkpoint.tensors, match.layout)
    report = _Report(checkpoint, match, shapes, resolved, leftovers)
    report.check()
    report.raise_problems()
    assert resolved.config is not None
    model = _Mapper(report, resolved.config, evidence).build()
    for base, parts in merged.parts.items():
        model.used |= dict.fromkeys(parts, model.used[base])
    model.warnings += merged.notes
    return model


@dataclass
class _Report:
    """Collects what is wrong before anything is raised."""

    checkpoint: Checkpoint
    match: Match
    shapes: Evidence
    resolved: Resolved
    leftovers: Leftovers
    problems: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    placeholders: bool = False

    def check(self) -> None:
        self.problems += self.resolved.problems
        self.refused += self.resolved.refused + self.leftovers.refused
        self.problems += self._missing()
        self.problems += self.leftovers.surplus
        self._dtypes()
        config = self.resolved.config
        comparable = config or self.shapes.provisional_config()
        if comparable is not None:
            self.problems += self._misshaped(comparable)
        if config is None:
            self.problems += [f"nothing tells {item}" for item in self.resolved.demanded]
        elif not self.problems:
            self.problems += self._contradicting_tables(config)

    def _missing(self) -> list[str]:
        present = {layer for _, layer in self.match.found if layer is not None}
        absent = self.match.layers - len(present)
        lines = [f"{absent} of {self.match.layers} layers are missing entirely"] if absent else []
        tied = self.resolved.values.get("tie_embeddings") is not False
        for source, rule in self.match.layout.sources().items():
            optional = source.endswith(_OPTIONAL) and not self._wanted(rule)
            if optional or (rule.targets == (HEAD,) and tied):
                continue
            for layer in sorted(present) if rule.per_layer else [None]:
                if (source, layer) not in self.match.found:
                    lines.append(f"{self.match.prefix}{_numbered(source, layer)} is missing")
        return lines

    def _wanted(self, rule: Rule) -> bool:
        """Whether the configuration asks for this bias or norm."""
        values = self.resolved.values
        for target in rule.targets:
            name = target.rpartition(".self_attn.")[2]
            if name.startswith(("q_norm", "k_norm")):
                return values.get("qk_norm") is True
            if name.startswith("o_proj"):
                return values.get("output_bias") is True
            if name.startswith(("q_proj", "k_proj", "v_proj")):
                return values.get("attention_bias") is True
        return values.get("mlp_bias") is True

    def _dtypes(self) -> None:
        for name in self.match.found.values():
            tensor = self.checkpoint.tensors[name]
            if tensor.dtype not in WEIGHT_DTYPES and not tensor.dtype.isupper():
                self.refused.append(
                    f"{tensor.name} is {tensor.dtype}: already quantized, or not a weight"
                )

    def _misshaped(self, config: HermesConfig) -> list[str]:
        lines = []
        shapes = parameter_shapes(replace(config, tie_embeddings=False))
        context = Context(config, self.resolved.pairing)
        for rule, layer, sources in _applications(self.match):
            targets = [shapes.get(_numbered(target, layer)) for target in rule.targets]
            wanted = [shape for shape in targets if shape is not None]
            if len(wanted) < len(targets):
                continue  # a layer or bias that the configuration lacks; reported elsewhere
            expected = rule.operation.source_shapes(wanted, context)
            for name, shape in zip(sources, expected, strict=True):
                tensor = self.checkpoint.tensors[name]
                if tensor.shape != shape:
                    self.placeholders |= tensor.numel <= 1
                    lines.append(
                        f"{tensor.name} has shape {list(tensor.shape)}, expected {list(shape)}"
                    )
        return lines

    def _contradicting_tables(self, config: HermesConfig) -> list[str]:
        found = [table_problem(table, config) for table in self.leftovers.tables]
        found += [mask_problem(mask) for mask in self.leftovers.masks]
        return [problem for problem in found if problem is not None]

    def raise_problems(self) -> None:
        lines = self.refused + self.problems
        if not lines:
            return
        title = self.match.layout.title
        found = f"{self.checkpoint.path}: {len(lines)} problem(s) as a {title} model"
        shown = lines[:_MOST_LINES]
        if len(lines) > len(shown):
            shown.append(f"and {len(lines) - len(shown)} more")
        kind = UnsupportedModelError if self.refused else BadInputError
        raise kind(
            found,
            problems=shown,
            expected="every tensor and field known, used once and consistent",
            todo=self._todo(),
        )

    def _todo(self) -> str:
        if self.placeholders:
            return (
                "tensors of 0 or 1 elements are placeholders of sharded training (ZeRO, FSDP): "
                "gather the full weights where the model was trained, then save them"
            )
        if self.resolved.demanded:
            return demand(self.resolved)
        if self.refused:
            return "Hermes cannot compute this; bring a model without it"
        return "bring the complete file, or correct the configuration with --config"


@dataclass
class _Mapper:
    report: _Report
    config: HermesConfig
    evidence: list[str]
    used: dict[str, list[str]] = field(default_factory=dict)
    loaded: dict[str, LazyTensor] = field(default_factory=dict)

    def build(self) -> MappedModel:
        report, resolved = self.report, self.report.resolved
        warnings = list(resolved.warnings)
        self._load()
        self._settle_head(warnings)
        names = parameter_shapes(self.config)
        tables = [(table.name, "rotary table, as configured") for table in report.leftovers.tables]
        masks = [(mask.name, "causal mask") for mask in report.leftovers.masks]
        wide = sum(1 for tensor in report.checkpoint.tensors.values() if tensor.dtype == "float64")
        if wide:
            warnings.append(f"{wide} float64 tensors are rounded to float32")
        return MappedModel(
            config=self.config,
            config_sources=resolved.sources,
            weights={name: narrowed(self.loaded[name]) for name in names},
            layout=report.match.layout.name,
            evidence=self.evidence,
            used=self.used,
            ignored=[*report.checkpoint.ignored, *report.leftovers.ignored, *tables, *masks],
            warnings=warnings,
        )

    def _load(self) -> None:
        context = Context(self.config, self.report.resolved.pairing)
        shapes = parameter_shapes(replace(self.config, tie_embeddings=False))
        for rule, layer, sources in _applications(self.report.match):
            tensors = [checked(self.report.checkpoint.tensors[name]) for name in sources]
            targets = [_numbered(target, layer) for target in rule.targets]
            results = rule.operation.load(tensors, [shapes[name] for name in targets], context)
            for target, tensor in zip(targets, results, strict=True):
                self.loaded[target] = tensor.renamed(target)
            for tensor in tensors:
                self.used[tensor.name] = targets

    def _settle_head(self, warnings: list[str]) -> None:
        """A stored head is used unless it is the embedding itself, whatever the config says."""
        sources = self.report.resolved.sources
        said, where = self.config.tie_embeddings, sources["tie_embeddings"]
        if HEAD not in self.loaded:
            return
        raw = {
            source: self.report.checkpoint.tensors[name]
            for (source, _), name in self.report.match.found.items()
        }
        rules = self.report.match.layout.sources()
        head = next(raw[source] for source in raw if rules[source].targets == (HEAD,))
        table = next(raw[source] for source in raw if rules[source].targets == (EMBEDDING,))
        tied = same_values(head, table)
        if tied:
            self.used[head.name] = [EMBEDDING]
            sources["tie_embeddings"] = "the stored head equals the embedding bit for bit"
        elif said:
            warnings.append(
                f"{where} says that the head is the embedding, but {head.name} differs from it: "
                "the stored head is used"
            )
            sources["tie_embeddings"] = "the stored head differs from the embedding"
        if tied != said:
            self.config = replace(self.config, tie_embeddings=tied)


def _applications(match: Match) -> Iterator[tuple[Rule, int | None, list[str]]]:
    """Every rule with every layer for which the file has all its sources."""
    for rule in match.layout.rules:
        for layer in range(match.layers) if rule.per_layer else [None]:
            names = [match.found.get((source, layer)) for source in rule.sources]
            present = [name for name in names if name is not None]
            if len(present) == len(names):
                yield rule, layer, present


def _numbered(name: str, layer: int | None) -> str:
    return name if layer is None else name.replace("{}", str(layer))
