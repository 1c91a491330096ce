"""One search, from what is asked to files: the front, and the best policy as a policy file.

The question is checked before the first run. Shipped compositions are measured first, then
candidates of an Optuna study. Every candidate's lossless part (its prefetch and eviction) is
replayed first; a lossy candidate whose lossless part is slow is pruned there, before the model
runs. What was found is confirmed on documents that the search has not seen.
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
from lm_eval_moecache.records.files import read_yaml, write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import RENAMED
from lm_eval_moecache.records.ledger import GENERATE
from lm_eval_moecache.records.numbers import unknown
from lm_eval_moecache.records.schemas import check
from lm_eval_moecache.records.schemas.inputs import SIZES, SpaceFile
from lm_eval_moecache.sweep.evaluation import answers_of, leaf_tasks
from lm_eval_moecache.sweep.files import only_sweep
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.pool import local_pool
from lm_eval_moecache.sweep.run import check_cell, import_extra
from lm_eval_moecache.sweep.worker import BY_REPLAY
from lm_eval_moecache.tune.measure import POINT, CandidateRunner, Figures, Objective, overrides_of
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
"""The composition that is measured whatever the time: what the others are compared with."""
Candidate = tuple[ResolvedCell, Any]
"""What would run, and its trial; a shipped composition has none before it is measured."""
OF_GENERATION = frozenset({"tok_per_s", "tpot_ms", "itl_ms", "output_throughput"})
"""Metrics of the tokens after a request's first, which only a generating task has."""


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
    """Search, confirm the best by runs of the model, and write `front.*` and `best.yaml`.

    `effort` is that of `Search`. Returns what `front.json` holds. Raises ValueError for anything
    the options can cause, before the first run.
    """
    space = read_space(space_file or DEFAULT_SPACE)
    check_objective(objective)
    processes = local_pool(jobs) if jobs > 1 else contextlib.nullcontext()
    with only_sweep(folder), processes as pool:
        runner = CandidateRunner(objective, folder, pool)
        study = open_study(folder, objective, seed)
        runner.prepare(space.max_depth)
        space = space.fit(runner.trace.geometry)
        search = Search(runner=runner, space=space, study=study, say=say, jobs=jobs, **effort)
        search.run()
        outcome = read_outcome(study, search.floor)
        best = outcome["best"]
        if best is not None:
            outcome["confirmation"] = found = confirm(runner, best, say)
            say(confirmation_text(best["name"], found))
    write_whole(folder / "front.json", json.dumps(outcome, indent=1) + "\n")
    write_whole(folder / "front.md", front_table(outcome))
    if best is not None:
        write_whole(folder / "best.yaml", policy_yaml(best, outcome["question"]))
    return outcome


def check_objective(objective: Objective) -> None:
    """Raise ValueError where no run of it could begin, or its tasks have not what is asked.

    That is the metric, and a score for which more is better.
    """
    if not objective.tasks:
        raise ValueError("tasks='' names none. Allowed: comma-separated names of tasks.")
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
    plain, policy, name = {"policy": REFERENCE}, best["policy"], best["name"]
    args = {**plain, **overrides_of(policy)}
    if policy["phases"] != "all":
        args["phases"] = policy["phases"]
    if best["measured_by"] == BY_REPLAY:
        [again] = _figures(runner, [runner.candidate(name, args)])
        say(f"{name}: run: accuracy {again.accuracy:.3f}, speed {again.speed:.1f}")
    samples = other_documents(runner.objective)
    if not samples:
        return None
    reference = runner.candidate("reference, other documents", plain, samples)
    chosen = runner.candidate(f"{name}, other documents", args, samples)
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


# --- the search ---


@dataclass(kw_only=True, slots=True)
class Search:
    """One search over a runner; `say` is told what happens."""

    runner: CandidateRunner
    space: Space
    study: Any
    say: Callable[[str], object]
    jobs: int
    trials: int
    timeout_s: float
    slack: float
    """How much slower than the best one replayed a lossless part may be."""
    best_lossless: float | None = None
    _deadline_s: float = 0.0

    @property
    def sign(self) -> int:
        return sign_of(self.runner.objective.metric)

    @property
    def floor(self) -> float:
        """The accuracy that a policy needs to meet the budget."""
        # A budget of one point is met by a loss of one point, whatever the floats say.
        return self.runner.reference.accuracy - self.runner.objective.budget * POINT - 1e-9

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def run(self) -> None:
        """Measure the shipped compositions, then draw candidates until trials or time are up.

        Compositions that an earlier search has measured are not measured again. What runs when the
        time is up is finished; nothing else begins.
        """
        self._deadline_s = time.monotonic() + self.timeout_s
        states, jobs = import_optuna().trial.TrialState, self.jobs
        trials = self.study.get_trials(deepcopy=False)
        for trial in trials:
            # What a kill has left open: what it drew may be drawn again.
            if trial.state in (states.RUNNING, states.WAITING):
                self.study.tell(trial.number, state=states.FAIL)
        known = {t.user_attrs.get("composition") for t in trials if "figures" in t.user_attrs}
        waiting: list[Candidate] = []
        for name in policy_names():
            if name not in known:
                waiting += self._take(name, {"policy": name}, None)
        for start in range(0, len(waiting), jobs):
            self._run(waiting[start : start + jobs])
        left = self.trials
        while left > 0 and not self._is_over:
            waiting = []
            while left > 0 and len(waiting) < jobs and not self._is_over:
                left -= 1
                trial = self.study.ask()
                args = {"policy": REFERENCE, **self.space.suggest(trial)}
                waiting += self._take(f"trial {trial.number}", args, trial)
            self._run(waiting)

    def _take(self, name: str, args: Mapping[str, Any], trial: Any) -> list[Candidate]:
        """Return a candidate that the model has to run; settle all others by themselves."""
        states = import_optuna().trial.TrialState
        if trial is None and self._leaves_out(name):
            return []
        try:
            planned = self.runner.candidate(name, args)
        except ValueError as error:
            if trial is None:
                self._fail(name, trial, str(error))
            else:
                self._close(name, trial, states.PRUNED, {"reason": f"refused: {error}"})
            return []
        policy = planned.config.policy
        if trial is None and not policy.is_lossless:
            return [(planned, trial)]
        try:
            figures = self.runner.lossless(policy)
        except ValueError:
            # The trace lacks what a prefetcher with a predictor of its own has to see.
            return [(planned, trial)]
        best = self.best_lossless
        if best is None or self.sign * figures.speed > self.sign * best:
            self.best_lossless = best = figures.speed
        if policy.is_lossless:
            self._enter(planned, trial, figures)
            return []
        ratio = figures.speed / best
        if (ratio if self.sign > 0 else 1 / ratio) < 1 - self.slack:
            reason = f"its lossless part: {figures.speed:.1f}"
            self._close(name, trial, states.PRUNED, {"reason": reason})
            return []
        return [(planned, trial)]

    def _run(self, candidates: Sequence[Candidate]) -> None:
        """Run the model under each, and enter what was found. No composition begins too late."""
        begun = [
            (planned, trial)
            for planned, trial in candidates
            if trial is not None or not self._leaves_out(str(planned.cell.label))
        ]
        found = self.runner.run([planned for planned, _ in begun])
        for (planned, trial), figures in zip(begun, found, strict=True):
            if isinstance(figures, str):
                self._fail(str(planned.cell.label), trial, figures)
            else:
                self._enter(planned, trial, figures)

    def _leaves_out(self, name: str) -> bool:
        """Leave out a composition for which there is no time."""
        if name == REFERENCE or not self._is_over:
            return False
        timeout = f"--timeout={self.timeout_s:g}"
        self._fail(name, None, f"{timeout} was over; the same command goes on with it")
        return True

    def _enter(self, planned: ResolvedCell, trial: Any, found: Figures) -> None:
        name, policy = str(planned.cell.label), planned.config.policy.as_dict()
        figures, excess = dataclasses.asdict(found), self.floor - found.accuracy
        attributes = {"policy": policy, "figures": figures, "excess": excess}
        complete = import_optuna().trial.TrialState.COMPLETE
        self._close(name, trial, complete, attributes, [found.accuracy, found.speed])
        by = "replayed" if found.measured_by == BY_REPLAY else "run"
        told = f"{name}: accuracy {found.accuracy:.3f}, speed {found.speed:.1f} ({by})"
        self.say(told if trial is None else f"{told}: {composition_text(policy)}")

    def _fail(self, name: str, trial: Any, reason: str) -> None:
        """Enter that a candidate's run has failed, or why a composition cannot run here."""
        self._close(name, trial, import_optuna().trial.TrialState.FAIL, {"reason": reason})
        self.say(f"{name}: {'left out' if trial is None else 'failed'}: {reason}")

    def _close(
        self,
        name: str,
        trial: Any,
        state: Any,
        attributes: Mapping[str, Any],
        values: Sequence[float] | None = None,
    ) -> None:
        """End a trial; a composition's is made for it, without parameters."""
        if trial is None:
            shipped = {"kind": SHIPPED, "composition": name, **attributes}
            ended = import_optuna().trial.create_trial(
                values=values, state=state, user_attrs=shipped
            )
            self.study.add_trial(ended)
            return
        for key, value in {"kind": SEARCHED, **attributes}.items():
            trial.set_user_attr(key, value)
        self.study.tell(trial, values, state)


# --- its space: which algorithms, and which of their parameters in what range ---


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
                # The algorithm is part of the name: two may have a parameter of one name.
                drawn = _suggest(trial, f"{axis}.{name}.{parameter}", values)
                overrides[f"{axis}.{parameter}"] = drawn
        return overrides

    def fit(self, geometry: Geometry) -> Space:
        """Put a model's sizes in the place of their names."""
        sizes = {name: getattr(geometry, name) for name in SIZES}

        def fitted(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: fitted(inner) for key, inner in value.items()}
            return sizes.get(value, value) if isinstance(value, str) else value

        return Space(fitted(self.axes))

    @property
    def max_depth(self) -> int:
        """The furthest that a prefetcher of the space looks ahead, in layers."""
        reach = 1
        for parameters in self.axes["prefetch"].values():
            depth = parameters.get("depth", [1])
            reach = max(reach, *map(int, [depth["high"]] if isinstance(depth, dict) else depth))
        return reach


def read_space(path: Path) -> Space:
    """Read a space file. Raises ValueError naming what is unknown or malformed."""
    what = f"space={str(path)!r}"
    found = check(SpaceFile, read_yaml(path, what), what)
    axes: dict[str, dict[str, dict[str, Any]]] = {axis: dict(getattr(found, axis)) for axis in AXES}
    for axis in AXES:
        for name, parameters in axes[axis].items():
            known = [unmangle(n) for n in parameters_of(find_algorithm(axis, name))]
            for parameter in parameters:
                if parameter not in known:
                    raise unknown(f"space: {axis}.{name}: parameter", parameter, known)
    return Space(axes)


def _suggest(trial: Any, name: str, values: Any) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    low, high, log = values["low"], values["high"], bool(values.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, log=log)
    return trial.suggest_float(name, float(low), float(high), log=log)


# --- its Optuna study, in a journal file, so that an interrupted search goes on ---


def import_optuna() -> Any:
    """Import the optional search library, or say which extra brings it."""
    return import_extra("moecache tune", "optuna", "tune")


def open_study(folder: Path, objective: Objective, seed: int) -> Any:
    """Open or create the folder's study, which nobody else may be at work on.

    Raises ValueError where it is of another objective, or its journal is no longer readable.
    """
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    _mend(folder / JOURNAL)
    directions = ["maximize", "maximize" if sign_of(objective.metric) > 0 else "minimize"]
    journal = optuna.storages.journal
    try:
        storage = journal.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL)))
        study = optuna.create_study(
            study_name=_STUDY, storage=storage, directions=directions, load_if_exists=True
        )
    except OSError:
        raise
    except Exception as error:  # Optuna trusts its journal: any key that lacks, any assertion
        raise ValueError(
            f"out={str(folder)!r}: {JOURNAL} is no readable journal of a search "
            f"({type(error).__name__}: {error}). Give another folder, or remove it to begin anew."
        ) from error
    asked = {**dataclasses.asdict(objective), "tasks": list(objective.tasks)}
    before = {**asked, **study.user_attrs.get("question", {})}
    before["hardware"] = RENAMED.get(before["hardware"], before["hardware"])
    for key, value in asked.items():
        if before[key] != value:
            raise ValueError(
                f"out={str(folder)!r} holds a search with {key}={before[key]!r}, not {value!r}. "
                "Give another folder, or the same options to go on with it."
            )
    study.set_user_attr("question", asked)
    with warnings.catch_warnings():
        # `constraints_func` is deprecated in Optuna 5 for a method that Optuna 4 does not have.
        warnings.simplefilter("ignore", FutureWarning)
        study.sampler = optuna.samplers.TPESampler(
            # A resumed search draws anew instead of repeating its first trials.
            seed=seed + len(study.get_trials(deepcopy=False)),
            n_startup_trials=_STARTUP_TRIALS,
            constraints_func=lambda trial: (trial.user_attrs.get("excess", 1.0),),
        )
    return study


def _mend(journal: Path) -> None:
    """Take away what a kill or a full disk in the middle of a write has left.

    That is the lock, for which Optuna would wait half a minute, and a torn last line: the next
    one would be written behind it, and the journal would be lost.
    """
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.is_file():
        data = journal.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            logger.warning("%s: its last line was torn, and is left out.", journal)
            os.truncate(journal, whole)
