"""Measures policies for the tuner: lossless ones by replaying one trace, lossy ones by the model.

A replay reproduces a live run's speed exactly, and all lossless policies have the same accuracy, so
a lossless candidate never costs a run of the model.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import Policy, load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.runs.run import ACCURACY
from lm_eval_moecache.sweep.files import FAILED, finished, unedited
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.run import check_cell, shared_skeletons
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.sweep.worker import BY_MODEL, BY_REPLAY, run_cell
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.recorder import FULL
from lm_eval_moecache.trace.trace import Trace

EXPERIMENT = "tune"
POINT = 0.01
"""One point of accuracy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The tuner's question: which metric, on which tasks, in which cache, on which device."""

    pretrained: str
    tasks: tuple[str, ...]
    limit: int | float | None
    capacity: str
    hardware: str
    bandwidth: str | None
    metric: str
    budget: float
    """The accuracy that may be lost, in points (1 is 0.01)."""
    model_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of every run: `precision`, `dtype`, `device` ..."""

    def cell(
        self,
        policy: Mapping[str, Any],
        label: str | None = None,
        samples: Mapping[str, Sequence[int]] | None = None,
    ) -> Cell:
        """Return the cell of a policy; `samples` (task -> documents) replace the first `limit`."""
        args = {"pretrained": self.pretrained, "capacity": self.capacity, "hardware": self.hardware}
        args |= {} if self.bandwidth is None else {"bandwidth": self.bandwidth}
        options: dict[str, Any] = {} if self.limit is None else {"limit": self.limit}
        if samples is not None:
            options = {"samples": {task: list(numbers) for task, numbers in samples.items()}}
        return Cell(
            model="moecache",
            model_args={**args, **self.model_args, **policy},
            tasks=self.tasks,
            options=options,
            label=label,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Accuracy with its standard error, speed in the objective's metric, and their source."""

    accuracy: float
    stderr: float | None
    speed: float
    measured_by: str


class CandidateRunner:
    """Measures policies for one objective; keeps the model's runs as a sweep's records."""

    reference: Measured
    trace: Trace

    def __init__(self, objective: Objective, folder: Path) -> None:
        self.objective = objective
        self.folder = folder
        self._speeds: dict[str, float] = {}
        self._skeleton = shared_skeletons()

    @property
    def floor(self) -> float:
        """The lowest accuracy that meets the budget."""
        # A loss of exactly the budget meets it, rounding errors aside.
        return self.reference.accuracy - self.objective.budget * POINT - 1e-9

    def prepare(self, depth: int) -> None:
        """Run the model once, losslessly; record its routing, with predictions `depth` ahead."""
        args = {"policy": "on_demand", "prefetch": "next_gate", "prefetch.depth": depth}
        planned = self.candidate("reference", args)
        self._config = planned.config
        traces = self.folder / "trace"
        if is_missing := not list(traces.glob("*.parquet")) or self._record(planned) is None:
            shutil.rmtree(traces, ignore_errors=True)
            # Recording a trace changes nothing in the record, so `planned` keeps its hash.
            config = planned.config.with_changes(trace=str(traces), detail=FULL)
            planned = dataclasses.replace(planned, config=config)
        self.reference = self.run(planned, again=is_missing)
        [*_, file] = sorted(traces.glob("*.parquet"))
        self.trace = load_trace(str(file), logits=True, predicted=True)

    def candidate(
        self,
        name: str,
        args: Mapping[str, Any],
        samples: Mapping[str, Sequence[int]] | None = None,
    ) -> ResolvedCell:
        """Check a policy. Raises ValueError, with the reason, where it cannot run here."""
        return check_cell(self.objective.cell(args, label=name, samples=samples), self._skeleton)

    def replay(self, policy: Policy) -> Measured | None:
        """Return the reference's accuracy with the speed of the policy's lossless part.

        A lossy policy's is its prefetch and eviction. None where the trace lacks the inputs of a
        prefetcher that has its own predictor.
        """
        lossless = policy
        if not policy.is_lossless:
            overrides = overrides_of(policy.as_dict(), ("prefetch", "eviction"))
            lossless = load_policy("on_demand", overrides)
        key = str(lossless.as_dict())
        if key not in self._speeds:
            config = self._config.with_changes(policy=lossless)
            setting = config.setting(self.trace.geometry)
            try:
                engine = replay(self.trace, setting, cache_reset=config.cache_reset)
            except ValueError:
                return None
            metrics = task_metrics(engine.ledger.requests, engine.peak_cache_bytes)
            speed = metrics[self.objective.metric]
            self._speeds[key] = float(speed["mean"] if isinstance(speed, Mapping) else speed)
        return dataclasses.replace(self.reference, speed=self._speeds[key], measured_by=BY_REPLAY)

    def run(self, planned: ResolvedCell, *, again: bool = False) -> Measured:
        """Return a candidate's metrics, from a run of the model or an earlier record of one.

        Raises ValueError, with the run's error, where it fails.
        """
        if again or self._record(planned) is None:
            outcome = run_cell(planned, str(self.folder.resolve()), EXPERIMENT)
            if outcome.error is not None:
                reason = self.folder / FAILED / f"{planned.run_id}.txt"
                raise ValueError(f"{planned.cell.label}: {outcome.error}; its traceback: {reason}")
        record = self._record(planned)
        assert record is not None, "it was run"
        [run] = [run for run in load_runs(self.folder) if run.run_id == record["run_id"]]
        score, speed = run[ACCURACY], run[self.objective.metric].number
        if score.number is None or speed is None:
            what = "accuracy" if score.number is None else self.objective.metric
            raise ValueError(f"tasks={','.join(self.objective.tasks)} give no {what}.")
        return Measured(score.number, score.stderr, speed, BY_MODEL)

    def _record(self, planned: ResolvedCell) -> Mapping[str, Any] | None:
        done = unedited(finished(self.folder), [planned])
        return done.get(planned.configuration_hash)


def overrides_of(policy: Mapping[str, Any], axes: Sequence[str] = AXES) -> dict[str, Any]:
    """Return the overrides that turn `on_demand` into this policy (`as_dict`) on these axes."""
    overrides: dict[str, Any] = {}
    for axis in axes:
        choice = dict(policy[axis])
        overrides[axis] = choice.pop("name")
        # None stands for a default that depends on the model; it cannot be given as a value.
        overrides |= {f"{axis}.{key}": value for key, value in choice.items() if value is not None}
    return overrides
