"""The rungs: what each of them runs, shares with the others, and makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeVar, cast

from hermes.report.check import Check, Report, equals
from hermes.runners.background import Job
from hermes.runners.interface import LogitsRunner
from hermes.verify.equivalence import (
    by_position,
    check_against_exportable,
    check_against_reference,
    observe_all,
    wanted_rows,
)
from hermes.verify.feeding import Observation
from hermes.verify.golden import check_golden
from hermes.verify.keys import check_keys, signature_problems
from hermes.verify.ladder_input import LadderInput, OpenLogits
from hermes.verify.localise import (
    SHORT,
    CacheReader,
    CacheRows,
    by_layer,
    check_layers,
    keys_only,
    layer_differences,
    snapshot,
)
from hermes.verify.quantized import (
    QuantizedResult,
    Stepped,
    check_quantized,
    check_stepped,
    repeated,
    step_through,
)
from hermes.verify.rewritten import check_rewritten
from hermes.verify.runtime import RuntimeResult, check_runtime
from hermes.verify.scores import KnownScores
from hermes.verify.transcript import Stepper, described, float_answer

_T = TypeVar("_T")
_Seen = tuple[Mapping[str, Observation], CacheRows | None]
"""What a float stage shows: its logits, feed by feed, and its cache after the start of the text."""


class Rungs:
    """Each rung as a method, over what they have in common.

    What needs no float model in this process begins at once, if there is a `background` for it.

    Attributes:
        report: series and facts; the checks are returned.
        elsewhere: seconds that other threads computed for the rungs so far, less those that the
            rungs waited for them.
    """

    def __init__(self, given: LadderInput) -> None:
        self.given = given
        self.report = Report()
        self.elsewhere = 0.0
        self._stepped = given.stepped or self._begin(self._step, given.flatbuffer, given.reference)
        self._float = self._begin(self._observe_float, given.float_flatbuffer, given.exportable)
        self._prompt = self._begin(lambda: _present(given.tokenizer_rung)(), given.tokenizer_rung)
        self._spoken = self._begin(self._speak, given.runtime, given.flatbuffer, given.runtime_data)
        self._compared = Job(self._compare)

    def _begin(self, work: Callable[[], _T], *needed: object) -> Job[_T]:
        background = self.given.background
        ready = background is not None and all(item is not None for item in needed)
        return background.begin(work) if background is not None and ready else Job(work)

    def _result(self, job: Job[_T]) -> _T:
        """The job's value; an error is the rung's that asks."""
        started = time.monotonic()
        try:
            return job.result()
        finally:
            self.elsewhere += job.seconds - (time.monotonic() - started)

    @cached_property
    def reference(self) -> KnownScores:
        """The oracle, on as much of the text as any rung asks for."""
        whole = self.given.rewritten is None or self.given.exportable is None
        ids = self.given.text_ids
        count = len(ids) if whole else self.given.limits.positions
        return KnownScores(_present(self.given.reference), ids[:count])

    @cached_property
    def _rewritten_cache(self) -> CacheRows | None:
        """What rungs 2 and 3 compare."""
        return self._snapshot(self.given.rewritten)

    @cached_property
    def _exported(self) -> _Seen:
        """The exportable module, which rungs 3 and 4 look at."""
        return self._seen(_present(self.given.exportable))

    def _observe_float(self) -> _Seen:
        return self._seen(_present(self.given.float_flatbuffer))

    def _seen(self, open_runner: OpenLogits) -> _Seen:
        with open_runner() as runner:
            observed = observe_all(runner, self.given.text_ids, self.given.widths)
            return observed, self._snapshot(runner)

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
        self.report.series[series] = by_layer(differences)
        return [check_layers(rung, stage, neighbour, differences, limit)]

    def keys(self) -> list[Check]:
        """Rung 0."""
        return check_keys(_present(self.given.mapped), self.given.source_keys)

    def golden(self) -> list[Check]:
        """Rung 1."""
        reference = _present(self.given.reference)
        return check_golden(_present(self.given.golden), reference, self.given.limits.float_logits)

    def rewrites(self) -> list[Check]:
        """Rung 2."""
        ids, limit = self.given.text_ids, self.given.limits.float_logits
        checks = check_rewritten(_present(self.given.rewritten), self.reference, ids, limit)
        found, wanted = self._rewritten_cache, self._snapshot(self.given.reference)
        if self.given.scaled_values and found is not None and wanted is not None:
            found, wanted = keys_only(found), keys_only(wanted)
        return checks + self._layers(2, "rewritten model", "reference", (found, wanted))

    def exportable(self) -> list[Check]:
        """Rung 3."""
        twin = self.given.rewritten
        if twin is not None:
            # No rung after this asks the oracle itself before rung 5 has its answer.
            self._compared = self._begin(self._compare, self.given.flatbuffer)
        ids, limit = self.given.text_ids, self.given.limits.float_logits
        observed, cache = self._exported
        wanted = wanted_rows(self.reference if twin is None else twin, ids, observed)
        checks = check_against_reference(observed, wanted, limit)
        series = "logit difference by position, exportable module from reference"
        self.report.series[series] = by_position(observed, wanted)
        wanted_cache = (
            self._snapshot(self.given.reference) if twin is None else self._rewritten_cache
        )
        caches = (cache, wanted_cache)
        return checks + self._layers(3, "exportable module", "reference", caches)

    def float_file(self) -> list[Check]:
        """Rung 4."""
        checks = []
        if self.given.file_signatures is not None:
            problems = signature_problems(self.given.file_signatures, self.given.signatures)
            checks.append(equals("signature differences", 4, len(problems), 0, "; ".join(problems)))
        observed, cache = self._result(self._float)
        exported, exported_cache = self._exported
        limit = self.given.limits.float_logits
        checks += check_against_exportable(observed, exported, limit)
        caches = (cache, exported_cache)
        checks += self._layers(4, "float flatbuffer", "exportable module", caches)
        other = self.given.repeated
        if other is not None and other.float_flatbuffer is not None:
            again, _ = self._seen(other.float_flatbuffer)
            stage = f"float flatbuffer in {other.name}"
            found = check_against_exportable(again, exported, limit, stage)
            checks += [check for check in found if check.name.startswith(stage)]
        return checks

    def quantized(self) -> list[Check]:
        """Rung 5."""
        ids, limits = self.given.text_ids, self.given.limits
        self._result(self._stepped)
        result = self._result(self._compared)
        series = self.report.series
        series["KL by position"] = result.comparison.kl.tolist()
        series["largest logit difference by position"] = result.comparison.largest.tolist()
        checks = result.checks
        if self.given.repeated is not None:
            with self.given.repeated.flatbuffer() as runner:
                again = check_quantized(self.reference, runner, ids, limits)
                checks += repeated(again.checks, runner.name)
        return checks

    def _compare(self) -> QuantizedResult:
        stepped = self._stepped.result()
        return check_stepped(self.reference, stepped, self.given.text_ids, self.given.limits)

    def _step(self) -> Stepped:
        """The file on the text; where no rung proves its graph, fed in all ways."""
        ids, positions = self.given.text_ids, self.given.limits.positions
        capacity, foreign = _present(self.given.reference).capacity, self.given.exportable is None
        with _present(self.given.flatbuffer)() as runner:
            widths = self.given.widths
            return step_through(runner, ids, positions, capacity, prefills=foreign, widths=widths)

    def tokenizer(self) -> list[Check]:
        """Rung 6."""
        return self._result(self._prompt)

    def runtime(self) -> list[Check]:
        """Rung 7, and the transcript."""
        result, reference = self._result(self._spoken), self.given.reference
        self.report.series["agreement along the generation"] = result.agreement_along()
        transcript = [described(entry) for entry in result.transcript]
        data = _present(self.given.runtime_data)
        if isinstance(reference, Stepper):
            with _present(self.given.runtime)() as runtime:
                for entry, facts in zip(result.transcript, transcript, strict=True):
                    facts |= float_answer(entry, reference, runtime, data)
        self.report.facts["transcript"] = {str(n): entry for n, entry in enumerate(transcript, 1)}
        return result.checks

    def _speak(self) -> RuntimeResult:
        data, limits = _present(self.given.runtime_data), self.given.limits
        with _present(self.given.runtime)() as runtime, _present(self.given.flatbuffer)() as file:
            return check_runtime(runtime, file, data, limits.near_tie)

    def device(self) -> list[Check]:
        """Rung 8."""
        found = _present(self.given.device)()
        self.report.series.update(found.series)
        return found.checks


def _present(value: _T | None) -> _T:
    if value is None:
        raise ValueError("a rung ran without its input")
    return value
