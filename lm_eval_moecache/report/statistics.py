"""Tests and intervals over paired samples: what the gate and the experiments judge by.

All tests here are exact or by permutation: they assume nothing but that, without a real change,
a sample's figure is as likely to have moved one way as the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
DEFAULT_SEED = 0
# Up to this many pairs that differ, every pattern of signs is looked at.
_EXACT_PAIRS = 14
_BLOCK = 1 << 20


def sign_test(better: int, worse: int) -> float:
    """Return the chance of at least `worse` of the changed samples being worse by coin tosses.

    One-sided. On right and wrong answers this is McNemar's exact test: `better` answers turned
    right, `worse` turned wrong, those that stayed do not count. No change at all gives 1.
    """
    if better < 0 or worse < 0:
        raise ValueError(f"better={better}, worse={worse} must be counts of 0 or more.")
    changed = better + worse
    return float(sum(math.comb(changed, k) for k in range(worse, changed + 1)) / 2**changed)


def sign_flip_test(
    losses: Sequence[float], *, draws: int = 20_000, seed: int = DEFAULT_SEED
) -> float:
    """Return the chance of a sum of losses this large if each could as well be a gain (one-sided).

    The permutation test of paired samples: `losses` are per-sample differences, positive where it
    got worse. All sign patterns up to 14 samples that differ, else `draws` of them, from `seed`;
    the observed pattern counts as one of the draws, so that the answer is never 0.
    """
    values: Floats = np.asarray([x for x in losses if x], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("losses must be finite numbers.")
    if not values.size:
        return 1.0
    # Guards ties between sums of the same numbers in another order.
    least = float(values.sum()) - 1e-12 * float(np.abs(values).sum())
    if values.size <= _EXACT_PAIRS:
        patterns = np.arange(1 << values.size)[:, None] >> np.arange(values.size)
        signs = (patterns & 1) * 2.0 - 1.0
        return float(np.mean(signs @ values >= least))
    random = np.random.default_rng(seed)
    rows = max(1, _BLOCK // values.size)
    count = 0
    for begin in range(0, draws, rows):
        shape = (min(rows, draws - begin), values.size)
        count += int(np.sum((random.integers(0, 2, shape) * 2.0 - 1.0) @ values >= least))
    return (count + 1) / (draws + 1)


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
    for p in p_values:
        if not 0 <= p <= 1:
            raise ValueError(f"p={p} must lie in 0 to 1.")
    adjusted = [0.0] * len(p_values)
    highest = 0.0
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


def mean(values: Floats) -> Floats:
    """Return the mean over the last axis: the default statistic of `bootstrap_interval`."""
    return np.asarray(values.mean(axis=-1))


def bootstrap_interval(
    samples: Sequence[float],
    *,
    statistic: Callable[[Floats], Floats] = mean,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = DEFAULT_SEED,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a statistic of the samples.

    `statistic` maps samples on the last axis to one number. For paired samples hand over the
    differences. Raises ValueError for fewer than two samples, or a level outside 0 to 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1.")
    values: Floats = np.asarray(samples, dtype=np.float64)
    if values.size < 2:
        raise ValueError(f"an interval needs two samples or more, got {values.size}.")
    random = np.random.default_rng(seed)
    rows = max(1, _BLOCK // values.size)
    found = []
    for begin in range(0, draws, rows):
        chosen = random.integers(0, values.size, (min(rows, draws - begin), values.size))
        found.append(statistic(values[chosen]))
    low, high = np.quantile(np.concatenate(found), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wilson_interval(successes: int, trials: int, *, z: float = 1.959964) -> tuple[float, float]:
    """Return Wilson's score interval of a share (95% by default)."""
    if not 0 <= successes <= trials or not trials:
        raise ValueError(f"successes={successes} of trials={trials} is no share.")
    share = successes / trials
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    whole = 1 + z * z / trials
    return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)


def paired_share_interval(new: Floats, old: Floats, *, z: float = 1.959964) -> tuple[float, float]:
    """Return the 95% interval of a difference of two shares over the same samples.

    Right and wrong answers as 1 and 0. The Wald interval with half a sample added to each of the
    four kinds of pairs: it keeps its level with few changes, or none (Agresti and Min 2005).
    """
    if new.shape != old.shape or not new.size:
        raise ValueError(f"{new.size} and {old.size} answers are no pairs.")
    won, lost = int(np.sum(new > old)), int(np.sum(new < old))
    size = new.size + 2
    middle = (won - lost) / size
    spread = z * math.sqrt(max(0.0, won + lost + 1 - (won - lost) ** 2 / size)) / size
    return middle - spread, middle + spread
