"""Tests and intervals over samples: exact for counted answers, else by permutation.

`scipy.stats` does all that takes more than a line. Functions import it when called: the import
takes longer than a whole `moecache table`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
DRAWS = 20_000
"""Sign patterns drawn by a permutation test; samples with fewer patterns are tested exactly."""


@lru_cache(maxsize=4096)
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
    figure got worse. It tests that the two sides are exchangeable (nothing changed), not that a
    mean is 0. Exact over all sign patterns up to 14 differing samples, else over
    `DRAWS` random ones.
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


def answers_interval(won: int, lost: int, answers: int) -> tuple[float, float]:
    """Return the 95% score interval of a difference of two shares over the same documents.

    Tango 1998, section 4: the margins that the score test does not reject at 2.5% on either side.
    Of 40 answers without a change it says -8.8 to 8.8 points. With few changed answers it may
    exclude 0 where McNemar's exact test does not quite.
    """
    from scipy.optimize import brentq

    figure = (won - lost) / answers

    def end(direction: int) -> float:
        far = direction * (1 - 1e-12)
        if abs(figure - far) < 1e-9:
            return float(direction)
        return float(
            brentq(
                lambda margin: tango_score(won, lost, answers, margin) + direction * Z_95,
                figure,
                far,
            )
        )

    return end(-1), end(1)


Z_95 = 1.959963984540054


def tango_score(won: int, lost: int, answers: int, margin: float) -> float:
    """Return Tango's statistic: the standardised distance of the difference from `margin`."""
    # The share lost that is likeliest where the difference is the margin, a quadratic's root.
    b = (2 * answers - won + lost) * margin - won - lost
    c = -lost * margin * (1 - margin)
    share = (math.sqrt(max(b * b - 8 * answers * c, 0.0)) - b) / (4 * answers)
    variance = answers * (2 * share + margin * (1 - margin))
    distance = won - lost - answers * margin
    if variance <= 0:
        return math.copysign(math.inf, distance) if abs(distance) > 1e-9 else 0.0
    return distance / math.sqrt(variance)


def documents_needed(
    loss: float, changed: float, *, power: float = 0.8, level: float = 0.05
) -> int:
    """Return how many documents detect a loss of a share of right answers, paired and one-sided.

    Args:
        loss: The share lost, 0.01 for a point; above 0.
        changed: The share of answers that change, either way; at least `loss` is taken.
        power: The chance that McNemar's test finds it.
        level: The chance that it finds one where there is none.

    By the normal approximation (Connor 1987, Biometrics 43:207, equation 1), which asks for a
    little less than the exact test does where few answers change.
    """
    if not 0 < loss <= 1 or not 0 <= changed <= 1:
        raise ValueError(f"loss={loss:g}, changed={changed:g} must be shares, and a loss above 0.")
    for name, value in (("power", power), ("level", level)):
        if not 0 < value < 1:
            raise ValueError(f"{name}={value:g} must lie between 0 and 1.")
    from scipy.stats import norm

    changed = max(changed, loss)
    found, none = float(norm.ppf(power)), float(norm.ppf(1 - level))
    deviations = none * math.sqrt(changed) + found * math.sqrt(changed - loss**2)
    return math.ceil((deviations / loss) ** 2 - 1e-9)


def other_documents_interval(
    won: int, lost: int, answers: int, documents: int
) -> tuple[float, float]:
    """Return the 95% interval of the difference that as many other documents would show.

    The ends of `answers_interval`, widened by the chance of the new documents, in quadrature:
    theirs is sqrt(changed / documents), where the share of answers that change is the run's, or
    one answer's where none did.
    """
    figure = (won - lost) / answers
    low, high = answers_interval(won, lost, answers)
    changed = max(won + lost, 1) / answers
    drawn = Z_95 * math.sqrt(max(changed - figure**2, 0.0) / documents)
    return (
        max(figure - math.hypot(figure - low, drawn), -1.0),
        min(figure + math.hypot(high - figure, drawn), 1.0),
    )


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


def noticeable_loss(documents: int, alpha: float, power: float = 0.8) -> float | None:
    """Return the share of answers whose loss the sign test notices at `alpha` with this power.

    Of a change that turns answers wrong and none right. None: losing all would not be noticed.
    """
    from scipy.special import betaincinv

    least = math.ceil(-math.log2(alpha))
    if documents < least:
        return None
    # The chance of `least` losses or more, as a function of each answer's chance to be lost.
    return float(betaincinv(least, documents - least + 1, power))


def mean_interval(samples: Floats) -> tuple[float, float]:
    """Return Student's 95% interval of a mean of samples that are not skewed."""
    from scipy.stats import t

    half = float(t.ppf(0.975, samples.size - 1) * samples.std(ddof=1) / math.sqrt(samples.size))
    return float(samples.mean()) - half, float(samples.mean()) + half
