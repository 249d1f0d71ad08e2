"""A model too big to hold in float: the float rungs are left out and the report says why."""

from __future__ import annotations

from tiny_llama import hermes_config, tiny_config

from converters.float_models import too_big_for_float
from hermes.recipe import Limits
from hermes.verify.ladder import climb
from hermes.verify.ladder_input import LadderInput

CONFIG = hermes_config(tiny_config())


def test_the_bar_is_three_float_copies() -> None:
    assert too_big_for_float(CONFIG, 10**7) == ""
    reason = too_big_for_float(CONFIG, 10**5)
    assert "GB in float32, 0.0 GB are free" in reason


def test_the_report_names_what_was_not_run_and_why() -> None:
    reason = too_big_for_float(CONFIG, 10**5)
    given = LadderInput(Limits(), reasons=dict.fromkeys((2, 3, 4, 5), reason))
    skipped = climb(given).report.skipped
    for rung in (2, 3, 4, 5):
        assert skipped[rung].startswith("no ")
        assert skipped[rung].endswith(reason)
