"""What a leaderboard takes: results files that keep to its protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lm_eval_moecache.report.results import Run
from lm_eval_moecache.report.views import selected

_ROUNDING = 1e-9


def check_submission(run: Run, protocol: Mapping[str, Any]) -> None:
    """Check that a run may stand on a leaderboard whose `where` is `protocol`.

    Raises ValueError: a setting that is not the protocol's, a task without the scores of its
    documents, or a score that these do not add up to.
    """
    for key, wanted in protocol.items():
        if not selected(run, {key: wanted}):
            raise ValueError(
                f"{run.run_id}: the protocol has {key}={wanted!r}, and the run has not."
            )
    for task in run.moecache["tasks"]:
        kept = run.samples.get(task)
        if not kept:
            raise ValueError(
                f"{run.run_id}: task {task} lacks its documents' scores. Allowed: a record that "
                "`moecache sweep` wrote."
            )
        for score in run.scores(task):
            _check_score(run, task, score.key, score.value, kept.get(score.key, {}))


def _check_score(run: Run, task: str, key: str, value: float, documents: Mapping[str, Any]) -> None:
    numbers = [x for x in documents.values() if isinstance(x, (int, float))]
    if len(numbers) != len(documents) or not numbers:
        return  # not a mean over documents: a perplexity
    mean = math.fsum(numbers) / len(numbers)
    if not math.isclose(mean, value, abs_tol=_ROUNDING):
        raise ValueError(
            f"{run.run_id}: {task} {key} is {value!r}, but its documents' mean is {mean!r}."
        )
