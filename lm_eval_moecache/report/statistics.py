"""Tests and intervals over samples: exact where answers are counted, else by permutation.

`scipy.stats` computes what takes more than a line. It is imported where it is needed: that takes
longer than a whole `moecache table`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
DRAWS = 20_000
"""Sign patterns of a permutation test; as many samples as have fewer are tested exactly."""
_NUISANCE = 0.001
"""Chance left for the share of answers won to lie beyond where it is looked for."""


def sign_test(better: int, worse: int) -> float:
    """Return the chance of at least `worse` of the changed samples being worse by coin tosses.

    One-sided. On right and wrong answers this is McNemar's exact test: `better` answers turned
    right, `worse` turned wrong, those that stayed do not count. No change at all gives 1.
    """
    if better < 0 or worse < 0:
        raise ValueError(f"better={better}, worse={worse} must be counts of 0 or more.")
    changed = better + worse
    # Whole numbers: 2 to the power of thousands of documents is no float.
    return sum(math.comb(changed, k) for k in range(worse, changed + 1)) / (1 << changed)


def sign_flip_test(losses: Sequence[float] | Floats) -> float:
    """Return the chance of a sum of losses this large if each could as well be a gain (one-sided).

    The permutation test of paired samples: `losses` are per-sample differences, positive where it
    got worse. Up to 14 samples that differ every sign pattern is looked at, else `DRAWS` of them.
    """
    values: Floats = np.asarray([x for x in losses if x], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("losses must be finite numbers.")
    if not values.size:
        return 1.0
    if values.size == 1:
        return 0.5 if values[0] > 0 else 1.0
    from scipy.stats import permutation_test

    how: dict[str, Any] = {"permutation_type": "samples", "alternative": "greater"}
    how |= {"vectorized": True, "batch": max(1, (1 << 20) // values.size)}
    random = np.random.default_rng(0)
    found = permutation_test((values,), np.mean, n_resamples=DRAWS, rng=random, **how)
    return float(found.pvalue)


def least_flip_p(values: Sequence[float] | Floats) -> float:
    """Return the smallest chance that `sign_flip_test` can give for as many samples."""
    differing = int(np.count_nonzero(np.asarray(values)))
    patterns = 1 << differing
    return 1 / patterns if patterns <= DRAWS else 1 / (DRAWS + 1)


def margin_test(won: int, lost: int, answers: int, margin: float, sign: float) -> float:
    """Return the chance of this difference of two shares if the truth were `margin` (one-sided).

    Right and wrong answers to the same documents: `won` turned right, `lost` wrong; `sign` 1 asks
    whether the difference lies above the margin, -1 below. At 0 this is McNemar's exact test.
    Elsewhere it is exact as well, whatever the share of answers that change both ways.
    """
    if sign < 0:
        won, lost, margin = lost, won, -margin
    if not margin:
        return sign_test(lost, won)
    from scipy.stats import binom, binomtest

    if margin < 0:
        # Whoever loses no more than the margin in wrong answers loses no more on balance.
        return float(binom.cdf(lost, answers, -margin))
    # Above a gain: of all shares of lost answers that the count allows, the least favourable.
    most = binomtest(lost, answers).proportion_ci(1 - 2 * _NUISANCE, "exact").high
    shares = np.linspace(0, min(most, (1 - margin) / 2), 200)[:, None]
    count = np.arange(answers + 1)
    gained = binom.pmf(count, answers, shares + margin)
    fewer = binom.cdf(count - (won - lost), answers - count, shares / (1 - shares - margin))
    return float(min(1.0, (gained * fewer).sum(axis=1).max() + _NUISANCE))


def answers_interval(won: int, lost: int, answers: int) -> tuple[float, float]:
    """Return the 95% interval of a difference of two shares over the same documents.

    On the side of 0 that McNemar's exact test leaves open it ends where Clopper and Pearson's
    limit of the answers won (or lost) does: none of 40 may still be 8.8 points.
    """
    return -_most(lost, won, answers), _most(won, lost, answers)


def _most(won: int, lost: int, answers: int) -> float:
    """Return the largest gain that the counts allow; below 0 where it is surely a loss."""
    from scipy.stats import binomtest

    if sign_test(won, lost) <= 0.025:
        share = binomtest(won, won + lost).proportion_ci(0.95, "exact").high
        changed = binomtest(won + lost, answers).proportion_ci(0.95, "exact").low
        return float(changed * (2 * share - 1))
    return float(binomtest(won, answers).proportion_ci(0.95, "exact").high)


def z_test(loss: float, stderr: float) -> float:
    """Return the chance of a loss this large under a normal error (one-sided); for unpaired."""
    if not stderr:
        return 1.0 if loss <= 0 else 0.0
    return 0.5 * math.erfc(loss / stderr / math.sqrt(2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order given.

    Calling everything significant whose adjusted value is at most alpha makes a false call
    anywhere with a chance of at most alpha, however the tests depend on each other (Holm 1979).
    """
    if beyond := [p for p in p_values if not 0 <= p <= 1]:
        raise ValueError(f"p={beyond[0]} must lie in 0 to 1.")
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def tarone(least_p: Sequence[float], alpha: float) -> list[bool]:
    """Return which tests are worth correcting for: Tarone's rule for discrete tests.

    `least_p` is the smallest p-value each test can give, by what does not depend on the null
    hypothesis (for McNemar's test: the number of answers that changed, whichever way). A test that
    could not be called significant even so takes no part, and the others need no correction for
    it: k is the smallest number with at most k tests that can reach alpha / k (Tarone 1990).
    """
    for k in range(1, len(least_p) + 1):
        able = [least <= alpha / k for least in least_p]
        if sum(able) <= k:
            return able
    return [False] * len(least_p)


def mean_interval(samples: Floats) -> tuple[float, float]:
    """Return Student's 95% interval of a mean."""
    from scipy.stats import t

    middle, error = float(samples.mean()), float(samples.std(ddof=1)) / math.sqrt(samples.size)
    half = float(t.ppf(0.975, samples.size - 1)) * error
    return middle - half, middle + half


def bootstrap_interval(
    sides: Sequence[Floats], statistic: Callable[..., Floats]
) -> tuple[float, float]:
    """Return the 95% BCa bootstrap interval of a statistic of paired samples.

    `statistic` takes the sides and an `axis`. Where every draw gives one figure, that is the
    interval; a limit that is no number (a ratio to draws of zeros) is infinite.
    """
    from scipy.stats import bootstrap

    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore")
        how: dict[str, Any] = {"paired": True, "vectorized": True, "method": "BCa"}
        random = np.random.default_rng(0)
        found = bootstrap(tuple(sides), statistic, n_resamples=4000, rng=random, **how)
        figure = float(statistic(*sides, axis=-1))
    if np.allclose(found.bootstrap_distribution, figure, rtol=1e-12, atol=0):
        return figure, figure
    low, high = map(float, found.confidence_interval)
    return low if math.isfinite(low) else -math.inf, high if math.isfinite(high) else math.inf
