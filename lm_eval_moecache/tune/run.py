"""One search, from what is asked to files: the front, and the best policy as a policy file.

The question is checked before the first run, and what was found is confirmed on documents that the
search has not seen.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval_moecache.harness.tasks import HIGHER_IS_BETTER
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.ledger import GENERATE
from lm_eval_moecache.sweep.evaluation import answers_of, check_task_names, leaf_tasks
from lm_eval_moecache.sweep.files import only_sweep
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.run import check_cell
from lm_eval_moecache.sweep.worker import BY_REPLAY
from lm_eval_moecache.tune.measure import (
    POINT,
    CandidateRunner,
    Figures,
    Objective,
    overrides_of,
)
from lm_eval_moecache.tune.outcome import (
    Entry,
    Outcome,
    confirmation_text,
    front_table,
    policy_yaml,
    read_outcome,
)
from lm_eval_moecache.tune.search import Effort, Search
from lm_eval_moecache.tune.space import DEFAULT_SPACE, read_space
from lm_eval_moecache.tune.study import open_study

OF_GENERATION = frozenset({"tok_per_s", "tpot_ms", "itl_ms", "output_throughput"})
"""Metrics of the tokens after a request's first, which only a generating task has."""


def tune(
    objective: Objective,
    effort: Effort,
    folder: Path,
    space_file: Path | None,
    say: Callable[[str], object],
) -> Outcome:
    """Search, confirm the best by runs of the model, and write `front.*` and `best.yaml`.

    Raises ValueError for anything the options can cause, before the first run.
    """
    space = read_space(space_file or DEFAULT_SPACE)
    check_objective(objective)
    with only_sweep(folder), CandidateRunner(objective, folder, effort.jobs) as runner:
        study = open_study(folder, objective, effort.seed)
        runner.prepare(space.max_depth)
        search = Search(runner, space.fit(runner.trace.geometry), effort, study, say)
        search.run()
        outcome = read_outcome(study, search.floor)
        best = outcome.fastest()
        if best is not None:
            found = confirm(runner, best, say)
            outcome = dataclasses.replace(outcome, confirmation=found)
            say(confirmation_text(best.name, found))
    write_whole(folder / "front.json", json.dumps(outcome.as_dict(), indent=1) + "\n")
    write_whole(folder / "front.md", front_table(outcome.as_dict()))
    if best is not None:
        write_whole(folder / "best.yaml", policy_yaml(best, outcome))
    return outcome


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


def other_documents(objective: Objective) -> dict[str, Sequence[int]]:
    """Return as many documents of each task again as were searched, or those that are left.

    Empty where the search has seen all documents of some task: then there are no others.
    """
    limit = objective.limit
    if limit is None:
        return {}
    found: dict[str, Sequence[int]] = {}
    for name, task in leaf_tasks(objective.tasks).items():
        size = len(task.eval_docs)
        # As lm-eval reads a share below 1.
        seen = -int(-size * limit // 1) if limit < 1 else int(limit)
        found[name] = range(seen, min(2 * seen, size))
    return found if all(found.values()) else {}


def confirm(
    runner: CandidateRunner, best: Entry, say: Callable[[str], object]
) -> dict[str, Any] | None:
    """Run the best policy beside plain loading on other documents; None where there are none.

    What is found at its best on some documents is worse on others: the loss stated here is the one
    to believe. A best that was only replayed is first run on the documents of the search: both must
    say the same. Raises ValueError where one of the runs fails.
    """
    plain, policy = {"policy": "on_demand"}, best.policy
    args = {**plain, **overrides_of(policy)}
    if policy["phases"] != "all":
        args["phases"] = policy["phases"]
    if best.measured_by == BY_REPLAY:
        [again] = _figures(runner, [runner.candidate(best.name, args)])
        say(f"{best.name}: run: accuracy {again.accuracy:.3f}, speed {again.speed:.1f}")
    samples = other_documents(runner.objective)
    if not samples:
        return None
    reference = runner.candidate("reference, other documents", plain, samples)
    chosen = runner.candidate(f"{best.name}, other documents", args, samples)
    before, after = _figures(runner, [reference, chosen])
    lost = (before.accuracy - after.accuracy) / POINT
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


def _figures(runner: CandidateRunner, candidates: Sequence[ResolvedCell]) -> list[Figures]:
    found = []
    for candidate, figures in zip(candidates, runner.run(candidates), strict=True):
        if isinstance(figures, str):
            raise ValueError(f"{candidate.cell.label}: {figures}")
        found.append(figures)
    return found
