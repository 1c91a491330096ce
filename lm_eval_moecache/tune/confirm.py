"""Confirms what a search has found on documents that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval_moecache.sweep.evaluation import quiet, task_sizes
from lm_eval_moecache.tune.measure import CandidateRunner, Objective, overrides_of
from lm_eval_moecache.tune.outcome import Entry

_POINT = 0.01


def other_documents(objective: Objective) -> dict[str, Sequence[int]]:
    """Return as many documents of each task again as were searched, or those that are left.

    Empty where the search has seen all documents of some task: then there are no others.
    """
    limit = objective.limit
    if limit is None:
        return {}
    with quiet():
        sizes = task_sizes(objective.tasks)
    found: dict[str, Sequence[int]] = {}
    for task, size in sizes.items():
        # As lm-eval reads a share below 1.
        seen = -int(-size * limit // 1) if limit < 1 else int(limit)
        found[task] = range(seen, min(2 * seen, size))
    return found if all(found.values()) else {}


def confirm(runner: CandidateRunner, best: Entry) -> dict[str, Any] | None:
    """Run the best policy and the reference on other documents; None where there are none.

    What is found at its best on some documents is worse on others: the loss stated here is the one
    to believe. Raises ValueError where one of the two runs fails.
    """
    samples = other_documents(runner.objective)
    if not samples:
        return None
    reference = runner.candidate("reference, other documents", {"policy": "on_demand"}, samples)
    args = {"policy": "on_demand", **overrides_of(best.policy), "phases": best.policy["phases"]}
    if args["phases"] == "all":
        del args["phases"]
    chosen = runner.candidate(f"{best.name}, other documents", args, samples)
    figures = runner.run([reference, chosen])
    for candidate, found in zip((reference, chosen), figures, strict=True):
        if isinstance(found, str):
            raise ValueError(f"{candidate.name}: {found}")
    before, after = figures
    assert not isinstance(before, str) and not isinstance(after, str), "checked above"
    lost = (before.accuracy - after.accuracy) / _POINT
    return {
        "documents": {task: len(numbers) for task, numbers in samples.items()},
        "accuracy": after.accuracy,
        "stderr": after.stderr,
        "reference_accuracy": before.accuracy,
        "speed": after.speed,
        "reference_speed": before.speed,
        "points_lost": lost,
        "within_budget": lost <= runner.objective.budget + 1e-9,
    }
