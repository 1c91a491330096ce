"""What a comparison of two runs shows: a figure, its interval and a test, over shared documents.

The samples are documents (of right-or-wrong answers, of texts, of times), or whatever an analysis
has a row for. A figure is a ratio of means, a difference of means, or a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.report.columns import find_score
from lm_eval_moecache.report.results import Run
from lm_eval_moecache.report.statistics import (
    answers_interval,
    bootstrap_interval,
    margin_test,
    mean_interval,
    sign_flip_test,
)

Floats = npt.NDArray[np.float64]
_MOST = 1e150
"""Ratios and squares of more overflow."""
Form = Literal["ratio", "difference", "value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Paired samples. `answers`: right or wrong; `texts`: log-likelihoods with token counts.

    `traces` are single replays, too few for a test. `old` is empty for the mean of one run.
    """

    kind: Literal["figures", "answers", "texts", "traces"]
    new: Floats
    old: Floats
    unit: str
    tokens: Floats | None = None

    @property
    def changes(self) -> tuple[int, int]:
        """Answers won and lost."""
        return int(np.sum(self.new > self.old)), int(np.sum(self.new < self.old))


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with its 95% interval, and the chances of it if the truth were a bound.

    Of traces: the range over them, and chances of 0 or 1, which say whether all lie beyond it.
    """

    figure: float
    low: float
    high: float
    samples: Samples
    form: Form

    def p_above(self, bound: float) -> float:
        """Return the chance of a figure as high as this if the truth were `bound`."""
        return self._p(bound, 1.0)

    def p_below(self, bound: float) -> float:
        return self._p(bound, -1.0)

    @property
    def nothing_changed(self) -> bool:
        """Whether two measured sides are equal in every sample: there is nothing to test."""
        data = self.samples
        return data.kind == "figures" and bool(data.old.size) and np.array_equal(data.new, data.old)

    @property
    def by(self) -> str:
        data = self.samples
        if self.nothing_changed:
            return f"equal in all {data.new.size} {data.unit}"
        if data.kind == "answers":
            won, lost = data.changes
            return f"exact, {lost} lost and {won} won of {data.new.size}"
        if data.kind == "traces":
            return f"all of {data.new.size} traces"
        return f"sign flips over {data.new.size} {data.unit}"

    def _p(self, bound: float, sign: float) -> float:
        data = self.samples
        if data.kind == "traces":
            nearest = self.low if sign > 0 else self.high
            return 0.0 if sign * (nearest - bound) > 0 else 1.0
        if data.kind == "answers":
            return margin_test(*data.changes, data.new.size, bound, sign)
        return sign_flip_test(sign * _beyond(data, bound, self.form))


def _beyond(data: Samples, bound: float, form: Form) -> Floats:
    """Return per sample how far it lies beyond the bound; their mean is 0 at the bound."""
    if data.kind == "texts":
        assert data.tokens is not None, "texts without tokens"
        return data.old - data.new - math.log(bound) * data.tokens
    if form == "ratio":
        return data.new - bound * data.old
    return data.new - (data.old if data.old.size else 0.0) - bound


def estimate(data: Samples, form: Form) -> Estimate:
    """Return the figure of these samples with its interval.

    ValueError for fewer than two samples, and for a ratio to nothing.
    """
    _check(data, form)
    if data.kind == "answers":
        low, high = answers_interval(*data.changes, data.new.size)
        figure = float(np.mean(data.new) - np.mean(data.old))
        return Estimate(figure=figure, low=low, high=high, samples=data, form="difference")
    if data.kind == "traces":
        each = _by_trace(data, form)
        mean, low, high = float(each.mean()), float(each.min()), float(each.max())
        return Estimate(figure=mean, low=low, high=high, samples=data, form=form)
    if data.kind == "figures" and form != "ratio":
        each = data.new - (data.old if form == "difference" else 0.0)
        low, high = mean_interval(each)
        return Estimate(figure=float(each.mean()), low=low, high=high, samples=data, form=form)
    statistic: Callable[..., Floats] = (
        _perplexity_ratio if data.kind == "texts" else _ratio_of_means
    )
    sides = [data.new, data.old, *([] if data.tokens is None else [data.tokens])]
    figure = float(statistic(*sides))
    low, high = bootstrap_interval(sides, statistic)
    return Estimate(
        figure=figure, low=min(low, figure), high=max(high, figure), samples=data, form=form
    )


def _ratio_of_means(new: Floats, old: Floats, axis: int = -1) -> Floats:
    return np.asarray(new.mean(axis=axis) / old.mean(axis=axis))


def _perplexity_ratio(new: Floats, old: Floats, tokens: Floats, axis: int = -1) -> Floats:
    return np.asarray(np.exp((old - new).sum(axis=axis) / tokens.sum(axis=axis)))


def _check(data: Samples, form: Form) -> None:
    if data.new.size < (1 if data.kind == "traces" else 2):
        raise ValueError(f"{data.new.size} {data.unit} have the figure, which are too few.")
    if form == "value" and data.kind != "answers":
        return
    if data.old.size != data.new.size:
        raise ValueError("there is no other side to compare with: `versus`, or the column `old`.")
    old = data.old if data.kind == "traces" else data.old.mean(keepdims=True)
    if form == "ratio" and data.kind != "texts" and not old.all():
        raise ValueError("what is compared with is 0, to which there is no ratio.")
    if max(np.abs(data.new).max(), np.abs(data.old).max()) > _MOST:
        raise ValueError(f"a figure is beyond {_MOST:g}, which nobody has measured.")


def _by_trace(data: Samples, form: Form) -> Floats:
    if form == "ratio":
        return data.new / data.old
    return data.new - data.old if form == "difference" else data.new


def of_runs(new: Run, old: Run | None, metric: str, task: str | None) -> Samples:
    """Return the samples of a metric over the documents that both runs have.

    A metric of speed, else a task (or `task:metric`) whose answers or texts are compared. Raises
    ValueError where the records do not hold it.
    """
    task = task or _only_task(new)
    runs = [new] if old is None else [new, old]
    speed = [run.speed.get(task, {}).get(metric) for run in runs]
    if all(each is not None for each in speed):
        return _paired("figures", speed)
    score = find_score(new, metric)
    if score is None:
        known = [*new.speed.get(task, {}), *new.results]
        raise unknown(f"{new.run_id}: no document of task {task} has it: metric", metric, known)
    task = metric.partition(":")[0]
    found = [run.samples.get(task, {}).get(score.key, {}) for run in runs]
    if isinstance(next(iter(found[0].values()), None), list):
        return _texts(found, _tokens_per_word(new, task, found[0]))
    return _paired("answers" if old is not None else "figures", found)


def _only_task(run: Run) -> str:
    if len(run.tasks) != 1:
        raise ValueError(f"{run.run_id} has several tasks: the part has to name its `task`.")
    return run.tasks[0]


def _paired(kind: Any, found: Sequence[Mapping[str, Any] | None]) -> Samples:
    sides = [each or {} for each in found]
    documents = [doc for doc in sides[0] if all(doc in side for side in sides)]
    values = [np.asarray([float(side[doc]) for doc in documents]) for side in sides]
    old = values[1] if len(values) > 1 else np.empty(0)
    return Samples(kind=kind, new=values[0], old=old, unit="documents")


def _texts(found: Sequence[Mapping[str, Any]], per_word: float) -> Samples:
    if len(found) == 1:
        raise ValueError("a perplexity is compared with another run's: `versus` is missing.")
    new, old = found
    documents = [doc for doc in new if doc in old]
    return Samples(
        kind="texts",
        new=np.asarray([float(new[doc][0]) for doc in documents]),
        old=np.asarray([float(old[doc][0]) for doc in documents]),
        unit="documents",
        tokens=np.asarray([new[doc][1] * per_word for doc in documents]),
    )


def _tokens_per_word(run: Run, task: str, texts: Mapping[str, Any]) -> float:
    """Papers tell perplexity by token; the records count words, and bytes by token read."""
    figures = run.moecache["tasks"][task]
    per_token = figures.get("bytes_per_token")
    if not per_token:
        raise ValueError(f"{run.run_id}: nothing was moved, and so no tokens are told of.")
    words = sum(pair[1] for pair in texts.values())
    return float(figures["bytes_moved"] / per_token / words)
