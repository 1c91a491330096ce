"""One sweep from file to results: checks all cells, skips finished ones, runs the others.

Or says, of the same cells, what it would do and about how long that takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from tqdm import tqdm

from lm_eval_moecache.records.files import read_json
from lm_eval_moecache.report.results import RUNS
from lm_eval_moecache.sweep.executors import execute
from lm_eval_moecache.sweep.files import finished, only_sweep, unedited, write_record
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.sharing import (
    TRACES,
    ExecutionPlan,
    bound_cells,
    divide,
    remove_leftovers,
)
from lm_eval_moecache.sweep.spec import SweepFile
from lm_eval_moecache.sweep.validation import check_cells, check_report
from lm_eval_moecache.sweep.worker import BY_MODEL, BY_REPLAY, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a sweep did, in the form that `--json` prints."""

    experiment: str
    runs: int
    merged: int
    """Cells that equal another cell's configuration, and so did not run a second time."""
    skipped: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def done(self) -> tuple[str, ...]:
        return tuple(o.run_id for o in self.outcomes if o.error is None)

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.error is not None)

    @property
    def by_model(self) -> int:
        """Cells that ran the model; the other ones done were replayed from the traces of those."""
        return len(self._seconds(BY_MODEL))

    @property
    def saved_seconds(self) -> float:
        """What the replays would have taken as runs, by this sweep's mean run, less what they took.

        0 where no run of this sweep says how long one takes.
        """
        runs, replays = self._seconds(BY_MODEL), self._seconds(BY_REPLAY)
        return len(replays) * mean(runs) - sum(replays) if runs else 0.0

    def _seconds(self, by: str) -> list[float]:
        return [o.seconds for o in self.outcomes if o.error is None and o.by == by]

    def as_dict(self) -> dict[str, Any]:
        return {
            "experiment": self.experiment,
            "runs": self.runs,
            "merged": self.merged,
            "skipped": list(self.skipped),
            "done": list(self.done),
            "failed": [{"run_id": o.run_id, "error": o.error} for o in self.failed],
            "seconds": round(self.seconds, 1),
            "by_model": self.by_model,
            "by_replay": len(self.done) - self.by_model,
            "saved_seconds": round(self.saved_seconds, 1),
        }


def run_sweep(sweep: SweepFile, folder: Path, *, rerun: bool = False, live: bool = False) -> Report:
    """Run what is not finished. Raises ValueError before the first run if any cell cannot start.

    Cells with equal outputs run the model once and are replayed, unless they are to be run `live`;
    then there are no bounds, which only replays can make.
    """
    started = time.monotonic()
    planned, merged = _plan(sweep, live)
    outcomes: list[Outcome] = []
    with only_sweep(folder):
        done, skipped, division = _division(planned, folder, rerun, live)
        for each in skipped:
            # Not part of the configuration: a new label is written into the finished run.
            before, label = done[each.configuration_hash], each.cell.label
            if before["label"] != label:
                path = folder / RUNS / f"{before['run_id']}.json"
                write_record(folder, {**read_json(path, str(path)), "label": label})
        remove_leftovers(folder)
        stages = (division.runs, division.replays)
        if any(stages):
            results = execute(stages, folder, sweep)
            total, first = len(planned), len(skipped)
            with tqdm(results, sweep.name, total, initial=first, unit="run", smoothing=0) as bar:
                for outcome in bar:
                    outcomes.append(outcome)
                    if outcome.error is not None:
                        bar.write(f"failed: {outcome.run_id}: {outcome.error}", file=sys.stderr)
    return Report(
        experiment=sweep.name,
        runs=len(planned),
        merged=merged,
        skipped=tuple(each.run_id for each in skipped),
        outcomes=tuple(outcomes),
        seconds=time.monotonic() - started,
    )


def _plan(sweep: SweepFile, live: bool) -> tuple[list[ResolvedCell], int]:
    """Check a sweep's cells and bounds; return those that differ, and how many others there are."""
    cells = sweep.cells()
    check_report(sweep, cells)
    planned = check_cells(cells)
    merged = len(cells) - len(planned)
    return [*planned, *([] if live else bound_cells(planned, sweep.bounds))], merged


def _division(
    planned: Sequence[ResolvedCell], folder: Path, rerun: bool, live: bool
) -> tuple[dict[str, dict[str, Any]], list[ResolvedCell], ExecutionPlan]:
    """Return the finished runs, the cells that are theirs, and what is to be done for the others.

    With `rerun` no cell counts as finished.
    """
    done = unedited(finished(folder), planned)
    skipped = [p for p in planned if not rerun and p.configuration_hash in done]
    waiting = [p for p in planned if rerun or p.configuration_hash not in done]
    division = ExecutionPlan(tuple(waiting), ()) if live else divide(waiting, folder, skipped)
    return done, skipped, division


# --- what it would do ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Cells and their states; seconds and bytes are None where no finished cell tells."""

    rows: tuple[dict[str, Any], ...]
    model_runs: int
    replays: int
    seconds: float | None
    trace_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "model_runs": self.model_runs,
            "replays": self.replays,
            "estimated_seconds": self.seconds,
            "estimated_trace_bytes": self.trace_bytes,
            "runs": list(self.rows),
        }

    def as_text(self) -> str:
        counts = f"{self.model_runs} runs of the model and {self.replays} replays"
        if self.seconds is None:
            return f"{counts}; how long a run takes is known when the first has finished"
        disk = ""
        if self.trace_bytes is not None:
            disk = f", about {self.trace_bytes / 1e6:.1f} MB of traces"
        return f"{counts}; about {self.seconds:.0f} s in one process{disk}"


def estimate(
    sweep: SweepFile, folder: Path, *, rerun: bool = False, live: bool = False
) -> Estimate:
    """Check all cells and say what a sweep would do; nothing is run or written.

    Times and sizes are the medians of what this folder has finished.
    """
    planned, _ = _plan(sweep, live)
    done, skipped, division = _division(planned, folder, rerun, live)
    states = dict.fromkeys((p.run_id for p in division.runs), "to run")
    states |= dict.fromkeys((p.run_id for p in division.replays), "to replay")
    states |= dict.fromkeys((p.run_id for p in skipped), "finished")
    rows = tuple(
        {
            "run_id": each.run_id,
            "state": states[each.run_id],
            "model_args": dict(each.cell.model_args),
            "tasks": list(each.cell.tasks),
        }
        for each in planned
    )
    took: dict[str, list[float]] = {"evaluate": [], "replay": []}
    for record in done.values():
        for kind, value in (record["environment"] or {}).get("seconds", {}).items():
            took.setdefault(kind, []).append(float(value))
    run_s, replay_s = (
        median(took[kind]) if took[kind] else None for kind in ("evaluate", "replay")
    )
    seconds = None
    if run_s is not None or not division.runs:
        seconds = len(division.runs) * (run_s or 0.0) + len(division.replays) * (replay_s or 0.0)
    sizes = [path.stat().st_size for path in (folder / TRACES).glob("*.parquet")]
    traces = sum(p.share is not None for p in division.runs)
    return Estimate(
        rows=rows,
        model_runs=len(division.runs),
        replays=len(division.replays),
        seconds=seconds,
        trace_bytes=int(traces * median(sizes)) if sizes else None,
    )
