"""Tests and intervals over samples: exact for counted answers, else by permutation.

`scipy.stats` does all that takes more than a line. Functions import it when called: the import
takes longer than a whole `moecache table`.
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
"""Sign patterns drawn by a permutation test; samples with fewer patterns are tested exactly."""
_NUISANCE = 0.001
"""Error probability spent on the range searched for the nuisance share (Berger and Boos)."""


def sign_test(better: int, worse: int) -> float:
    """Return the one-sided p-value of the sign test: at least `worse` losses in coin tosses.

    On right and wrong answers this is McNemar's exact test: `better` answers turned right, `worse`
    turned wrong; unchanged answers do not count. No change at all gives 1.
    """
    if better < 0 or worse < 0:
        raise ValueError(f"better={better}, worse={worse} must be counts of 0 or more.")
    changed = better + worse
    # Integers: 2 to the power of thousands of documents overflows a float.
    return sum(math.comb(changed, k) for k in range(worse, changed + 1)) / (1 << changed)


def sign_flip_test(losses: Sequence[float] | Floats) -> float:
    """Return the chance of a sum of losses this large if each were as likely a gain (one-sided).

    The permutation test of paired samples: `losses` are per-sample differences, positive where the
    figure got worse. Exact over all sign patterns up to 14 differing samples, else over `DRAWS`
    random ones.
    """
    values: Floats = np.asarray([x for x in losses if x], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("losses must be finite numbers.")
    if not values.size:
        return 1.0
    if values.size == 1:
        return 0.5 if values[0] > 0 else 1.0
    from scipy.stats import permutation_test

    options: dict[str, Any] = {"permutation_type": "samples", "alternative": "greater"}
    options |= {"vectorized": True, "batch": max(1, (1 << 20) // values.size)}
    rng = np.random.default_rng(0)
    test = permutation_test((values,), np.mean, n_resamples=DRAWS, rng=rng, **options)
    return float(test.pvalue)


def least_flip_p(values: Sequence[float] | Floats) -> float:
    """Return the smallest p-value `sign_flip_test` can give for as many samples that differ."""
    differing = int(np.count_nonzero(np.asarray(values)))
    patterns = 1 << differing
    return 1 / patterns if patterns <= DRAWS else 1 / (DRAWS + 1)


def margin_test(won: int, lost: int, answers: int, margin: float, sign: float) -> float:
    """Return the chance of this difference of two shares if the truth were `margin` (one-sided).

    Right and wrong answers to the same documents: `won` turned right, `lost` wrong. `sign` 1 tests
    whether the difference lies above the margin, -1 below. At margin 0 this is McNemar's exact
    test; elsewhere it is exact too, whatever the share of answers that change both ways.
    """
    if sign < 0:
        won, lost, margin = lost, won, -margin
    if not margin:
        return sign_test(lost, won)
    from scipy.stats import binom, binomtest

    if margin < 0:
        # If answers lost stay within the margin, so does the net loss.
        return float(binom.cdf(lost, answers, -margin))
    # Above a gain: take the least favourable of all shares of lost answers that the count allows.
    largest_share = binomtest(lost, answers).proportion_ci(1 - 2 * _NUISANCE, "exact").high
    shares = np.linspace(0, min(largest_share, (1 - margin) / 2), 200)[:, None]
    count = np.arange(answers + 1)
    p_won = binom.pmf(count, answers, shares + margin)
    p_lost_so_few = binom.cdf(count - (won - lost), answers - count, shares / (1 - shares - margin))
    return float(min(1.0, (p_won * p_lost_so_few).sum(axis=1).max() + _NUISANCE))


def answers_interval(won: int, lost: int, answers: int) -> tuple[float, float]:
    """Return the 95% interval of a difference of two shares over the same documents.

    On a side of 0 that McNemar's exact test does not exclude, it ends at Clopper and Pearson's
    limit of the share won (or lost): 0 of 40 may still be 8.8 points.
    """
    return -_most(lost, won, answers), _most(won, lost, answers)


def _most(won: int, lost: int, answers: int) -> float:
    """Return the largest gain that the counts allow; negative for a significant loss."""
    from scipy.stats import binomtest

    if sign_test(won, lost) <= 0.025:
        share = binomtest(won, won + lost).proportion_ci(0.95, "exact").high
        changed = binomtest(won + lost, answers).proportion_ci(0.95, "exact").low
        return float(changed * (2 * share - 1))
    return float(binomtest(won, answers).proportion_ci(0.95, "exact").high)


def z_test(loss: float, stderr: float) -> float:
    """Return the one-sided chance of a loss this large under a normal error (unpaired samples)."""
    if not stderr:
        return 1.0 if loss <= 0 else 0.0
    return 0.5 * math.erfc(loss / stderr / math.sqrt(2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order given.

    Rejecting where the adjusted value is at most alpha keeps the family-wise error rate at most
    alpha, however the tests depend on each other (Holm 1979).
    """
    if invalid := [p for p in p_values if not 0 <= p <= 1]:
        raise ValueError(f"p={invalid[0]} must lie in 0 to 1.")
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def tarone(least_p: Sequence[float], alpha: float) -> list[bool]:
    """Return which tests to correct for: Tarone's rule for discrete tests.

    `least_p` is the smallest p-value each test can attain, given what does not depend on the null
    hypothesis (for McNemar's test: the number of answers that changed, either way). Tests that
    cannot reach alpha / k are left out, and the others need no correction for them, where k is the
    smallest number such that at most k tests can reach alpha / k (Tarone 1990).
    """
    for k in range(1, len(least_p) + 1):
        testable = [least <= alpha / k for least in least_p]
        if sum(testable) <= k:
            return testable
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

    `statistic` takes the sides and an `axis`. Where every resample gives the same figure, both
    limits are that figure; a limit that is NaN (a ratio to resampled zeros) becomes infinite.
    """
    from scipy.stats import bootstrap

    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"paired": True, "vectorized": True, "method": "BCa"}
        rng = np.random.default_rng(0)
        resampling = bootstrap(tuple(sides), statistic, n_resamples=4000, rng=rng, **options)
        figure = float(statistic(*sides, axis=-1))
    if np.allclose(resampling.bootstrap_distribution, figure, rtol=1e-12, atol=0):
        return figure, figure
    low, high = map(float, resampling.confidence_interval)
    return low if math.isfinite(low) else -math.inf, high if math.isfinite(high) else math.inf
