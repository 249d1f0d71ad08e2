"""The ladder: every rung that can run runs, and the lowest red one names the guilty stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

from hermes.errors import HermesError, NativeToolError, VerificationError
from hermes.recipe import Limits
from hermes.report.check import RUNG_NAMES, Check, Report, equals, holds
from hermes.runners.interface import LogitsRunner, Scorer, TokenRunner
from hermes.signatures import Signature
from hermes.verify.equivalence import (
    by_position,
    check_against_exportable,
    check_against_reference,
    observe_all,
    wanted_rows,
)
from hermes.verify.feeding import Observation
from hermes.verify.golden import Golden, check_golden
from hermes.verify.keys import Mapped, check_keys, signature_problems
from hermes.verify.localise import (
    SHORT,
    CacheReader,
    CacheRows,
    by_layer,
    check_layers,
    layer_differences,
    snapshot,
)
from hermes.verify.quantized import check_quantized
from hermes.verify.rewritten import check_rewritten
from hermes.verify.runtime import RuntimeData, check_runtime
from hermes.verify.transcript import describe

_T = TypeVar("_T")
OpenLogits: TypeAlias = Callable[[], AbstractContextManager[LogitsRunner]]
"""Opens a runner for one rung, so that no two models are in memory longer than needed."""
OpenTokens: TypeAlias = Callable[[], AbstractContextManager[TokenRunner]]


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
        rewritten: the oracle with rewritten weights; None if the recipe rewrites nothing.
        exportable: the static-shape module.
        float_flatbuffer: the float32 bound file.
        signatures: what was asked of the file, and
        file_signatures: what it says of itself.
        flatbuffer: the file bound by the recipe, as it is in the bundle.
        runtime: the bundle in LiteRT-LM, and
        runtime_data: what to say to it.
        tokenizer_rung: rung 6 as a function, from the tokenizer room.
        localise: compare the caches over the whole context, not only a short prompt.
        reason: why inputs are missing, for the report.
    """

    limits: Limits
    text_ids: Sequence[int] = ()
    mapped: Mapped | None = None
    source_keys: Collection[str] = ()
    golden: Golden | None = None
    reference: Scorer | None = None
    rewritten: Scorer | None = None
    exportable: OpenLogits | None = None
    float_flatbuffer: OpenLogits | None = None
    signatures: Sequence[Signature] = ()
    file_signatures: Sequence[Signature] | None = None
    flatbuffer: OpenLogits | None = None
    runtime: OpenTokens | None = None
    runtime_data: RuntimeData | None = None
    tokenizer_rung: Callable[[], list[Check]] | None = None
    localise: bool = False
    reason: str = ""


@dataclass
class Climb:
    """What came of the ladder.

    Attributes:
        report: checks, skipped rungs and series; the caller adds its facts.
        died: the first death of a native library, for the exit code.
    """

    report: Report = field(default_factory=Report)
    died: NativeToolError | None = None

    def error(self) -> HermesError | None:
        """What the command should end with; None if everything is green."""
        if self.died is not None:
            return self.died
        if self.report.passed:
            return None
        red = [check for check in self.report.checks if not check.passed]
        return VerificationError(
            self.report.verdict,
            problems=[f"rung {item.rung}: {item.name} is {item.value}" for item in red],
            expected="every rung green",
            todo="look at the first red rung: it compares a stage with its neighbour",
        )


def climb(given: LadderInput, on_rung: Callable[[int, str], None] | None = None) -> Climb:
    """Run the rungs from 0 upwards; a rung that raises is red and the next one still runs.

    Args:
        given: what there is.
        on_rung: called with the number and name of each rung before it runs.
    """
    state = _State(given, Climb())
    for rung, (run, missing) in _rungs(state).items():
        if missing:
            why = f": {given.reason}" if given.reason else ""
            state.climb.report.skipped[rung] = f"no {missing}{why}"
            continue
        if on_rung is not None:
            on_rung(rung, RUNG_NAMES[rung])
        try:
            state.climb.report.checks.extend(run())
        except HermesError as error:
            state.climb.report.checks.append(holds("the rung ran", rung, False, "no", str(error)))
            if isinstance(error, NativeToolError) and state.climb.died is None:
                state.climb.died = error
    return state.climb


@dataclass
class _State:
    """Rungs 3 and 4 share the exportable module's observations."""

    given: LadderInput
    climb: Climb
    _exported: Mapping[str, Observation] | None = None
    _exported_cache: CacheRows | None = None

    def exported(self) -> Mapping[str, Observation]:
        if self._exported is None:
            with _present(self.given.exportable)() as runner:
                self._exported = observe_all(runner, self.given.text_ids)
                self._exported_cache = self._snapshot(runner)
        return self._exported

    def _snapshot(self, runner: object) -> CacheRows | None:
        """The runner's cache after the start of the text, if it shows it."""
        if not isinstance(runner, CacheReader):
            return None
        ids = self.given.text_ids
        capacity = cast("LogitsRunner", runner).capacity
        count = min(capacity, len(ids)) if self.given.localise else min(SHORT, capacity)
        return snapshot(cast("LogitsRunner", runner), ids, count)

    def _layers(
        self, rung: int, stage: str, neighbour: str, pair: tuple[CacheRows | None, CacheRows | None]
    ) -> list[Check]:
        found, wanted = pair
        if found is None or wanted is None:
            return []
        differences = layer_differences(found, wanted)
        limit = self.given.limits.float_logits
        series = f"difference by layer, {stage} from {neighbour}"
        self.climb.report.series[series] = by_layer(differences)
        return [check_layers(rung, stage, neighbour, differences, limit)]

    def keys(self) -> list[Check]:
        return check_keys(_present(self.given.mapped), self.given.source_keys)

    def golden(self) -> list[Check]:
        reference = _present(self.given.reference)
        return check_golden(_present(self.given.golden), reference, self.given.limits.float_logits)

    def rewrites(self) -> list[Check]:
        return check_rewritten(
            _present(self.given.rewritten),
            _present(self.given.reference),
            self.given.text_ids,
            self.given.limits.float_logits,
        )

    def exportable(self) -> list[Check]:
        reference = self.given.rewritten or _present(self.given.reference)
        ids, limit = self.given.text_ids, self.given.limits.float_logits
        observed = self.exported()
        wanted = wanted_rows(reference, ids, observed)
        checks = check_against_reference(observed, wanted, limit)
        series = "logit difference by position, exportable module from reference"
        self.climb.report.series[series] = by_position(observed, wanted)
        caches = (self._exported_cache, self._snapshot(reference))
        return checks + self._layers(3, "exportable module", "reference", caches)

    def float_file(self) -> list[Check]:
        checks = []
        if self.given.file_signatures is not None:
            problems = signature_problems(self.given.file_signatures, self.given.signatures)
            checks.append(equals("signature differences", 4, len(problems), 0, "; ".join(problems)))
        with _present(self.given.float_flatbuffer)() as runner:
            observed = observe_all(runner, self.given.text_ids)
            cache = self._snapshot(runner)
        limit = self.given.limits.float_logits
        checks += check_against_exportable(observed, self.exported(), limit)
        caches = (cache, self._exported_cache)
        return checks + self._layers(4, "float flatbuffer", "exportable module", caches)

    def quantized(self) -> list[Check]:
        with _present(self.given.flatbuffer)() as runner:
            result = check_quantized(
                _present(self.given.reference), runner, self.given.text_ids, self.given.limits
            )
        series = self.climb.report.series
        series["KL by position"] = result.comparison.kl.tolist()
        series["largest logit difference by position"] = result.comparison.largest.tolist()
        return result.checks

    def tokenizer(self) -> list[Check]:
        return _present(self.given.tokenizer_rung)()

    def runtime(self) -> list[Check]:
        data = _present(self.given.runtime_data)
        with _present(self.given.runtime)() as runtime, _present(self.given.flatbuffer)() as file:
            result = check_runtime(runtime, file, data, self.given.limits.near_tie)
            transcript = [
                describe(entry, self.given.reference, runtime, data) for entry in result.transcript
            ]
        report = self.climb.report
        report.series["agreement along the generation"] = result.agreement_along()
        report.facts["transcript"] = {str(n): entry for n, entry in enumerate(transcript, 1)}
        return result.checks


def _rungs(state: _State) -> dict[int, tuple[Callable[[], list[Check]], str]]:
    """Each rung with the first input it lacks, '' if it can run."""
    given = state.given
    needs: dict[int, tuple[Callable[[], list[Check]], dict[str, object]]] = {
        0: (state.keys, {"checkpoint mapping": given.mapped}),
        1: (state.golden, {"golden logits": given.golden, "reference": given.reference}),
        2: (state.rewrites, {"rewrites": given.rewritten, "reference": given.reference}),
        3: (
            state.exportable,
            {"exportable module": given.exportable, "reference": given.reference},
        ),
        4: (
            state.float_file,
            {"float flatbuffer": given.float_flatbuffer, "exportable module": given.exportable},
        ),
        5: (state.quantized, {"flatbuffer": given.flatbuffer, "reference": given.reference}),
        6: (state.tokenizer, {"tokenizer rung": given.tokenizer_rung}),
        7: (
            state.runtime,
            {
                "runtime": given.runtime,
                "flatbuffer": given.flatbuffer,
                "prompts": given.runtime_data,
            },
        ),
    }
    return {
        rung: (run, next((name for name, value in inputs.items() if value is None), ""))
        for rung, (run, inputs) in needs.items()
    }


def _present(value: _T | None) -> _T:
    if value is None:
        raise ValueError("a rung ran without its input")
    return value
