"""Rung 0: every tensor of the checkpoint and of the model is accounted for, with its shape.

The mapping raises on its first contradiction; this repeats the accounting from its result alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from hermes.config import HermesConfig
from hermes.parameters import parameter_shapes
from hermes.report.check import Check, equals, holds, measured
from hermes.signatures import Signature, TensorSpec


class Shaped(Protocol):
    """Anything with a shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Mapped(Protocol):
    """What rung 0 reads of `hermes.layouts.MappedModel`."""

    @property
    def config(self) -> HermesConfig: ...
    @property
    def weights(self) -> Mapping[str, Shaped]: ...
    @property
    def layout(self) -> str: ...
    @property
    def used(self) -> Mapping[str, Sequence[str]]: ...
    @property
    def ignored(self) -> Sequence[tuple[str, str]]: ...


def check_keys(mapped: Mapped, source_keys: Collection[str]) -> list[Check]:
    """Both directions: model parameters without a source, and source tensors without a use."""
    wanted = parameter_shapes(mapped.config)
    missing = [name for name in wanted if name not in mapped.weights]
    surplus = [name for name in mapped.weights if name not in wanted]
    misshaped = [
        f"{name} {list(mapped.weights[name].shape)}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in mapped.weights and tuple(mapped.weights[name].shape) != shape
    ]
    ignored = [key for key, _ in mapped.ignored]
    unused = [key for key in source_keys if key not in mapped.used and key not in ignored]
    fed = {name for names in mapped.used.values() for name in names}
    unfed = [name for name in wanted if name not in fed]
    return [
        holds("layout", 0, True, mapped.layout),
        measured("source tensors used", 0, len(mapped.used)),
        measured("source tensors ignored by name", 0, len(ignored), _listed(ignored)),
        equals("parameters missing", 0, len(missing) + len(unfed), 0, _listed(missing + unfed)),
        equals("parameters surplus", 0, len(surplus), 0, _listed(surplus)),
        equals("parameters with a wrong shape", 0, len(misshaped), 0, _listed(misshaped)),
        equals("source tensors unaccounted for", 0, len(unused), 0, _listed(unused)),
    ]


def signature_problems(found: Sequence[Signature], wanted: Sequence[Signature]) -> list[str]:
    """Differences between the signatures of a file and those that were asked for.

    Order does not matter: the runtime binds by name.
    """
    present = {item.name: item for item in found}
    expected = {item.name: item for item in wanted}
    problems = [f"signature {name} is missing" for name in expected if name not in present]
    problems += [f"signature {name} is surplus" for name in present if name not in expected]
    for name in expected:
        if name in present:
            problems += _spec_problems(f"{name} input", present[name].inputs, expected[name].inputs)
            problems += _spec_problems(
                f"{name} output", present[name].outputs, expected[name].outputs
            )
    return problems


def _spec_problems(
    where: str, found: Sequence[TensorSpec], wanted: Sequence[TensorSpec]
) -> list[str]:
    present = {spec.name: spec for spec in found}
    problems = []
    for spec in wanted:
        got = present.pop(spec.name, None)
        if got is None:
            problems.append(f"{where} {spec.name} is missing")
        elif got != spec:
            problems.append(
                f"{where} {spec.name} is {got.dtype} {list(got.shape)}, "
                f"expected {spec.dtype} {list(spec.shape)}"
            )
    return problems + [f"{where} {name} is surplus" for name in present]


def _listed(names: Sequence[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
