"""One search, from objective to files: the Pareto front, and the best policy as a policy file.

The objective is checked before the first run. An Optuna study then draws compositions, and every
second trial is a shipped one until all have had a turn. A candidate's lossless part (its prefetch
and eviction) is replayed first, and a lossy one is left to Optuna's pruner before the model runs.
The best policy is confirmed on documents that the search has not seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import policy_names
from lm_eval_moecache.harness.tasks import HIGHER_IS_BETTER
from lm_eval_moecache.records.files import check_replaceable, write_whole
from lm_eval_moecache.records.ledger import GENERATE
from lm_eval_moecache.sweep.evaluation import answers_of, leaf_tasks
from lm_eval_moecache.sweep.files import only_sweep
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.pool import import_extra, local_pool
from lm_eval_moecache.sweep.run import check_cell
from lm_eval_moecache.sweep.worker import BY_REPLAY, forget_model
from lm_eval_moecache.tune.measure import POINT, CandidateRunner, Objective, overrides_of
from lm_eval_moecache.tune.outcome import (
    SEARCHED,
    SHIPPED,
    Entry,
    composition_text,
    confirmation_text,
    front_table,
    policy_yaml,
    read_outcome,
    sign_of,
)
from lm_eval_moecache.tune.space import DEFAULT_SPACE, Space, read_space

STUDY = "study.db"
_NAME = "moecache"
_STARTUP_TRIALS = 24
REFERENCE = "on_demand"
"""The composition that others are compared with, and the first trial."""
OF_GENERATION = frozenset({"tok_per_s", "tpot_ms", "itl_ms", "output_throughput"})
"""Metrics of the tokens after a request's first, which only tasks that generate have."""


def tune(
    objective: Objective,
    folder: Path,
    space_file: Path | None,
    say: Callable[[str], object],
    *,
    trials: int,
    timeout_s: float,
    seed: int,
    jobs: int,
) -> dict[str, Any]:
    """Search, confirm the best policy by runs of the model, write `front.*` and `best.yaml`.

    `trials` are drawn and shipped compositions together; after `timeout_s` running ones finish and
    no others start. With several `jobs`, which take an equal share of the trials each, `say` must
    be a function of a module. Raises ValueError for any fault of the options before the first run.
    """
    space = read_space(space_file or DEFAULT_SPACE)
    reference = check_objective(objective)
    reads = {"inputs": reference.inputs, "sources": reference.sources}
    with only_sweep(folder):
        study = open_study(folder, objective, seed, reads)
        runner = CandidateRunner(objective, folder)
        shipped, left_out = _shipped(runner)
        _resume(study, shipped)
        runner.prepare(space.max_depth)
        shares = [(seed + job, len(range(job, trials, jobs))) for job in range(jobs)]
        arguments = objective, folder, space, shipped, say, timeout_s
        if jobs == 1:
            _work(shares[0], *arguments)
        else:
            forget_model()  # each worker loads its own
            with local_pool(jobs) as submit:
                for future in submit(_work, shares, *arguments):
                    future.result()
        outcome = read_outcome(study, runner.floor, shipped, left_out)
        best = outcome["best"]
        if best is not None:
            outcome["confirmation"] = confirmation = confirm(runner, best, say)
            say(confirmation_text(best["name"], confirmation))
    write_whole(folder / "front.md", front_table(outcome))
    if best is not None:
        write_whole(folder / "best.yaml", policy_yaml(best, outcome["question"]))
    return outcome


def check_objective(objective: Objective) -> ResolvedCell:
    """Return the reference's cell.

    Raises ValueError where no run could start, or the tasks lack the metric or an accuracy: any
    score for which more is better.
    """
    if not objective.tasks:
        raise ValueError("tasks='' names none. Allowed: comma-separated names of tasks.")
    # Before the folder is created: it would then hold a search with these options.
    reference = check_cell(objective.cell({"policy": REFERENCE}))
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
    return reference


def other_documents(objective: Objective) -> dict[str, Sequence[int]]:
    """Return as many unseen documents of each task as the search has used, or all that are left.

    Task -> document numbers; empty where the search has seen all documents of some task.
    """
    limit = objective.limit
    if limit is None:
        return {}
    unseen: dict[str, Sequence[int]] = {}
    for name, task in leaf_tasks(objective.tasks).items():
        size = len(task.eval_docs)
        # Below 1 a limit is a share, which lm-eval rounds up.
        seen = -int(-size * limit // 1) if limit < 1 else int(limit)
        unseen[name] = range(seen, min(2 * seen, size))
    return unseen if all(unseen.values()) else {}


def confirm(
    runner: CandidateRunner, best: Entry, say: Callable[[str], object]
) -> dict[str, Any] | None:
    """Run the best policy and the reference on unseen documents; None where there are none.

    A policy selected on some documents does worse on others (selection bias): trust the loss stated
    here. A best policy that was only replayed is first run on the documents of the search; `say`
    receives its figures, which should equal the replay's. Raises ValueError where a run fails.
    """
    reference_args, policy, name = {"policy": REFERENCE}, best["policy"], best["name"]
    args = {**reference_args, **overrides_of(policy)}
    if policy["phases"] != "all":
        args["phases"] = policy["phases"]
    if best["measured_by"] == BY_REPLAY:
        live = runner.run(runner.candidate(name, args))
        metric = runner.objective.metric
        say(f"{name}: run: accuracy {live.accuracy:.3f}, {metric} {live.speed:.1f}")
    samples = other_documents(runner.objective)
    if not samples:
        return None
    reference = runner.candidate("reference, other documents", reference_args, samples)
    tuned = runner.candidate(f"{name}, other documents", args, samples)
    before, after = runner.run(reference), runner.run(tuned)
    points_lost = (before.accuracy - after.accuracy) / POINT
    return {
        "documents": {task: len(numbers) for task, numbers in samples.items()},
        "accuracy": after.accuracy,
        "stderr": after.stderr,
        "reference_accuracy": before.accuracy,
        "speed": after.speed,
        "reference_speed": before.speed,
        "points_lost": points_lost,
        "within_budget": points_lost <= runner.objective.budget + 1e-9,
    }


# --- the search ---


def _shipped(runner: CandidateRunner) -> tuple[list[str], dict[str, str]]:
    """Return the shipped compositions that can run here, and why each other cannot.

    The reference is the first; lossless ones, which a replay measures, come before lossy ones.
    """
    ranks, left_out = {}, {}
    for name in policy_names():
        try:
            policy = runner.candidate(name, {"policy": name}).config.policy
            ranks[name] = (name != REFERENCE, not policy.is_lossless)
        except ValueError as error:
            left_out[name] = str(error)
    return sorted(ranks, key=ranks.__getitem__), left_out


def _resume(study: Any, shipped: Sequence[str]) -> None:
    """Fail the trials that a kill left open; the reference or a killed composition is next."""
    states = import_optuna().trial.TrialState
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
        study.tell(trial.number, state=states.FAIL)
        if "composition" in trial.user_attrs:
            study.enqueue_trial({}, user_attrs=trial.user_attrs)
    if not study.get_trials(deepcopy=False):
        _enqueue_next(study, shipped)


def _enqueue_next(study: Any, shipped: Sequence[str]) -> None:
    """Make a shipped composition the next trial, if one has had no turn."""
    trials = study.get_trials(deepcopy=False)
    taken = {trial.user_attrs.get("composition") for trial in trials}
    name = next((name for name in shipped if name not in taken), None)
    if name is not None:
        study.enqueue_trial({}, user_attrs={"composition": name})


def _work(
    share: tuple[int, int],
    objective: Objective,
    folder: Path,
    space: Space,
    shipped: Sequence[str],
    say: Callable[[str], object],
    timeout_s: float,
) -> None:
    """Run a share (its seed, its number of trials) of a search, until they or the time are up."""
    seed, trials = share
    runner = CandidateRunner(objective, folder)
    runner.prepare(space.max_depth)

    def alternate(study: Any, trial: Any) -> None:
        if "composition" not in trial.user_attrs:
            _enqueue_next(study, shipped)

    open_study(folder, objective, seed).optimize(
        Search(runner, space.fit(runner.trace.geometry), say),
        trials,
        timeout_s,
        catch=(Exception,),
        callbacks=[alternate],
    )


@dataclass(frozen=True, slots=True)
class Search:
    """The objective of an Optuna study; `say` receives a line for each measured candidate."""

    runner: CandidateRunner
    space: Space
    say: Callable[[str], object]

    def __call__(self, trial: Any) -> float:
        """Return a candidate's speed; its policy and figures become the trial's attributes.

        Raises TrialPruned for a pairing that is refused, and where the pruner expects too little of
        its lossless part.
        """
        name = trial.user_attrs.get("composition")
        args = {"policy": name or REFERENCE, **({} if name else self.space.suggest(trial))}
        label = name or f"trial {trial.number}"
        pruned = import_optuna().TrialPruned
        try:
            planned = self.runner.candidate(label, args)
        except ValueError as error:
            raise pruned(str(error)) from error
        policy = planned.config.policy
        measured = self.runner.replay(policy)
        if measured is not None:
            trial.report(measured.speed, 0)
        if measured is None or not policy.is_lossless:
            if name is None and trial.should_prune():
                raise pruned
            try:
                measured = self.runner.run(planned)
            except Exception as error:
                trial.set_user_attr("reason", str(error))
                self.say(f"{label}: failed: {error}")
                raise
        entry = {
            "name": label,
            "kind": SHIPPED if name else SEARCHED,
            "policy": policy.as_dict(),
            "is_lossless": policy.is_lossless,
            **dataclasses.asdict(measured),
        }
        trial.set_user_attr("entry", entry)
        trial.set_constraint("budget", self.runner.floor - measured.accuracy)
        source = "replayed" if measured.measured_by == BY_REPLAY else "run"
        speed = f"{self.runner.objective.metric} {measured.speed:.1f}"
        text = f"{label}: accuracy {measured.accuracy:.3f}, {speed} ({source})"
        self.say(text if name else f"{text}: {composition_text(policy.as_dict())}")
        return measured.speed


# --- the Optuna study, in a database file, so that an interrupted search resumes ---


def import_optuna() -> Any:
    """Import Optuna. Raises ValueError naming the extra that installs it."""
    return import_extra("moecache tune", "optuna", "tune")


def open_study(
    folder: Path, objective: Objective, seed: int, reads: Mapping[str, str | None] | None = None
) -> Any:
    """Open or create the folder's study; the caller must hold the folder's lock.

    `reads` holds digests of weights, artefacts, tasks and code. Raises ValueError where the study
    has another objective or has read something else, or its file is unreadable; OSError for a file
    that is a link, whose target would be written.
    """
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    check_replaceable(folder / STUDY)
    try:
        study = optuna.create_study(
            study_name=_NAME,
            storage=f"sqlite:///{(folder / STUDY).resolve()}",
            direction="maximize" if sign_of(objective.metric) > 0 else "minimize",
            pruner=optuna.pruners.MedianPruner(),
            load_if_exists=True,
        )
        recorded, num_trials = study.user_attrs.get("question", {}), len(study.get_trials())
    except OSError:
        raise
    except Exception as error:  # sqlalchemy's, or what Optuna makes of a damaged row
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"out={str(folder)!r}: {STUDY} is not a readable study of a search ({reason}). Give "
            "another folder, or remove it to start from the beginning."
        ) from error
    question = {**dataclasses.asdict(objective), "tasks": list(objective.tasks), **(reads or {})}
    recorded = {**question, **recorded}
    for key, value in question.items():
        if recorded[key] != value:
            if key in (reads or {}):
                raise ValueError(
                    f"out={str(folder)!r} holds a search on other weights, artefacts, tasks or "
                    f"code ({key} {recorded[key]}, now {value}): its accuracies and speeds are not "
                    "theirs. Give another folder, or remove it to start from the beginning."
                )
            raise ValueError(
                f"out={str(folder)!r} holds a search with {key}={recorded[key]!r}, not {value!r}. "
                "Give another folder, or the same options to go on with it."
            )
    study.set_user_attr("question", recorded)
    # A resumed search must not repeat its first trials.
    study.sampler = optuna.samplers.TPESampler(
        seed=seed + num_trials, n_startup_trials=_STARTUP_TRIALS
    )
    return study
