"""Which rows a test separates: the best of a column, and the Pareto front.

Three documents of forty are no difference, nor are they equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lm_eval_moecache.report.metrics import Column
from lm_eval_moecache.report.runs.run import Run
from lm_eval_moecache.report.statistics import Floats, holm, sign_test, tango_score, z_test

ALPHA = 0.05
"""Significance level at which a value counts as worse than the best of its column."""
MARGIN = 0.01
"""Non-inferiority: a score is not worse if shown less than this lower, a point of a share."""


class Sampled(NamedTuple):
    """A run's value in a column, its standard error (0 for none), and its samples by document.

    Higher is better: the sign is flipped for columns in which it is not.
    """

    figure: float
    stderr: float
    documents: tuple[str, ...] = ()
    samples: Floats = np.empty(0)

    def is_worse(self, best: Sampled) -> float:
        """Return the one-sided p-value of being worse than `best`.

        From the exact sign test over the documents of both (McNemar's for right and wrong answers;
        for speeds, documents of one batch are one), else from the standard errors. Figures with
        neither are counts: any difference is real.
        """
        if self.documents and self.documents == best.documents:
            won, lost = self.samples > best.samples, self.samples < best.samples
            return sign_test(int(won.sum()), int(lost.sum()))
        return z_test(best.figure - self.figure, math.hypot(self.stderr, best.stderr))

    @property
    def margin(self) -> float:
        """`MARGIN`, in points of a share and relative to any other score."""
        return MARGIN * max(1.0, abs(self.figure))

    def is_inferior(self, other: Sampled) -> float:
        """Return the one-sided p-value of being worse than `other` by the margin or more.

        Small where it is shown not worse (non-inferiority): over the documents of both by Tango's
        score for right and wrong, else by the standard error of the difference.
        """
        stderr = math.hypot(self.stderr, other.stderr)
        if len(self.documents) > 1 and self.documents == other.documents:
            gains = self.samples - other.samples
            won, lost = int((gains == 1).sum()), int((gains == -1).sum())
            if won + lost == np.count_nonzero(gains):
                distance = tango_score(won, lost, len(gains), -min(other.margin, 0.99))
                return z_test(distance, 1.0)
            # Scores of texts are log-likelihoods here, and the table's figure is not their mean.
            if math.isclose(gains.mean(), self.figure - other.figure, abs_tol=1e-9):
                stderr = math.sqrt(gains.var(ddof=1) / len(gains))
        # Without an error nothing is shown.
        return z_test(self.figure - other.figure + other.margin, stderr) if stderr else 1.0


def _sampled(runs: Sequence[Run], group: Sequence[int], column: Column) -> dict[int, Sampled]:
    """Return row -> value and samples, for the runs of a group that have a value."""
    sign = 1 if column.higher_is_better else -1
    by_row = {}
    for i in group:
        value = runs[i][column.name]
        if value.number is not None:
            samples = runs[i].documents(column.name)
            documents = tuple(sorted(samples))
            values = sign * np.asarray([samples[doc] for doc in documents])
            by_row[i] = Sampled(sign * value.number, value.stderr or 0.0, documents, values)
    return by_row


def best_rows(runs: Sequence[Run], group: Sequence[int], column: Column) -> set[int]:
    """Return the rows of a group's best value and of those no test separates from it.

    Of a score, only those shown not worse than the best by `MARGIN`, so that fewer documents mark
    fewer rows. Empty unless the test separates each of these from every other row of the group, and
    for values with neither documents nor standard errors.
    """
    sampled = {} if column.higher_is_better is None else _sampled(runs, group, column)
    if len({row.figure for row in sampled.values()}) < 2:
        return set()
    if not any(row.documents or row.stderr for row in sampled.values()):
        return set()  # nothing to test: a percentile, a rate of one phase, the fidelity
    best = max(sampled.values(), key=lambda row: row.figure)
    chances = holm([row.is_worse(best) for row in sampled.values()])
    if column.is_score:
        chances = [1 - row.is_inferior(best) for row in sampled.values()]
        best_rows = {i for i, c in zip(sampled, chances, strict=True) if c >= 1 - ALPHA}
    else:
        best_rows = {i for i, c in zip(sampled, chances, strict=True) if c > ALPHA}
    best_rows |= {i for i, row in sampled.items() if row.figure == best.figure}
    others = sampled.keys() - best_rows
    are_separated = all(sampled[i].is_worse(sampled[j]) <= ALPHA for i in others for j in best_rows)
    return best_rows if others and are_separated else set()


def keeps_score(one: Sampled, other: Sampled, is_lossless: bool, is_other_lossless: bool) -> bool:
    """Whether a row keeps its place by its score against another one that is as good otherwise."""
    if is_lossless:
        if one.figure > other.figure:
            return True
        if not is_other_lossless:
            return other.is_inferior(one) > ALPHA
    return one.figure - other.figure > one.margin and other.is_worse(one) <= ALPHA


def pareto_front(runs: Sequence[Run], group: Sequence[int], axes: Sequence[Column]) -> set[int]:
    """Return the rows of the runs that keep their place against every other run of the group.

    On axes other than scores the figures count as they are; without a better direction (the
    capacity), less is better. Against a run that is no worse on those, a row keeps its place by a
    score that is more than `MARGIN` higher and shown to be higher, so that fewer documents never
    earn a place. A lossless row keeps it unless the other's score is no lower as observed and,
    where that run is lossy, shown not worse by `MARGIN`.
    """
    sides = [_sampled(runs, group, axis) for axis in axes]
    complete = [i for i in group if all(i in side for side in sides)]
    if len(complete) < 2:
        return set()
    lossless = {i: runs[i].is_lossless for i in complete}

    def keeps(i: int, j: int) -> bool:
        pairs = [(axis, side[i], side[j]) for axis, side in zip(axes, sides, strict=True)]
        if all(one.figure == other.figure for _, one, other in pairs):
            return True
        return any(
            keeps_score(one, other, lossless[i], lossless[j])
            if axis.is_score
            else one.figure > other.figure
            for axis, one, other in pairs
        )

    return {i for i in complete if all(keeps(i, j) for j in complete if j != i)}
