"""One sweep from file to results: checks all cells, skips finished ones, runs the others."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm_eval_moecache.records.files import read_json
from lm_eval_moecache.sweep.bounds import bound_cells
from lm_eval_moecache.sweep.executors import execute
from lm_eval_moecache.sweep.files import finished, only_sweep, unedited, write_record
from lm_eval_moecache.sweep.identity import Planned
from lm_eval_moecache.sweep.sharing import Division, divide, remove_leftovers
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
    cells = sweep.cells()
    check_report(sweep, cells)
    planned = check_cells(cells)
    bounds = () if live else bound_cells(planned, sweep.bounds)
    planned += bounds
    with only_sweep(folder):
        done_before = {} if rerun else unedited(finished(folder), planned)
        skipped = [p for p in planned if p.configuration_hash in done_before]
        waiting = [p for p in planned if p.configuration_hash not in done_before]
        for each in skipped:
            _relabel(folder, done_before[each.configuration_hash], each)
        remove_leftovers(folder)
        division = Division(tuple(waiting), ()) if live else divide(waiting, folder, skipped)
        outcomes = _with_progress(sweep, folder, division, len(skipped))
    runs = [o for o in outcomes if o.error is None and o.by == BY_MODEL]
    replays = [o for o in outcomes if o.error is None and o.by == BY_REPLAY]
    return Report(
        experiment=sweep.name,
        runs=len(planned),
        merged=len(cells) + len(bounds) - len(planned),
        skipped=tuple(each.run_id for each in skipped),
        done=tuple(o.run_id for o in outcomes if o.error is None),
        failed=tuple(o for o in outcomes if o.error is not None),
        seconds=time.monotonic() - started,
        by_model=len(runs),
        saved_seconds=_saved(runs, replays),
    )


def _saved(runs: Sequence[Outcome], replays: Sequence[Outcome]) -> float:
    if not runs:
        return 0.0
    run_s = sum(o.seconds for o in runs) / len(runs)
    return len(replays) * run_s - sum(o.seconds for o in replays)


def _with_progress(
    sweep: SweepFile, folder: Path, division: Division, num_skipped: int
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


def _relabel(folder: Path, path: Path, planned: Planned) -> None:
    """A label is not part of the configuration: a new one is written into the finished run."""
    record = read_json(path, str(path))
    if record["label"] != planned.cell.label:
        write_record(folder, {**record, "label": planned.cell.label})
