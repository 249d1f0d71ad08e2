"""Rung 2: rewritten weights compute the same function."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hermes.report.check import Check, at_most, measured
from hermes.runners.interface import Scorer
from hermes.verify.metrics import compare

POSITIONS = 128


def check_rewritten(
    rewritten: Scorer, reference: Scorer, ids: Sequence[int], limit: float
) -> list[Check]:
    """Compare logits in float32, relative to their spread.

    The rewrites are exact; what remains is float32 rounding, which grows with the logits. So the
    largest difference is divided by the standard deviation of the reference's logits.
    """
    ids = ids[: min(POSITIONS, reference.capacity, rewritten.capacity)]
    wanted = list(reference.score(ids))
    result = compare(wanted, rewritten.score(ids), [*ids[1:], None])
    spread = float(np.std(np.stack(wanted), dtype=np.float64))
    detail = f"{result.positions} positions, logit spread {spread:.3g}"
    return [
        at_most(
            "largest logit difference / spread", 2, result.largest.max() / spread, limit, detail
        ),
        measured("mean logit difference / spread", 2, result.mean.mean() / spread),
        measured("largest logit difference", 2, result.largest.max()),
        measured("mean logit difference", 2, result.mean.mean()),
    ]
