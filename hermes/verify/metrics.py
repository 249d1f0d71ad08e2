"""How far apart two next-token distributions are; numpy only.

All logarithms are natural, all softmaxes in float64. Shapes: V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.floating]
Values = NDArray[np.float64]

_TOP = 5
_RESAMPLES = 2000
_RESAMPLED_AT_ONCE = 64


@dataclass(frozen=True)
class Interval:
    """A value with the bounds between which 95 % of its bootstrap resamples lie."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """A model against its reference, one entry per position [P].

    Attributes:
        kl: KL(reference || model) in nats.
        top1: both prefer the same token.
        top5: share of the reference's five best tokens among the model's five best.
        largest: largest absolute logit difference.
        mean: mean absolute logit difference.
        reference_loss: negative log-likelihood of the text's next token under the reference, NaN
            where the text has none.
        loss: the same under the model.
    """

    kl: Values
    top1: NDArray[np.bool_]
    top5: Values
    largest: Values
    mean: Values
    reference_loss: Values
    loss: Values

    @property
    def positions(self) -> int:
        """How many positions were compared."""
        return len(self.kl)

    def perplexities(self, seed: int = 0) -> tuple[Interval, Interval]:
        """Of the reference and of the model, over the positions that have a next token."""
        scored = ~np.isnan(self.reference_loss)
        return (
            perplexity(self.reference_loss[scored], seed),
            perplexity(self.loss[scored], seed),
        )


def log_softmax(logits: Row) -> Values:
    """Log-probabilities over the last axis."""
    wide = np.asarray(logits, dtype=np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    result: Values = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def kl_divergence(reference: Values, model: Values) -> float:
    """KL(reference || model) of two rows of log-probabilities [V]; inf where the model has 0."""
    possible = reference > -np.inf
    terms = np.exp(reference[possible]) * (reference[possible] - model[possible])
    # Rounding makes the sum of two equal rows as low as -1e-16.
    return max(float(terms.sum()), 0.0) if np.isfinite(terms).all() else float(terms.sum())


def top_tokens(logits: Row, count: int) -> set[int]:
    """The `count` tokens with the largest logits."""
    count = min(count, len(logits))
    return {int(token) for token in np.argpartition(logits, -count)[-count:]}


def compare(
    reference: Iterable[Row], model: Iterable[Row], next_tokens: Sequence[int | None]
) -> Comparison:
    """Compare rows of logits [V] pairwise, one pair in memory at a time.

    Args:
        reference: the reference's logits, one row per position.
        model: the model's, as many.
        next_tokens: what follows in the text at each position, None where the text ends.
    """
    entries: list[tuple[float, ...]] = []
    pair: _RowPair | None = None
    for wanted, found, token in zip(reference, model, next_tokens, strict=True):
        pair = pair or _RowPair(len(wanted))
        entries.append(pair.compare(wanted, found, token))
    table = np.array(entries, dtype=np.float64).reshape(-1, 7)
    columns = table.T
    return Comparison(columns[0], columns[1] > 0, *columns[2:])


class _RowPair:
    """Compares rows of one width; its arrays are reused, since new ones cost more than the sums."""

    def __init__(self, width: int) -> None:
        self._wanted, self._found, self._terms = (np.empty(width) for _ in range(3))

    def compare(self, reference: Row, model: Row, token: int | None) -> tuple[float, ...]:
        """One line of a `Comparison`."""
        wanted, found = self._wanted, self._found
        self._log_softmax(found, model)
        self._log_softmax(wanted, reference)
        finite = bool(np.isfinite(wanted.min()) and np.isfinite(found.min()))
        losses = (float("nan"),) * 2 if token is None else (-wanted[token], -found[token])
        # A row with NaN has no preference; the softmax has spread it over the whole row.
        same = reference.argmax() == model.argmax() and not np.isnan(found[0])
        shared = len(top_tokens(reference, _TOP) & top_tokens(model, _TOP))
        kl = self._divergence() if finite else kl_divergence(wanted, found)
        apart = self._difference(reference, model, finite)
        return (kl, float(same), shared / min(_TOP, len(reference)), *apart, *map(float, losses))

    def _log_softmax(self, out: Values, logits: Row) -> None:
        np.copyto(out, logits)
        out -= out.max()
        np.exp(out, out=self._terms)
        out -= np.log(self._terms.sum())

    def _divergence(self) -> float:
        """`kl_divergence` of two rows without a forbidden token; uses up both."""
        np.exp(self._wanted, out=self._terms)
        self._wanted -= self._found
        return max(float(self._terms @ self._wanted), 0.0)

    def _difference(self, reference: Row, model: Row, finite: bool) -> tuple[float, float]:
        """Largest and mean absolute difference of the logits."""
        if not finite:
            difference = _absolute_difference(reference, model)
            return float(difference.max()), float(difference.mean())
        np.subtract(reference, model, out=self._terms, dtype=np.float64)
        np.abs(self._terms, out=self._terms)
        return float(self._terms.max()), float(self._terms.mean())


def _absolute_difference(reference: Row, model: Row) -> Values:
    """|a - b|, 0 where both forbid a token with -inf."""
    wide = np.asarray(reference, np.float64), np.asarray(model, np.float64)
    difference = np.zeros(len(reference))
    np.subtract(*wide, out=difference, where=wide[0] != wide[1])
    return np.abs(difference)


def perplexity(losses: Values, seed: int = 0) -> Interval:
    """exp of the mean loss, with a seeded bootstrap interval over positions."""
    if len(losses) == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    draw = np.random.default_rng(seed)
    means: list[float] = []
    for _ in range(0, _RESAMPLES, _RESAMPLED_AT_ONCE):
        chosen = draw.integers(0, len(losses), (_RESAMPLED_AT_ONCE, len(losses)))
        means.extend(losses[chosen].mean(axis=1))
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(np.exp(losses.mean())), float(np.exp(low)), float(np.exp(high)))


def margin(logits: Row) -> float:
    """Distance between the largest and the second largest logit."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first) - float(second)
