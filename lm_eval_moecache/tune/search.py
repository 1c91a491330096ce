"""One search, from objective to files: the Pareto front, and the best policy as a policy file.

The objective is checked before the first run. Shipped compositions are measured first, then
candidates of an Optuna study. Every candidate's lossless part (its prefetch and eviction) is
replayed first; a lossy candidate whose lossless part is slow is pruned before the model runs. The
best policy is confirmed on documents that the search has not seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import policy_names, unmangle
from lm_eval_moecache.algorithms.registry import AXES, find_algorithm, parameters_of
from lm_eval_moecache.harness.tasks import HIGHER_IS_BETTER
from lm_eval_moecache.records.files import check_replaceable, read_yaml, write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import RENAMED
from lm_eval_moecache.records.ledger import GENERATE
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.records.schemas import check
from lm_eval_moecache.records.schemas.inputs import SIZES, SpaceFile
from lm_eval_moecache.sweep.evaluation import answers_of, leaf_tasks
from lm_eval_moecache.sweep.files import only_sweep
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.pool import local_pool
from lm_eval_moecache.sweep.run import check_cell, import_extra
from lm_eval_moecache.sweep.worker import BY_REPLAY
from lm_eval_moecache.tune.measure import POINT, CandidateRunner, Measured, Objective, overrides_of
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

logger = logging.getLogger(__name__)
JOURNAL = "study.journal"
_STUDY = "moecache"
_STARTUP_TRIALS = 24
DEFAULT_SPACE = Path(__file__).with_name("space.yaml")
REFERENCE = "on_demand"
"""The composition that others are compared with; measured even when time is up."""
Candidate = tuple[ResolvedCell, Any]
"""A cell to run, and its trial; a shipped composition has no trial before it is measured."""
OF_GENERATION = frozenset({"tok_per_s", "tpot_ms", "itl_ms", "output_throughput"})
"""Metrics of the tokens after a request's first, which only tasks that generate have."""


def tune(
    objective: Objective,
    folder: Path,
    space_file: Path | None,
    say: Callable[[str], object],
    *,
    seed: int,
    jobs: int,
    **effort: Any,
) -> dict[str, Any]:
    """Search, confirm the best policy by runs of the model, write `front.*` and `best.yaml`.

    `effort` holds `trials`, `timeout_s` and `slack` of `Search`. Returns the content of
    `front.json`. Raises ValueError for any fault of the options before the first run.
    """
    space = read_space(space_file or DEFAULT_SPACE)
    reference = check_objective(objective)
    reads = {"inputs": reference.inputs, "sources": reference.sources}
    processes = local_pool(jobs) if jobs > 1 else contextlib.nullcontext()
    with only_sweep(folder), processes as pool:
        runner = CandidateRunner(objective, folder, pool)
        study = open_study(folder, objective, seed, reads)
        runner.prepare(space.max_depth)
        space = space.fit(runner.trace.geometry)
        search = Search(runner=runner, space=space, study=study, say=say, jobs=jobs, **effort)
        search.run()
        outcome = read_outcome(study, search.floor)
        best = outcome["best"]
        if best is not None:
            outcome["confirmation"] = confirmation = confirm(runner, best, say)
            say(confirmation_text(best["name"], confirmation))
    write_whole(folder / "front.json", json.dumps(outcome, indent=1) + "\n")
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
        [live] = _measure(runner, [runner.candidate(name, args)])
        say(f"{name}: run: accuracy {live.accuracy:.3f}, speed {live.speed:.1f}")
    samples = other_documents(runner.objective)
    if not samples:
        return None
    reference = runner.candidate("reference, other documents", reference_args, samples)
    tuned = runner.candidate(f"{name}, other documents", args, samples)
    before, after = _measure(runner, [reference, tuned])
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


def _measure(runner: CandidateRunner, candidates: Sequence[ResolvedCell]) -> list[Measured]:
    measured = []
    for candidate, outcome in zip(candidates, runner.run(candidates), strict=True):
        if isinstance(outcome, str):
            raise ValueError(f"{candidate.cell.label}: {outcome}")
        measured.append(outcome)
    return measured


# --- the search ---


@dataclass(kw_only=True, slots=True)
class Search:
    """One search over a runner; `say` receives a line of progress for each candidate."""

    runner: CandidateRunner
    space: Space
    study: Any
    say: Callable[[str], object]
    jobs: int
    trials: int
    timeout_s: float
    slack: float
    """How much slower than the fastest one a lossless part may be, as a share."""
    best_lossless: float | None = None
    _deadline_s: float = 0.0

    @property
    def sign(self) -> int:
        """1 where more of the metric is better, else -1."""
        return sign_of(self.runner.objective.metric)

    @property
    def floor(self) -> float:
        """The lowest accuracy that meets the budget."""
        # A loss of exactly the budget meets it, rounding errors aside.
        return self.runner.reference.accuracy - self.runner.objective.budget * POINT - 1e-9

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def run(self) -> None:
        """Measure the shipped compositions, then draw candidates until trials or time are up.

        Compositions measured by an earlier search are not measured again. When time is up, running
        candidates finish and no others start.
        """
        self._deadline_s = time.monotonic() + self.timeout_s
        states, jobs = import_optuna().trial.TrialState, self.jobs
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            # Left open by a kill: fail them, so that their candidates may be drawn again.
            if trial.state in (states.RUNNING, states.WAITING):
                self.study.tell(trial.number, state=states.FAIL)
        measured = {t.user_attrs.get("composition") for t in trials if "figures" in t.user_attrs}
        waiting: list[Candidate] = []
        for name in policy_names():
            if name not in measured:
                waiting += self._take(name, {"policy": name}, None)
        for start in range(0, len(waiting), jobs):
            self._run(waiting[start : start + jobs])
        num_left = self.trials
        while num_left > 0 and not self._is_over:
            waiting = []
            while num_left > 0 and len(waiting) < jobs and not self._is_over:
                num_left -= 1
                trial = self.study.ask()
                args = {"policy": REFERENCE, **self.space.suggest(trial)}
                waiting += self._take(f"trial {trial.number}", args, trial)
            self._run(waiting)

    def _take(self, name: str, args: Mapping[str, Any], trial: Any) -> list[Candidate]:
        """Return the candidate if the model must run it; settle any other without a run."""
        if trial is None and self._leaves_out(name):
            return []
        try:
            planned = self.runner.candidate(name, args)
        except ValueError as error:
            if trial is None:
                self._fail(name, trial, str(error))
            else:
                self._close(name, trial, "PRUNED", {"reason": f"refused: {error}"})
            return []
        policy = planned.config.policy
        if trial is None and not policy.is_lossless:
            return [(planned, trial)]
        try:
            lossless = self.runner.lossless(policy)
        except ValueError:
            # The trace lacks the inputs of a prefetcher that has its own predictor.
            return [(planned, trial)]
        best = self.best_lossless
        if best is None or self.sign * lossless.speed > self.sign * best:
            self.best_lossless = best = lossless.speed
        if policy.is_lossless:
            self._enter(planned, trial, lossless)
            return []
        ratio = lossless.speed / best
        if (ratio if self.sign > 0 else 1 / ratio) < 1 - self.slack:
            reason = f"its lossless part: {lossless.speed:.1f}"
            self._close(name, trial, "PRUNED", {"reason": reason})
            return []
        return [(planned, trial)]

    def _run(self, candidates: Sequence[Candidate]) -> None:
        """Run the model under each candidate in time, and enter its result or its failure."""
        started = [
            (planned, trial)
            for planned, trial in candidates
            if trial is not None or not self._leaves_out(str(planned.cell.label))
        ]
        measured = self.runner.run([planned for planned, _ in started])
        for (planned, trial), outcome in zip(started, measured, strict=True):
            if isinstance(outcome, str):
                self._fail(str(planned.cell.label), trial, outcome)
            else:
                self._enter(planned, trial, outcome)

    def _leaves_out(self, name: str) -> bool:
        """Whether time is up for a composition, which is then entered as left out."""
        if name == REFERENCE or not self._is_over:
            return False
        timeout = f"--timeout={self.timeout_s:g}"
        self._fail(name, None, f"{timeout} was over; the same command continues the search")
        return True

    def _enter(self, planned: ResolvedCell, trial: Any, measured: Measured) -> None:
        name, policy = str(planned.cell.label), planned.config.policy.as_dict()
        figures, excess = dataclasses.asdict(measured), self.floor - measured.accuracy
        attributes = {"policy": policy, "figures": figures, "excess": excess}
        attributes["is_lossless"] = planned.config.policy.is_lossless
        self._close(name, trial, "COMPLETE", attributes, [measured.accuracy, measured.speed])
        source = "replayed" if measured.measured_by == BY_REPLAY else "run"
        message = f"{name}: accuracy {measured.accuracy:.3f}, speed {measured.speed:.1f} ({source})"
        self.say(message if trial is None else f"{message}: {composition_text(policy)}")

    def _fail(self, name: str, trial: Any, reason: str) -> None:
        """Enter why a candidate's run failed, or why a composition is left out."""
        self._close(name, trial, "FAIL", {"reason": reason})
        self.say(f"{name}: {'left out' if trial is None else 'failed'}: {reason}")

    def _close(
        self,
        name: str,
        trial: Any,
        state: str,
        attributes: Mapping[str, Any],
        values: Sequence[float] | None = None,
    ) -> None:
        """End a trial in an Optuna state; a composition gets one without parameters."""
        trials = import_optuna().trial
        ended = {"values": values, "state": trials.TrialState[state]}
        if trial is None:
            attributes = {"kind": SHIPPED, "composition": name, **attributes}
            self.study.add_trial(trials.create_trial(**ended, user_attrs=attributes))
            return
        for key, value in {"kind": SEARCHED, **attributes}.items():
            trial.set_user_attr(key, value)
        self.study.tell(trial, **ended)


# --- the search space: algorithms, and the ranges of their parameters ---


@dataclass(frozen=True, slots=True)
class Space:
    """`axes[axis][algorithm][parameter]` is a list of choices or a range."""

    axes: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw one composition from an Optuna trial, as the overrides of `load_policy`."""
        overrides: dict[str, Any] = {}
        for axis, algorithms in self.axes.items():
            name = trial.suggest_categorical(axis, list(algorithms))
            overrides[axis] = name
            for parameter, values in algorithms[name].items():
                # The algorithm is part of the name: two algorithms may share a parameter's name.
                value = _suggest(trial, f"{axis}.{name}.{parameter}", values)
                overrides[f"{axis}.{parameter}"] = value
        return overrides

    def fit(self, geometry: Geometry) -> Space:
        """Return the space with the names of sizes (`top_k`, ...) replaced by the model's."""
        sizes = {name: getattr(geometry, name) for name in SIZES}

        def fitted(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: fitted(inner) for key, inner in value.items()}
            return sizes.get(value, value) if isinstance(value, str) else value

        return Space(fitted(self.axes))

    @property
    def max_depth(self) -> int:
        """The furthest lookahead of the space's prefetchers, in layers."""
        reach = 1
        for parameters in self.axes["prefetch"].values():
            depth = parameters.get("depth", [1])
            reach = max(reach, *map(int, [depth["high"]] if isinstance(depth, dict) else depth))
        return reach


def read_space(path: Path) -> Space:
    """Read a space file. Raises ValueError naming what is unknown or malformed."""
    what = f"space={str(path)!r}"
    schema = check(SpaceFile, read_yaml(path, what), what)
    axes: dict[str, dict[str, dict[str, Any]]] = {
        axis: dict(getattr(schema, axis)) for axis in AXES
    }
    for axis in AXES:
        for name, parameters in axes[axis].items():
            parameter_names = [unmangle(n) for n in parameters_of(find_algorithm(axis, name))]
            for parameter in parameters:
                if parameter not in parameter_names:
                    raise unknown_name_error(
                        f"space: {axis}.{name}: parameter", parameter, parameter_names
                    )
    return Space(axes)


def _suggest(trial: Any, name: str, values: Any) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    low, high, log = values["low"], values["high"], bool(values.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, log=log)
    return trial.suggest_float(name, float(low), float(high), log=log)


# --- the Optuna study, in a journal file, so that an interrupted search resumes ---


def import_optuna() -> Any:
    """Import Optuna. Raises ValueError naming the extra that installs it."""
    return import_extra("moecache tune", "optuna", "tune")


def open_study(
    folder: Path, objective: Objective, seed: int, reads: Mapping[str, str | None] | None = None
) -> Any:
    """Open or create the folder's study; the caller must hold the folder's lock.

    `reads` holds digests of weights, artefacts, tasks and code. Raises ValueError where the study
    has another objective or has read something else, or its journal is unreadable.
    """
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    _repair_journal(folder / JOURNAL)
    directions = ["maximize", "maximize" if sign_of(objective.metric) > 0 else "minimize"]
    journal = optuna.storages.journal
    try:
        storage = journal.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL)))
        study = optuna.create_study(
            study_name=_STUDY, storage=storage, directions=directions, load_if_exists=True
        )
    except OSError:
        raise
    except Exception as error:  # Optuna trusts its journal: KeyError, AssertionError ...
        raise ValueError(
            f"out={str(folder)!r}: {JOURNAL} is not a readable journal of a search "
            f"({type(error).__name__}: {error}). Give another folder, or remove it to start from "
            "the beginning."
        ) from error
    question = {**dataclasses.asdict(objective), "tasks": list(objective.tasks), **(reads or {})}
    recorded = {**question, **study.user_attrs.get("question", {})}
    recorded["hardware"] = RENAMED.get(recorded["hardware"], recorded["hardware"])
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
    with warnings.catch_warnings():
        # `constraints_func` is deprecated in Optuna 5 for a method that Optuna 4 does not have.
        warnings.simplefilter("ignore", FutureWarning)
        study.sampler = optuna.samplers.TPESampler(
            # A resumed search must not repeat its first trials.
            seed=seed + len(study.get_trials(deepcopy=False)),
            n_startup_trials=_STARTUP_TRIALS,
            constraints_func=lambda trial: (trial.user_attrs.get("excess", 1.0),),
        )
    return study


def _repair_journal(journal: Path) -> None:
    """Repair a journal after a kill or a full disk in the middle of a write.

    Removes the lock, for which Optuna would wait half a minute, and a torn last line: the next
    entry would be appended to it, and the journal would be lost. Raises OSError for a journal that
    is a link, whose target would be written.
    """
    check_replaceable(journal)
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.is_file():
        data = journal.read_bytes()
        whole_bytes = data.rfind(b"\n") + 1
        if whole_bytes < len(data):
            logger.warning("%s: its last line was torn, and is left out.", journal)
            os.truncate(journal, whole_bytes)
