"""One sweep from file to results: checks all cells, skips finished ones, runs the others.

Or says, of the same cells, what it would do and about how long that takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from lm_eval_moecache.records.files import read_json
from lm_eval_moecache.sweep.executors import execute
from lm_eval_moecache.sweep.files import finished, only_sweep, read_run, unedited, write_record
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
    done: tuple[str, ...]
    failed: tuple[Outcome, ...]
    seconds: float
    by_model: int = 0
    """Cells that ran the model; the other ones done were replayed from the traces of those."""
    saved_seconds: float = 0.0
    """What the replays would have taken as runs, by the mean of this sweep's runs, less what they
    took; 0 where no run of this sweep says how long one takes."""

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
    with only_sweep(folder):
        done_before = {} if rerun else unedited(finished(folder), planned)
        skipped = [p for p in planned if p.configuration_hash in done_before]
        waiting = [p for p in planned if p.configuration_hash not in done_before]
        for each in skipped:
            _relabel(folder, done_before[each.configuration_hash], each)
        remove_leftovers(folder)
        division = ExecutionPlan(tuple(waiting), ()) if live else divide(waiting, folder, skipped)
        outcomes = _with_progress(sweep, folder, division, len(skipped))
    runs = [o for o in outcomes if o.error is None and o.by == BY_MODEL]
    replays = [o for o in outcomes if o.error is None and o.by == BY_REPLAY]
    return Report(
        experiment=sweep.name,
        runs=len(planned),
        merged=merged,
        skipped=tuple(each.run_id for each in skipped),
        done=tuple(o.run_id for o in outcomes if o.error is None),
        failed=tuple(o for o in outcomes if o.error is not None),
        seconds=time.monotonic() - started,
        by_model=len(runs),
        saved_seconds=_saved(runs, replays),
    )


def _plan(sweep: SweepFile, live: bool) -> tuple[list[ResolvedCell], int]:
    """Check a sweep's cells and bounds; return those that differ, and how many others there are."""
    cells = sweep.cells()
    check_report(sweep, cells)
    planned = check_cells(cells)
    merged = len(cells) - len(planned)
    return [*planned, *([] if live else bound_cells(planned, sweep.bounds))], merged


def _saved(runs: Sequence[Outcome], replays: Sequence[Outcome]) -> float:
    if not runs:
        return 0.0
    run_s = sum(o.seconds for o in runs) / len(runs)
    return len(replays) * run_s - sum(o.seconds for o in replays)


def _with_progress(
    sweep: SweepFile, folder: Path, division: ExecutionPlan, num_skipped: int
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    num_waiting = len(division.runs) + len(division.replays)
    if not num_waiting:
        return outcomes
    results = execute(
        (division.runs, division.replays),
        folder,
        sweep.name,
        executor=sweep.executor,
        jobs=sweep.jobs,
        options=sweep.executor_options,
    )
    total = num_skipped + num_waiting
    with tqdm(total=total, initial=num_skipped, unit="run", desc=sweep.name, smoothing=0) as bar:
        for outcome in results:
            outcomes.append(outcome)
            bar.update()
            if outcome.error is not None:
                bar.write(f"failed: {outcome.run_id}: {outcome.error}", file=sys.stderr)
    return outcomes


def _relabel(folder: Path, path: Path, planned: ResolvedCell) -> None:
    """A label is not part of the configuration: a new one is written into the finished run."""
    record = read_json(path, str(path))
    if record["label"] != planned.cell.label:
        write_record(folder, {**record, "label": planned.cell.label})


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
    done = unedited(finished(folder), planned)
    waiting = [p for p in planned if rerun or p.configuration_hash not in done]
    skipped = [p for p in planned if p not in waiting]
    division = ExecutionPlan(tuple(waiting), ()) if live else divide(waiting, folder, skipped)
    replays = {p.run_id for p in division.replays}
    states = {p.run_id: "to replay" if p.run_id in replays else "to run" for p in waiting}
    rows = tuple(
        {
            "run_id": each.run_id,
            "state": states.get(each.run_id, "finished"),
            "model_args": dict(each.cell.model_args),
            "tasks": list(each.cell.tasks),
        }
        for each in planned
    )
    run_s, replay_s = _seconds(done)
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


def _seconds(done: Mapping[str, Path]) -> tuple[float | None, float | None]:
    """Return how long a run of the model and a replay took, by the median."""
    found: dict[str, list[float]] = {"evaluate": [], "replay": []}
    for configuration_hash, path in done.items():
        seconds = read_run(path, configuration_hash).get("environment", {}).get("seconds", {})
        for kind, values in found.items():
            if kind in seconds:
                values.append(float(seconds[kind]))
    run_s, replay_s = (median(values) if values else None for values in found.values())
    return run_s, replay_s
