"""What a sweep would do: its runs of the model and its replays, and about how long they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lm_eval_moecache.sweep.bounds import bound_cells
from lm_eval_moecache.sweep.files import finished, read_run, unedited
from lm_eval_moecache.sweep.sharing import TRACES, Division, divide
from lm_eval_moecache.sweep.spec import SweepFile
from lm_eval_moecache.sweep.validation import check_cells, check_report


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
    cells = sweep.cells()
    check_report(sweep, cells)
    planned = check_cells(cells)
    planned += () if live else bound_cells(planned, sweep.bounds)
    done = unedited(finished(folder), planned)
    waiting = [p for p in planned if rerun or p.configuration_hash not in done]
    skipped = [p for p in planned if p not in waiting]
    division = Division(tuple(waiting), ()) if live else divide(waiting, folder, skipped)
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
