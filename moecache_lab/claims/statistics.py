"""Tests of claims: a difference of shares or a mean against a bound, and intervals from them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from lm_eval_moecache.report.statistics import Floats, sign_test, tango_score


def margin_test(won: int, lost: int, answers: int, margin: float, sign: float) -> float:
    """Return the chance of this difference of two shares if the truth were `margin` (one-sided).

    Right and wrong answers to the same documents: `won` turned right, `lost` wrong. `sign` 1 tests
    whether the difference lies above the margin, -1 below. At margin 0 this is McNemar's exact
    test; elsewhere the score test of Tango 1998 (Statistics in Medicine 17:891, section 3), whose
    level is asymptotic.
    """
    if not margin:
        return sign_test(lost, won) if sign > 0 else sign_test(won, lost)
    return 0.5 * math.erfc(sign * tango_score(won, lost, answers, margin) / math.sqrt(2))


def mean_test(values: Floats) -> float:
    """Return the chance of a mean this high if the truth were 0 (one-sided, skewed samples too).

    Hall's transformation of Student's statistic (1992, JRSS B 54:221, the cubic), which removes the
    skewness that flips of signs and Student's test take for an effect. From `LEAST_SAMPLES` on its
    level of 5% is at most 7% for samples as skewed as exponential ones. Two values at least.
    """
    from scipy.stats import t

    return float(t.sf(_hall(values), values.size - 1))


def _hall(values: Floats) -> float:
    """Return Hall's statistic; of equal values the infinity of their sign (-inf for 0)."""
    spread = float(values.std())
    mean = float(values.mean())
    if spread <= 1e-12 * float(np.abs(values).max()):
        return math.inf if mean > 0 else -math.inf
    skewness = float((((values - mean) / spread) ** 3).mean())
    u = mean / float(values.std(ddof=1))
    cubic = u + skewness / 3 * u**2 + skewness**2 / 27 * u**3
    return math.sqrt(values.size) * cubic + skewness / (6 * math.sqrt(values.size))


LEAST_SAMPLES = 32
"""Times, rates or texts from which `mean_test` keeps its level; a test simulates it."""
LEAST_ANSWERS = 50
"""Answers from which `margin_test` does: at most 7.5% where 5% are asked, exactly."""


def accepted_interval(figure: float, beyond: Callable[[float], Floats]) -> tuple[float, float]:
    """Return the 95% interval of a figure: the bounds that `mean_test` rejects on neither side.

    `beyond` tells by how much each sample exceeds a bound; its mean is 0 at the figure, and falls.
    An end is infinite where no bound is rejected (a ratio to what may be 0: Fieller's case).
    """
    from scipy.optimize import brentq
    from scipy.stats import t

    at_figure = beyond(figure)
    scale = max(abs(figure), float(np.abs(at_figure).max()), 1e-300)
    if at_figure.std() <= 1e-12 * max(float(np.abs(beyond(figure + scale)).max()), scale):
        return figure, figure
    limit = float(t.ppf(0.975, at_figure.size - 1))

    def end(sign: float) -> float:
        def rejected(distance: float) -> float:
            return -sign * _hall(beyond(figure + sign * distance)) - limit

        near, far = 0.0, 1e-6 * scale
        while rejected(far) < 0:
            near, far = far, 2 * far
            if far > 1e9 * scale:
                return sign * math.inf
        distance = far if math.isinf(rejected(far)) else brentq(rejected, near, far)
        return float(figure + sign * distance)

    return end(-1.0), end(1.0)
