"""The ladder: every rung that can run runs, and the lowest red one names the guilty stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, TypeAlias, TypeVar, cast

from hermes.errors import HermesError, NativeToolError, VerificationError
from hermes.recipe import Limits
from hermes.report.check import RUNG_NAMES, Check, Report, equals, holds
from hermes.runners.interface import LogitsRunner, Scorer, TokenRunner
from hermes.signatures import Signature
from hermes.verify.equivalence import (
    by_position,
    check_against_exportable,
    check_against_reference,
    feeds_for,
    observe_all,
    wanted_rows,
)
from hermes.verify.feeding import Observation, observe
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
from hermes.verify.quantized import (
    QuantizedResult,
    check_prefilled,
    check_quantized,
    repeated,
)
from hermes.verify.rewritten import POSITIONS, check_rewritten
from hermes.verify.runtime import RuntimeData, check_runtime
from hermes.verify.scores import KnownScores
from hermes.verify.transcript import describe

_T = TypeVar("_T")
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
        widths: numbers of cache slots at which the graph changes its path.
        repeated: a second interpreter for rungs 4 and 5.
        device: rung 8 as a function, if another processor was asked for.
        reasons: rung -> why its input is missing, for the report.
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
    widths: Sequence[int] = ()
    repeated: Repeated | None = None
    device: Callable[[], DeviceChecks] | None = None
    reasons: Mapping[int, str] = field(default_factory=dict)


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
            why = given.reasons.get(rung, "")
            state.climb.report.skipped[rung] = f"no {missing}{': ' if why else ''}{why}"
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
    """Rungs 3 and 4 share the exportable module's observations, all of them what was scored."""

    given: LadderInput
    climb: Climb
    _exported: Mapping[str, Observation] | None = None
    _exported_cache: CacheRows | None = None

    @cached_property
    def reference(self) -> KnownScores:
        """The oracle, on as much of the text as any rung asks for."""
        whole = self.given.rewritten is None or self.given.exportable is None
        ids = self.given.text_ids
        count = len(ids) if whole else self.given.limits.positions
        return KnownScores(_present(self.given.reference), ids[:count])

    @cached_property
    def rewritten(self) -> KnownScores:
        """The oracle with rewritten weights; rung 3 needs it at the end of the context."""
        ids = self.given.text_ids
        count = POSITIONS if self.given.exportable is None else len(ids)
        return KnownScores(_present(self.given.rewritten), ids[:count])

    def exported(self) -> Mapping[str, Observation]:
        if self._exported is None:
            with _present(self.given.exportable)() as runner:
                self._exported = observe_all(runner, self.given.text_ids, self.given.widths)
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
        ids, limit = self.given.text_ids, self.given.limits.float_logits
        return check_rewritten(self.rewritten, self.reference, ids, limit)

    def exportable(self) -> list[Check]:
        reference = self.given.rewritten or _present(self.given.reference)
        scores = self.reference if self.given.rewritten is None else self.rewritten
        ids, limit = self.given.text_ids, self.given.limits.float_logits
        observed = self.exported()
        wanted = wanted_rows(scores, ids, observed)
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
            observed = observe_all(runner, self.given.text_ids, self.given.widths)
            cache = self._snapshot(runner)
        limit = self.given.limits.float_logits
        checks += check_against_exportable(observed, self.exported(), limit)
        caches = (cache, self._exported_cache)
        checks += self._layers(4, "float flatbuffer", "exportable module", caches)
        other = self.given.repeated
        if other is not None and other.float_flatbuffer is not None:
            with other.float_flatbuffer() as runner:
                again = observe_all(runner, self.given.text_ids, self.given.widths)
            stage = f"float flatbuffer in {other.name}"
            found = check_against_exportable(again, self.exported(), limit, stage)
            checks += [check for check in found if check.name.startswith(stage)]
        return checks

    def quantized(self) -> list[Check]:
        given = self.given
        with _present(given.flatbuffer)() as runner:
            result, prefilled = self._compare_quantized(runner)
        series = self.climb.report.series
        series["KL by position"] = result.comparison.kl.tolist()
        series["largest logit difference by position"] = result.comparison.largest.tolist()
        checks = result.checks + prefilled
        if given.repeated is not None:
            with given.repeated.flatbuffer() as runner:
                again = check_quantized(self.reference, runner, given.text_ids, given.limits)
                checks += repeated(again.checks, runner.name)
        return checks

    def _compare_quantized(self, runner: LogitsRunner) -> tuple[QuantizedResult, list[Check]]:
        """The comparison; where no rung proves the file's graph, its prefill against its decode."""
        ids, limits = self.given.text_ids, self.given.limits
        if self.given.exportable is not None:
            return check_quantized(self.reference, runner, ids, limits), []
        # To the last slot, so that there is a row for every position that a feed shows.
        most = min(len(ids), runner.capacity, self.reference.capacity)
        limits = replace(limits, positions=max(limits.positions, most))
        seen = observe(runner, ids, feeds_for(runner, most, self.given.widths))
        keep = {position for rows in seen.values() for position, _ in rows}
        result = check_quantized(self.reference, runner, ids, limits, keep=keep)
        return result, check_prefilled(seen, result.rows, limits.kl_mean)

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

    def device(self) -> list[Check]:
        found = _present(self.given.device)()
        self.climb.report.series.update(found.series)
        return found.checks


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
    if given.device is not None:
        needs[8] = (state.device, {})
    return {
        rung: (run, next((name for name, value in inputs.items() if value is None), ""))
        for rung, (run, inputs) in needs.items()
    }


def _present(value: _T | None) -> _T:
    if value is None:
        raise ValueError("a rung ran without its input")
    return value
