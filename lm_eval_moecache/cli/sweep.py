"""Run a grid or list of runs from a YAML file; finished runs are kept, and a rerun resumes."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import print_result
from lm_eval_moecache.records.numbers import counted
from lm_eval_moecache.sweep.pool import read_jobs
from lm_eval_moecache.sweep.spec import EXECUTORS, read_sweep


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sweep", help="results/<experiment>/sweep.yaml")
    parser.add_argument("--jobs", type=int | None, help="parallel processes; default: the file's")
    text = "ray and submitit are extras; default: the file's"
    parser.add_argument("--executor", choices=EXECUTORS, help=text)
    parser.add_argument("--rerun", action="store_true", help="also rerun finished cells")
    text = "run the model for every cell instead of once per group of cells with equal outputs"
    parser.add_argument("--live", action="store_true", help=text)
    parser.add_argument("--dry-run", action="store_true", help="check, list and estimate only")


def run(arguments: Namespace) -> int:
    path = Path(arguments.sweep)
    sweep = read_sweep(path)
    if arguments.jobs is not None:
        sweep = sweep.model_copy(update={"jobs": read_jobs(arguments.jobs)})
    if arguments.executor is not None and arguments.executor != sweep.executor:
        # The file's options are for the file's executor.
        changes = {"executor": arguments.executor, "executor_options": {}}
        sweep = sweep.model_copy(update=changes)
    folder = path.parent
    # Imported late: a wrong file should not wait for torch and lm-eval.
    from lm_eval_moecache.sweep.run import as_text, estimate, run_sweep

    if arguments.dry_run:
        estimated = estimate(sweep, folder, rerun=arguments.rerun, live=arguments.live)
        lines = [f"{row['state']:9s} {row['run_id']}" for row in estimated["runs"]]
        dry_run = {"experiment": sweep.name, **estimated}
        return print_result(arguments.json, dry_run, "\n".join([*lines, as_text(estimated), ""]))
    report = run_sweep(sweep, folder, rerun=arguments.rerun, live=arguments.live)
    failed, by_replay, saved_s = (report[k] for k in ("failed", "by_replay", "saved_seconds"))
    lines = [
        f"{sweep.name}: {len(report['done'])} done, {len(report['skipped'])} finished before, "
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
    print_result(arguments.json, report, "\n".join([*lines, ""]))
    return 1 if failed else 0
