"""One search, from what is asked to files: the front, and the best policy as a policy file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from lm_eval_moecache.sweep.files import only_sweep, write_atomically
from lm_eval_moecache.tune.confirm import confirm
from lm_eval_moecache.tune.measure import BY_REPLAY, CandidateRunner, Objective, overrides_of
from lm_eval_moecache.tune.objective_checks import check_objective
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


def tune(
    objective: Objective,
    effort: Effort,
    folder: Path,
    space_file: Path | None,
    say: Callable[[str], object],
) -> Outcome:
    """Search, confirm the best by runs of the model, and write `front.*` and `best.yaml`.

    A best that was only replayed is run once: both must say the same. Then it runs on documents
    that the search has not seen, beside plain loading, which tells what it loses there.

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
            _confirm(runner, best, say)
            found = confirm(runner, best)
            outcome = dataclasses.replace(outcome, confirmation=found)
            say(confirmation_text(best.name, found))
    write_atomically(folder / "front.json", json.dumps(outcome.as_dict(), indent=1) + "\n")
    write_atomically(folder / "front.md", front_table(outcome.as_dict()))
    if best is not None:
        write_atomically(folder / "best.yaml", policy_yaml(best, outcome))
    return outcome


def _confirm(runner: CandidateRunner, best: Entry, say: Callable[[str], object]) -> None:
    """Run the model where the best policy has only been replayed: both must say the same."""
    if best.measured_by != BY_REPLAY:
        return
    args = {"policy": "on_demand", **overrides_of(best.policy)}
    [found] = runner.run([runner.candidate(best.name, args)])
    if isinstance(found, str):
        raise ValueError(f"the best policy, {best.name}, was replayed, but does not run: {found}")
    say(f"{best.name}: run: accuracy {found.accuracy:.3f}, speed {found.speed:.1f}")
