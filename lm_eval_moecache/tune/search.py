"""The search itself: shipped compositions first, then candidates of an Optuna study.

Every candidate's lossless part (its prefetch and eviction) is replayed first; a lossy candidate
whose lossless part is slow is pruned there, before the model runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lm_eval_moecache.algorithms.policy import policy_names
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.tune.measure import BY_REPLAY, Candidate, CandidateRunner, Figures
from lm_eval_moecache.tune.outcome import SEARCHED, SHIPPED, composition_text
from lm_eval_moecache.tune.space import Space
from lm_eval_moecache.tune.study import fail_unfinished, import_optuna

_POINT = 0.01
REFERENCE = "on_demand"
"""The composition that is measured whatever the time: what the others are compared with."""


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
        return self.runner.reference.accuracy - self.runner.objective.budget * _POINT - 1e-9

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._deadline_s

    @property
    def _too_late(self) -> str:
        return f"--timeout={self.effort.timeout_s:g} was over; the same command goes on with it"

    def run(self) -> None:
        """Measure the shipped compositions, then draw candidates until trials or time are up.

        What runs when the time is up is finished; nothing else begins.
        """
        self._deadline_s = time.monotonic() + self.effort.timeout_s
        fail_unfinished(self.study)
        self._shipped()
        left = self.effort.trials
        while left > 0 and not self._is_over:
            left -= self._batch(left)

    def _shipped(self) -> None:
        """Enter the compositions of `policies/` as trials without parameters, once each."""
        trials = self.study.get_trials(deepcopy=False)
        known = {t.user_attrs.get("composition") for t in trials if "figures" in t.user_attrs}
        waiting: list[Candidate] = []
        for name in policy_names():
            if name in known:
                continue
            if name != REFERENCE and self._is_over:
                self._leave_out(name, self._too_late)
                continue
            try:
                candidate = self.runner.candidate(name, {"policy": name})
            except ValueError as error:
                self._leave_out(name, str(error))
                continue
            replayed = self._replayed_if_possible(candidate)
            if replayed is None:
                waiting.append(candidate)
            else:
                self._enter(candidate, replayed)
        for start in range(0, len(waiting), self.effort.jobs):
            chunk = waiting[start : start + self.effort.jobs]
            if self._is_over:
                for candidate in chunk:
                    self._leave_out(candidate.name, self._too_late)
                continue
            for candidate, found in zip(chunk, self.runner.run(chunk), strict=True):
                self._enter(candidate, found)

    def _enter(self, candidate: Candidate, found: Figures | str) -> None:
        if isinstance(found, str):
            self._leave_out(candidate.name, found)
            return
        attributes = {"kind": SHIPPED, "composition": candidate.name}
        attributes |= self._attributes(candidate, found)
        self.study.add_trial(
            import_optuna().trial.create_trial(
                values=[found.accuracy, found.speed], user_attrs=attributes
            )
        )
        self.say(f"{candidate.name}: {_told(found)}")

    def _leave_out(self, name: str, reason: str) -> None:
        """A composition that cannot run here (an artifact it needs is not there) is listed so."""
        attributes = {"kind": SHIPPED, "composition": name, "reason": reason}
        optuna = import_optuna()
        state = optuna.trial.TrialState.FAIL
        self.study.add_trial(optuna.trial.create_trial(state=state, user_attrs=attributes))
        self.say(f"{name}: left out: {reason}")

    def _batch(self, left: int) -> int:
        """Draw candidates until as many as there are jobs need the model, and run those."""
        waiting: list[tuple[Any, Candidate]] = []
        drawn = 0
        while drawn < left and len(waiting) < self.effort.jobs:
            if self._is_over:
                break
            drawn += 1
            trial = self.study.ask()
            candidate = self._draw(trial)
            if candidate is not None:
                waiting.append((trial, candidate))
        found = self.runner.run([candidate for _, candidate in waiting])
        for (trial, candidate), figures in zip(waiting, found, strict=True):
            self._tell(trial, candidate, figures)
        return drawn

    def _draw(self, trial: Any) -> Candidate | None:
        """Return a candidate that the model has to run; settle all others by themselves."""
        name = f"trial {trial.number}"
        overrides = self.space.suggest(trial)
        try:
            candidate = self.runner.candidate(name, {"policy": "on_demand", **overrides})
        except ValueError as error:
            self._prune(trial, f"refused: {error}")
            return None
        figures = self._replayed(candidate)
        if candidate.policy.is_lossless:
            self._tell(trial, candidate, figures)
            return None
        assert self.best_lossless is not None, "a replay has just set it"
        ratio = figures.speed / self.best_lossless
        if (ratio if self.sign > 0 else 1 / ratio) < 1 - self.effort.slack:
            self._prune(trial, f"its lossless part: {figures.speed:.1f}")
            return None
        return candidate

    def _replayed_if_possible(self, candidate: Candidate) -> Figures | None:
        if not candidate.policy.is_lossless:
            return None
        try:
            return self._replayed(candidate)
        except ValueError:
            # The trace lacks what a prefetcher with a predictor of its own has to see.
            return None

    def _replayed(self, candidate: Candidate) -> Figures:
        figures = self.runner.lossless(candidate.policy)
        best = self.best_lossless
        if best is None or self.sign * figures.speed > self.sign * best:
            self.best_lossless = figures.speed
        return figures

    def _prune(self, trial: Any, reason: str) -> None:
        trial.set_user_attr("reason", reason)
        self.study.tell(trial, state=import_optuna().trial.TrialState.PRUNED)

    def _tell(self, trial: Any, candidate: Candidate, found: Figures | str) -> None:
        if isinstance(found, str):
            trial.set_user_attr("reason", found)
            self.study.tell(trial, state=import_optuna().trial.TrialState.FAIL)
            self.say(f"{candidate.name}: failed: {found}")
            return
        for key, value in ({"kind": SEARCHED} | self._attributes(candidate, found)).items():
            trial.set_user_attr(key, value)
        self.study.tell(trial, [found.accuracy, found.speed])
        self.say(
            f"{candidate.name}: {_told(found)}: {composition_text(candidate.policy.as_dict())}"
        )

    def _attributes(self, candidate: Candidate, found: Figures) -> dict[str, Any]:
        return {
            "policy": candidate.policy.as_dict(),
            "figures": dataclasses.asdict(found),
            "excess": self.floor - found.accuracy,
        }


def _told(found: Figures) -> str:
    by = "replayed" if found.measured_by == BY_REPLAY else "run"
    return f"accuracy {found.accuracy:.3f}, speed {found.speed:.1f} ({by})"
