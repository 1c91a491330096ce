"""Decides whether one figure got worse: by its samples, by its standard error, or by tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval_moecache.report.results import Score

SAME, BETTER, WITHIN, WORSE, MISSING, NEW = "same", "better", "within", "worse", "missing", "new"
# Guards comparisons of floats that are equal but for the order of a sum.
_EPSILON = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """`change` is new less baseline; `allowed` how much worse it may get."""

    baseline: float | None
    new: float | None
    allowed: float
    judged_by: str
    verdict: str

    @property
    def change(self) -> float | None:
        if self.baseline is None or self.new is None:
            return None
        return self.new - self.baseline


def judge_score(
    baseline: Score,
    new: Score,
    samples: tuple[Mapping[str, Any] | None, Mapping[str, Any] | None],
    sigmas: float,
) -> Judgement:
    """Judge accuracy by the standard error of the paired differences, where both have samples."""
    paired = _paired_stderr(*samples)
    if paired is not None:
        error, by = paired, "paired samples"
    else:
        error = math.hypot(baseline.stderr or 0.0, new.stderr or 0.0)
        by = "combined standard error" if error else "exactly"
    if paired is not None and _is_perplexity(samples[0]):
        # The samples are log-probabilities per word; d(exp x) = exp(x) dx.
        error *= baseline.value
    return _judge(baseline.value, new.value, baseline.higher_is_better, sigmas * error, by)


def judge_speed(
    baseline: float | None, new: float | None, higher_is_better: bool, tolerance: float
) -> Judgement:
    """Judge a figure of speed by a tolerance relative to the baseline; 0 means exactly."""
    if baseline is None or new is None:
        verdict = SAME if baseline == new else MISSING if new is None else NEW
        return Judgement(
            baseline=baseline, new=new, allowed=0.0, judged_by="presence", verdict=verdict
        )
    by = f"tolerance {tolerance:g}" if tolerance else "exactly"
    return _judge(baseline, new, higher_is_better, tolerance * abs(baseline), by)


def _judge(
    baseline: float, new: float, higher_is_better: bool, allowed: float, by: str
) -> Judgement:
    loss = baseline - new if higher_is_better else new - baseline
    slack = _EPSILON * max(abs(baseline), abs(new))
    if abs(loss) <= slack:
        verdict = SAME
    elif loss < 0:
        verdict = BETTER
    else:
        verdict = WITHIN if loss <= allowed + slack else WORSE
    return Judgement(baseline=baseline, new=new, allowed=allowed, judged_by=by, verdict=verdict)


def _is_perplexity(samples: Mapping[str, Any] | None) -> bool:
    return samples is not None and any(isinstance(value, list) for value in samples.values())


def _paired_stderr(
    baseline: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> float | None:
    """Return the standard error of the mean difference over the same documents.

    Pairs (log-likelihood, words) give that of the difference in log-likelihood per word (a ratio
    estimate). None where the documents differ or are fewer than two.
    """
    if not baseline or not new or baseline.keys() != new.keys() or len(baseline) < 2:
        return None
    count = len(baseline)
    differences, weights = [], []
    for doc, old in baseline.items():
        now = new[doc]
        if isinstance(old, list):
            differences.append(now[0] - old[0])
            weights.append(old[1])
        else:
            differences.append(now - old)
            weights.append(1.0)
    total = sum(weights)
    ratio = sum(differences) / total
    squares = sum((d - ratio * w) ** 2 for d, w in zip(differences, weights, strict=True))
    return math.sqrt(squares * count / (count - 1)) / total
