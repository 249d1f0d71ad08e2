"""What a ladder is climbed with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from hermes.recipe import Limits
from hermes.report.check import Check
from hermes.runners.background import Background, Job
from hermes.runners.interface import LogitsRunner, Scorer, TokenRunner
from hermes.signatures import Signature
from hermes.verify.golden import Golden
from hermes.verify.keys import Mapped
from hermes.verify.quantized import Stepped
from hermes.verify.runtime import RuntimeData

OpenLogits: TypeAlias = Callable[[], AbstractContextManager[LogitsRunner]]
"""Opens a runner for one rung, so that no two models are in memory longer than needed."""
OpenTokens: TypeAlias = Callable[[], AbstractContextManager[TokenRunner]]


class DeviceChecks(Protocol):
    """What came of rung 8."""

    checks: list[Check]
    series: dict[str, list[float]]


@dataclass(frozen=True)
class Repeated:
    """A second interpreter that rungs 4 and 5 are repeated with.

    Attributes:
        name: for the checks.
        float_flatbuffer: the float32 bound file in it; None where there is none.
        flatbuffer: the bundle's own file in it.
    """

    name: str
    float_flatbuffer: OpenLogits | None
    flatbuffer: OpenLogits


@dataclass(frozen=True)
class LadderInput:
    """What there is to verify; a rung whose input is None is skipped and the report says so.

    Attributes:
        limits: bars, from the recipe.
        text_ids: tokens of real text for rungs 3, 4 and 5; at least a context full.
        mapped: the mapping's result, and
        source_keys: every tensor name of the checkpoint.
        golden: logits of the user's training code.
        reference: the oracle.
        rewritten: the oracle with rewritten weights; None if the recipe rewrites nothing, and
        scaled_values: whether its cached values have another scale.
        exportable: the static-shape module.
        float_flatbuffer: the float32 bound file.
        signatures: what was asked of the file, and
        file_signatures: what it says of itself.
        flatbuffer: the file bound by the recipe, as it is in the bundle.
        runtime: the bundle in LiteRT-LM, and
        runtime_data: what to say to it.
        tokenizer_rung: rung 6 as a function, from the tokenizer room.
        localise: compare the caches over the whole context, not only a short prompt.
        widths: numbers of cache slots at which the graph changes its path.
        repeated: a second interpreter for rungs 4 and 5.
        device: rung 8 as a function, if another processor was asked for.
        stepped: rung 5's file on the text, if that was begun before the models were read.
        background: does what needs no float model while the float rungs compute; None for one
            after the other.
        reasons: rung -> why its input is missing, for the report.
    """

    limits: Limits
    text_ids: Sequence[int] = ()
    mapped: Mapped | None = None
    source_keys: Collection[str] = ()
    golden: Golden | None = None
    reference: Scorer | None = None
    rewritten: Scorer | None = None
    scaled_values: bool = False
    exportable: OpenLogits | None = None
    float_flatbuffer: OpenLogits | None = None
    signatures: Sequence[Signature] = ()
    file_signatures: Sequence[Signature] | None = None
    flatbuffer: OpenLogits | None = None
    runtime: OpenTokens | None = None
    runtime_data: RuntimeData | None = None
    tokenizer_rung: Callable[[], list[Check]] | None = None
    localise: bool = False
    widths: Sequence[int] = ()
    repeated: Repeated | None = None
    device: Callable[[], DeviceChecks] | None = None
    stepped: Job[Stepped] | None = None
    background: Background | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)
