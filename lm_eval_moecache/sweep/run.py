"""One sweep from file to results: checks all cells, skips finished ones, runs the others.

Or estimates, for the same cells, what would run and how long it would take.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, as_completed
from pathlib import Path
from statistics import mean, median
from typing import Any

from tqdm import tqdm

from lm_eval_moecache.harness.arguments import as_arguments_error
from lm_eval_moecache.harness.generation import check_generation
from lm_eval_moecache.harness.plugin import SPECULATIVE
from lm_eval_moecache.harness.preflight import Bare, check_arguments
from lm_eval_moecache.model.checkpoint import skeleton
from lm_eval_moecache.records.numbers import counted
from lm_eval_moecache.report.metrics import METRICS, metric_column
from lm_eval_moecache.report.runs.columns import SETTINGS, is_setting, unknown_column_error
from lm_eval_moecache.report.runs.run import ACCURACY, KEYS, PARETO
from lm_eval_moecache.report.tables.leaderboard import expanded, split_order
from lm_eval_moecache.sweep.evaluation import check_data, check_task_names
from lm_eval_moecache.sweep.files import (
    TRACES,
    finished,
    only_sweep,
    relabel,
    replaced_ids,
    unedited,
)
from lm_eval_moecache.sweep.identity import ResolvedCell, plan
from lm_eval_moecache.sweep.pool import EXECUTORS
from lm_eval_moecache.sweep.sharing import (
    ExecutionPlan,
    bound_cells,
    divide,
)
from lm_eval_moecache.sweep.spec import REPLAY, Cell, SweepFile
from lm_eval_moecache.sweep.worker import (
    BY_MODEL,
    BY_REPLAY,
    Outcome,
    check_trace_cell,
    run_cell,
    run_cells,
)


def run_sweep(
    sweep: SweepFile, folder: Path, *, rerun: bool = False, live: bool = False
) -> dict[str, Any]:
    """Run the unfinished cells; return a report in the form that `--json` prints.

    Of cells with equal outputs one runs the model and the others are replayed, unless `live`; then
    there are no bounds either, which only replays can make. `merged` counts cells with the same
    configuration as another, which run only once. Raises ValueError before the first run if any
    cell cannot start.
    """
    started = time.monotonic()
    planned, merged = _plan(sweep, live)
    outcomes: list[Outcome] = []
    with only_sweep(folder) as without:
        finished_runs, skipped, division = _division(planned, folder, rerun, live)
        # Labels are not part of the configuration: write new ones into the finished runs.
        pairs = [(finished_runs[p.configuration_hash], p.cell.label) for p in skipped]
        relabel(folder, {run["run_id"]: label for run, label in pairs if run["label"] != label})
        if any(division):
            results = execute(division, folder, sweep)
            total, first = len(planned), len(skipped)
            with tqdm(results, sweep.name, total, initial=first, unit="run", smoothing=0) as bar:
                for outcome in bar:
                    outcomes.append(outcome)
                    if outcome.error is not None:
                        bar.write(f"failed: {outcome.run_id}: {outcome.error}", file=sys.stderr)
        without |= replaced_ids(folder, planned)
    done = [outcome for outcome in outcomes if outcome.error is None]
    runs, replays = ([o.seconds for o in done if o.by == by] for by in (BY_MODEL, BY_REPLAY))
    # The time replays would have taken as runs, at this sweep's mean run time, if it ran any.
    saved = len(replays) * mean(runs) - sum(replays) if runs else 0.0
    failed = [{"run_id": o.run_id, "error": o.error} for o in outcomes if o.error is not None]
    return {
        "experiment": sweep.name,
        "runs": len(planned),
        "merged": merged,
        "skipped": [resolved.run_id for resolved in skipped],
        "done": [outcome.run_id for outcome in done],
        "failed": failed,
        "seconds": round(time.monotonic() - started, 1),
        "by_model": len(runs),
        "by_replay": len(replays),
        "saved_seconds": round(saved, 1),
    }


def _plan(sweep: SweepFile, live: bool) -> tuple[list[ResolvedCell], int]:
    """Check a sweep's cells and bounds; return the distinct ones, and the number of duplicates."""
    cells = sweep.cells()
    check_report(sweep, cells)
    planned = check_cells(cells)
    merged = len(cells) - len(planned)
    return [*planned, *([] if live else bound_cells(planned, sweep.bounds))], merged


def _division(
    planned: Sequence[ResolvedCell], folder: Path, rerun: bool, live: bool
) -> tuple[dict[str, dict[str, Any]], list[ResolvedCell], ExecutionPlan]:
    """Return the finished runs, the cells they finish, and the execution plan of the others.

    With `rerun` no cell counts as finished. Raises ValueError where the data of a run's tasks
    cannot be fetched.
    """
    finished_runs = unedited(finished(folder), planned)
    skipped = [p for p in planned if not rerun and p.configuration_hash in finished_runs]
    waiting = [p for p in planned if rerun or p.configuration_hash not in finished_runs]
    division = ExecutionPlan(tuple(waiting), ()) if live else divide(waiting, folder, skipped)
    for run in division.runs:
        if run.cell.model != REPLAY:
            check_data(run.cell.tasks, run.cell.include_path)
    return finished_runs, skipped, division


# --- dry run ---


def estimate(
    sweep: SweepFile, folder: Path, *, rerun: bool = False, live: bool = False
) -> dict[str, Any]:
    """Check all cells and return what a sweep would do; nothing is run or written.

    Times (seconds) and trace sizes (bytes) follow from the medians of this folder's finished runs
    and traces; None where there are none.
    """
    planned, _ = _plan(sweep, live)
    finished_runs, skipped, division = _division(planned, folder, rerun, live)
    parts = {"to run": division.runs, "to replay": division.replays, "finished": skipped}
    states = {cell.run_id: state for state, cells in parts.items() for cell in cells}
    seconds_by: dict[str, list[float]] = {"evaluate": [], "replay": []}
    for record in finished_runs.values():
        for kind, value in (record["environment"] or {}).get("seconds", {}).items():
            seconds_by.setdefault(kind, []).append(float(value))
    num_runs, num_replays = len(division.runs), len(division.replays)
    run_s, replay_s = (median(seconds_by[kind] or [0.0]) for kind in ("evaluate", "replay"))
    is_known = (seconds_by["evaluate"] or not num_runs) and (
        seconds_by["replay"] or not num_replays
    )
    sizes = [path.stat().st_size for path in (folder / TRACES).glob("*.parquet")]
    traces = sum(p.shared is not None for p in division.runs)
    return {
        "model_runs": num_runs,
        "replays": num_replays,
        "estimated_seconds": num_runs * run_s + num_replays * replay_s if is_known else None,
        "estimated_trace_bytes": int(traces * median(sizes)) if sizes else None,
        "runs": [
            {
                "run_id": resolved.run_id,
                "state": states[resolved.run_id],
                "model_args": dict(resolved.cell.model_args),
                "tasks": list(resolved.cell.tasks),
            }
            for resolved in planned
        ],
    }


def as_text(estimated: Mapping[str, Any]) -> str:
    """Return an estimate in one sentence."""
    runs, replays = estimated["model_runs"], estimated["replays"]
    counts = f"{counted(runs, 'run')} of the model and {counted(replays, 'replay')}"
    seconds, nbytes = estimated["estimated_seconds"], estimated["estimated_trace_bytes"]
    if seconds is None:
        return f"{counts}; how long a run takes is known when the first has finished"
    disk = "" if nbytes is None else f", about {nbytes / 1e6:.1f} MB of traces"
    return f"{counts}; about {seconds:.0f} s in one process{disk}"


# --- checks before the first run: settings, capacities, tasks, columns ---


def check_cells(cells: Sequence[Cell]) -> list[ResolvedCell]:
    """Return the cells with their identities, one per configuration.

    Raises one ValueError that lists every cell that cannot run, with its reason.
    """
    planned: dict[str, ResolvedCell] = {}
    problems: dict[str, list[str]] = {}
    ids: dict[str, str] = {}
    bare = shared_skeletons()
    for cell in cells:
        try:
            resolved = check_cell(cell, bare)
        except (ValueError, OSError) as error:
            arguments = ",".join(f"{key}={value}" for key, value in cell.model_args.items())
            problems.setdefault(str(error), []).append(arguments or "(defaults)")
            continue
        same_id = ids.setdefault(resolved.run_id, resolved.configuration_hash)
        if same_id != resolved.configuration_hash:
            raise ValueError(
                f"two configurations have the run id {resolved.run_id}, and one record would "
                "replace the other. Allowed: another `seed` for one of them, which changes no "
                "figure of a rule without chance."
            )
        planned.setdefault(resolved.configuration_hash, resolved)
    if problems:
        lines = [f"{error}\n    in: {'; '.join(where)}" for error, where in problems.items()]
        raise ValueError(
            f"{sum(map(len, problems.values()))} of {len(cells)} runs cannot start.\n  "
            + "\n  ".join(lines)
        )
    return list(planned.values())


def shared_skeletons() -> Bare:
    """Return a builder of models without weights that builds each model once.

    It takes longer than all other checks of a cell.
    """
    skeletons: dict[str, Any] = {}

    def bare(pretrained: Any, hflm_args: Mapping[str, Any]) -> Any:
        key = json.dumps([pretrained, hflm_args], sort_keys=True, default=repr)
        if key not in skeletons:
            skeletons[key] = skeleton(pretrained, hflm_args)
        return skeletons[key]

    return bare


def check_report(sweep: SweepFile, cells: Sequence[Cell]) -> None:
    """Check the names in the sweep's tables and figures before any run is spent on a misspelt one.

    Raises ValueError naming view or figure and the column or setting.
    """
    arguments = {key for cell in cells for key in (*cell.model_args, *cell.options)}
    tasks = tuple(dict.fromkeys(task for cell in cells for task in cell.tasks))

    def check(place: str, names: Sequence[str], *, setting: bool) -> None:
        for name in names:
            if is_setting(name, arguments) or (not setting and _is_metric(name, tasks, sweep)):
                continue
            figures = () if setting else (ACCURACY, PARETO, *METRICS, *tasks)
            allowed = [*SETTINGS, *sorted(arguments), *KEYS, *figures]
            raise ValueError(f"{place}: {unknown_column_error(name, list(dict.fromkeys(allowed)))}")

    for view in sweep.views:
        place = f"views: {view.title!r}"
        across = [] if view.columns is None else [view.columns]
        check(f"{place}: rows or columns", [*(view.rows or ()), *across], setting=True)
        check(f"{place}: where", [*view.where, *(view.relative_to or ())], setting=True)
        sort = [split_order(name)[0] for name in view.sort or ()]
        check(f"{place}: values or sort", [*expanded(view.values or ()), *sort], setting=False)
    for figure in sweep.figures:
        place = f"figures: {figure.name!r}"
        check(f"{place}: group or where", [*(figure.group or ()), *figure.where], setting=True)
        for panel in figure.panels:
            check(f"{place}: x or y", [panel.x, panel.y], setting=False)
            check(f"{place}: where", list(panel.where), setting=True)


def _is_metric(name: str, tasks: Sequence[str], sweep: SweepFile) -> bool:
    """Whether a column is a metric, or the score of a task (a group's tasks are lm-eval's)."""
    if name in (ACCURACY, PARETO) or metric_column(name) is not None:
        return True
    task = name.partition(":")[0]
    if task in tasks or sweep.traces:
        return task in tasks
    try:
        check_task_names([task], tuple(sweep.include_path))
    except ValueError:
        return False
    return True


def check_cell(cell: Cell, bare: Bare = skeleton) -> ResolvedCell:
    """Return the cell with its identity. Raises ValueError or OSError where it cannot run."""
    if cell.model == REPLAY:
        return check_trace_cell(cell)
    check_task_names(cell.tasks, cell.include_path)
    speculative = cell.model == SPECULATIVE
    generation = cell.options.get("gen_kwargs")
    if generation:
        check_generation(generation, speculative)
    with as_arguments_error(cell.pretrained):
        configuration = check_arguments(
            cell.pretrained, cell.arguments, bare, speculative=speculative
        )
    return plan(cell, *configuration)


# --- the runs: in this process, or by an executor ---


def execute(
    stages: Iterable[Sequence[ResolvedCell]], folder: Path, sweep: SweepFile
) -> Iterator[Outcome]:
    """Run the cells, stage after stage, as a replay needs the trace of an earlier run.

    Yields outcomes as they arrive; the worker writes the results itself. Within a stage, cells that
    share a loaded model or a trace run consecutively.
    """
    ordered = [sorted(stage, key=_neighbours) for stage in stages if stage]
    where = str(folder.resolve()), sweep.name
    if (sweep.executor, sweep.jobs) == ("local", 1):
        yield from (run_cell(cell, *where) for stage in ordered for cell in stage)
        return
    with EXECUTORS[sweep.executor](sweep.jobs, where[0], sweep.executor_options) as submit:
        for stage in ordered:
            # A Slurm job takes long to start: one takes an equal share of the stage.
            size = -(-len(stage) // sweep.jobs) if sweep.executor == "submitit" else 1
            chunks = [stage[start : start + size] for start in range(0, len(stage), size)]
            try:
                futures = submit(run_cells, chunks, *where)
            except BrokenExecutor as dead:  # a process died in an earlier stage
                yield from failed(stage, dead)
                continue
            for future in as_completed(futures):
                error = future.exception()
                yield from future.result() if error is None else failed(futures[future], error)


def _neighbours(planned: ResolvedCell) -> tuple[str, ...]:
    return (*planned.load_key, planned.shared or "")


def failed(cells: Iterable[ResolvedCell], error: BaseException) -> Iterator[Outcome]:
    """Yield the outcomes of cells whose process or job died (memory, a kill)."""
    return (Outcome(cell.run_id, f"{type(error).__name__}: {error}") for cell in cells)
