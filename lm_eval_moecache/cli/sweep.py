"""What `moecache sweep` runs and tells."""

from __future__ import annotations

from pathlib import Path

from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.numbers import counted
from lm_eval_moecache.sweep.pool import read_jobs
from lm_eval_moecache.sweep.spec import Executor, read_sweep


def sweep(
    sweep: str,
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    rerun: bool = False,
    live: bool = False,
    dry_run: bool = False,
) -> Report:
    """Run a grid or list of runs from a YAML file; finished runs are kept, and a rerun resumes.

    Args:
        sweep: results/<experiment>/sweep.yaml
        jobs: parallel processes; default: the file's
        executor: ray and submitit are extras; default: the file's
        rerun: also rerun finished cells
        live: run the model for every cell instead of once per group of cells with equal outputs
        dry_run: check, list and estimate only
    """
    path = Path(sweep)
    spec = read_sweep(path)
    if jobs is not None:
        spec = spec.model_copy(update={"jobs": read_jobs(jobs)})
    if executor is not None and executor != spec.executor:
        # The file's options are for the file's executor.
        changes: dict[str, object] = {"executor": executor, "executor_options": {}}
        spec = spec.model_copy(update=changes)
    folder = path.parent
    # Imported late: a wrong file should not wait for torch and lm-eval.
    from lm_eval_moecache.sweep.run import as_text, estimate, run_sweep

    if dry_run:
        estimated = estimate(spec, folder, rerun=rerun, live=live)
        lines = [f"{row['state']:9s} {row['run_id']}" for row in estimated["runs"]]
        found = {"experiment": spec.name, **estimated}
        return Report(found, "\n".join([*lines, as_text(estimated)]))
    report = run_sweep(spec, folder, rerun=rerun, live=live)
    failed, by_replay, saved_s = (report[k] for k in ("failed", "by_replay", "saved_seconds"))
    lines = [
        f"{spec.name}: {len(report['done'])} done, {len(report['skipped'])} finished before, "
        f"{len(failed)} failed, of {counted(report['runs'], 'run')} in {report['seconds']:.1f} s"
    ]
    if report["merged"]:
        lines.append(f"{report['merged']} cells equal another cell's configuration and ran once")
    if by_replay:
        saved = f"; saved about {saved_s:.0f} s" if saved_s > 0 else ""
        lines.append(f"{report['by_model']} ran the model, {by_replay} were replayed{saved}")
    lines += [f"  failed: {failure['run_id']}: {failure['error']}" for failure in failed]
    if failed:
        lines.append(f"tracebacks: {folder / 'failed'}; the same command retries failed runs")
    else:
        lines.append(f"next: moecache table {folder}")
    return Report(report, "\n".join(lines), code=1 if failed else 0)
