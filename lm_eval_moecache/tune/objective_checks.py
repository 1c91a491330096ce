"""Whether a search can be made, and its tasks can answer: found before the first run."""

from __future__ import annotations

from lm_eval_moecache.harness.tasks import HIGHER_IS_BETTER
from lm_eval_moecache.records.ledger import GENERATE
from lm_eval_moecache.sweep.evaluation import answers_of, check_task_names, leaf_tasks
from lm_eval_moecache.sweep.validation import check_cell
from lm_eval_moecache.tune.measure import Objective

OF_GENERATION = frozenset({"tok_per_s", "tpot_ms", "itl_ms", "output_throughput"})
"""Metrics of the tokens after a request's first, which only a generating task has."""


def check_objective(objective: Objective) -> None:
    """Raise ValueError where no run of it could begin, or its tasks have not what is asked.

    That is the metric, and a score for which more is better.
    """
    if not objective.tasks:
        raise ValueError("tasks='' names none. Allowed: comma-separated names of tasks.")
    check_task_names(objective.tasks, ())
    # Before a folder is made, which would then be a search with these options.
    check_cell(objective.cell({"policy": "on_demand"}))
    tasks = leaf_tasks(objective.tasks)
    named = f"tasks={','.join(objective.tasks)}"
    if objective.metric in OF_GENERATION:
        kinds = answers_of(tasks)
        if GENERATE not in kinds:
            others = "ttft_ms, hit_rate or miss_rate"
            raise ValueError(
                f"{named} give no {objective.metric}: they generate nothing ({', '.join(kinds)}). "
                f"Allowed: a task with generation among them, or another metric: {others}."
            )
    if not any(
        better
        for task in tasks.values()
        for name, better in task.higher_is_better().items()
        if name not in HIGHER_IS_BETTER
    ):
        raise ValueError(
            f"{named} give no accuracy: they have no score for which more is better. "
            "Allowed: one of them with such a score."
        )
