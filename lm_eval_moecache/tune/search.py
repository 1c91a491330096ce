"""The search itself: shipped compositions first, then candidates of an Optuna study.

Every candidate's lossless part (its prefetch and eviction) is replayed first; a lossy candidate
whose lossless part is slow is pruned there, before the model runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval_moecache.algorithms.policy import policy_names
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.worker import BY_REPLAY
from lm_eval_moecache.tune.measure import POINT, CandidateRunner, Figures
from lm_eval_moecache.tune.outcome import SEARCHED, SHIPPED, composition_text
from lm_eval_moecache.tune.space import Space
from lm_eval_moecache.tune.study import import_optuna

REFERENCE = "on_demand"
"""The composition that is measured whatever the time: what the others are compared with."""
Candidate = tuple[ResolvedCell, Any]
"""What would run, and its trial; a shipped composition has none before it is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long to search. A lossless part may be `slack` slower than the best one replayed."""

    trials: int
    timeout_s: float
    slack: float
    seed: int
    jobs: int


@dataclass(slots=True)
class Search:
    """One search over a runner; `say` is told what happens."""

    runner: CandidateRunner
    space: Space
    effort: Effort
    study: Any
    say: Callable[[str], object]
    best_lossless: float | None = field(default=None)
    _deadline_s: float = field(default=0.0)

    @property
    def sign(self) -> int:
        return 1 if METRICS[self.runner.objective.metric][2] else -1

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
        self._deadline_s = time.monotonic() + self.effort.timeout_s
        states, jobs = import_optuna().trial.TrialState, self.effort.jobs
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
        left = self.effort.trials
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
        pruned = import_optuna().trial.TrialState.PRUNED
        if trial is None and self._leaves_out(name):
            return []
        try:
            planned = self.runner.candidate(name, args)
        except ValueError as error:
            if trial is None:
                self._fail(name, trial, str(error))
            else:
                self._close(trial, {"reason": f"refused: {error}"}, state=pruned)
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
        if (ratio if self.sign > 0 else 1 / ratio) < 1 - self.effort.slack:
            reason = f"its lossless part: {figures.speed:.1f}"
            self._close(trial, {"reason": reason}, state=pruned)
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
        timeout = f"--timeout={self.effort.timeout_s:g}"
        self._fail(name, None, f"{timeout} was over; the same command goes on with it")
        return True

    def _enter(self, planned: ResolvedCell, trial: Any, found: Figures) -> None:
        name, policy = str(planned.cell.label), planned.config.policy.as_dict()
        attributes = {
            **({"composition": name} if trial is None else {}),
            "kind": SHIPPED if trial is None else SEARCHED,
            "policy": policy,
            "figures": dataclasses.asdict(found),
            "excess": self.floor - found.accuracy,
        }
        self._close(trial, attributes, [found.accuracy, found.speed])
        by = "replayed" if found.measured_by == BY_REPLAY else "run"
        told = f"{name}: accuracy {found.accuracy:.3f}, speed {found.speed:.1f} ({by})"
        self.say(told if trial is None else f"{told}: {composition_text(policy)}")

    def _fail(self, name: str, trial: Any, reason: str) -> None:
        """Enter that a candidate's run has failed, or why a composition cannot run here."""
        shipped = {"kind": SHIPPED, "composition": name} if trial is None else {}
        state = import_optuna().trial.TrialState.FAIL
        self._close(trial, {**shipped, "reason": reason}, state=state)
        self.say(f"{name}: {'left out' if trial is None else 'failed'}: {reason}")

    def _close(
        self,
        trial: Any,
        attributes: Mapping[str, Any],
        values: Sequence[float] | None = None,
        state: Any = None,
    ) -> None:
        """End a trial; a composition's is made for it, without parameters."""
        optuna = import_optuna()
        state = state or optuna.trial.TrialState.COMPLETE
        if trial is None:
            ended = optuna.trial.create_trial(values=values, state=state, user_attrs=attributes)
            self.study.add_trial(ended)
            return
        for key, value in attributes.items():
            trial.set_user_attr(key, value)
        self.study.tell(trial, values, state)
