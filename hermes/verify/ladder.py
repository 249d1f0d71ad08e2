"""The ladder: every rung that can run runs, and the lowest red one names the guilty stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hermes.errors import HermesError, NativeToolError, VerificationError
from hermes.report.check import RUNG_NAMES, Check, Report, holds
from hermes.verify.ladder_input import LadderInput
from hermes.verify.rungs import Rungs


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
    rungs = Rungs(given)
    outcome = Climb(rungs.report)
    for rung, (run, missing) in _runnable(rungs).items():
        if missing:
            why = given.reasons.get(rung, "")
            outcome.report.skipped[rung] = f"no {missing}{': ' if why else ''}{why}"
            continue
        if on_rung is not None:
            on_rung(rung, RUNG_NAMES[rung])
        started = time.monotonic() + rungs.elsewhere
        try:
            outcome.report.checks.extend(run())
        except HermesError as error:
            outcome.report.checks.append(holds("the rung ran", rung, False, "no", str(error)))
            if isinstance(error, NativeToolError) and outcome.died is None:
                outcome.died = error
        outcome.report.seconds[rung] = time.monotonic() + rungs.elsewhere - started
    return outcome


def _runnable(rungs: Rungs) -> dict[int, tuple[Callable[[], list[Check]], str]]:
    """Each rung with the first input it lacks, '' if it can run."""
    given = rungs.given
    needs: dict[int, tuple[Callable[[], list[Check]], dict[str, object]]] = {
        0: (rungs.keys, {"checkpoint mapping": given.mapped}),
        1: (rungs.golden, {"golden logits": given.golden, "reference": given.reference}),
        2: (rungs.rewrites, {"rewrites": given.rewritten, "reference": given.reference}),
        3: (
            rungs.exportable,
            {"exportable module": given.exportable, "reference": given.reference},
        ),
        4: (
            rungs.float_file,
            {"float flatbuffer": given.float_flatbuffer, "exportable module": given.exportable},
        ),
        5: (rungs.quantized, {"flatbuffer": given.flatbuffer, "reference": given.reference}),
        6: (rungs.tokenizer, {"tokenizer rung": given.tokenizer_rung}),
        7: (
            rungs.runtime,
            {
                "runtime": given.runtime,
                "flatbuffer": given.flatbuffer,
                "prompts": given.runtime_data,
            },
        ),
    }
    if given.device is not None:
        needs[8] = (rungs.device, {})
    return {
        rung: (run, next((name for name, value in inputs.items() if value is None), ""))
        for rung, (run, inputs) in needs.items()
    }
