"""Where runs are made: here, in local processes, on a Ray cluster, or as Slurm jobs.

Each executor yields the outcomes as they come. All call the same worker, which writes the results
itself: Ray and Slurm need the experiment's folder on a file system that their machines share.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, as_completed
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.pool import local_pool, submit
from lm_eval_moecache.sweep.spec import SweepFile
from lm_eval_moecache.sweep.worker import Outcome, run_cell, run_cells

Stages = Sequence[Sequence[ResolvedCell]]
Place = tuple[str, str]
"""Folder and name of the experiment."""


def execute(
    stages: Iterable[Sequence[ResolvedCell]], folder: Path, sweep: SweepFile
) -> Iterator[Outcome]:
    """Run the cells, stage after stage: a replay needs the trace of a run before it.

    In a stage, cells that share a loaded model or a trace follow each other.
    """
    ordered = [sorted(stage, key=_neighbours) for stage in stages if stage]
    where, options = (str(folder.resolve()), sweep.name), sweep.executor_options
    if sweep.executor == "ray":
        return _ray(ordered, where, sweep.jobs, options)
    if sweep.executor == "submitit":
        return _submitit(ordered, where, sweep.jobs, options)
    if options:
        raise unknown("executor_options", next(iter(options)), ("none with executor=local",))
    if sweep.jobs == 1:
        return (run_cell(each, *where) for stage in ordered for each in stage)
    return _processes(ordered, where, sweep.jobs)


def _neighbours(planned: ResolvedCell) -> tuple[str, ...]:
    return (*planned.load_key, "" if planned.share is None else planned.share.name)


def failed(planned: ResolvedCell, error: BaseException) -> Outcome:
    """Return the outcome of a cell whose process or job has ended in this."""
    return Outcome(planned.run_id, f"{type(error).__name__}: {error}")


def _processes(stages: Stages, where: Place, jobs: int) -> Iterator[Outcome]:
    with local_pool(jobs) as pool:
        for stage in stages:
            try:
                futures = submit(pool, run_cell, stage, *where)
            except BrokenExecutor as dead:  # a process died in the stage before
                yield from (failed(each, dead) for each in stage)
                continue
            for future in as_completed(futures):
                yield outcome_of(future, futures[future])


def outcome_of(future: Future[Outcome], planned: ResolvedCell) -> Outcome:
    """Return a cell's outcome; of a process that died (memory, a kill) that, to be tried again."""
    error = future.exception()
    return future.result() if error is None else failed(planned, error)


def _ray(stages: Stages, where: Place, jobs: int, options: Mapping[str, Any]) -> Iterator[Outcome]:
    ray = _extra("ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(**{"log_to_driver": False, **options})
    cores = max(1, int(ray.cluster_resources().get("CPU", 1)) // jobs)
    # A worker process serves many tasks of one function, so a loaded model is shared there too.
    task = ray.remote(num_cpus=cores, max_retries=0)(run_cell)
    waiting: dict[Any, ResolvedCell] = {}
    try:
        for stage in stages:
            waiting = {task.remote(each, *where): each for each in stage}
            while waiting:
                [done], _ = ray.wait(list(waiting), num_returns=1)
                each = waiting.pop(done)
                try:
                    yield ray.get(done)
                except ray.exceptions.RayError as error:
                    yield failed(each, error)
    except BaseException:
        # On a cluster that is not ours, what waits would still run.
        for reference in waiting:
            ray.cancel(reference, force=True)
        raise
    finally:
        if ours:
            ray.shutdown()


def _submitit(
    stages: Stages, where: Place, jobs: int, options: Mapping[str, Any]
) -> Iterator[Outcome]:
    submitit = _extra("submitit")
    parameters = {"timeout_min": 24 * 60, **options}
    cluster = parameters.pop("cluster", None)
    executor = submitit.AutoExecutor(folder=f"{where[0]}/submitit", cluster=cluster)
    executor.update_parameters(**parameters)
    for stage in stages:
        # Neighbours share a loaded model: consecutive runs go into one job.
        size = -(-len(stage) // jobs)
        chunks = [stage[start : start + size] for start in range(0, len(stage), size)]
        submitted = executor.map_array(run_cells, chunks, *([word] * len(chunks) for word in where))
        try:
            for job, chunk in zip(submitted, chunks, strict=True):
                try:
                    yield from job.result()
                except Exception as error:  # submitit raises several kinds, the job's own included
                    yield from (failed(each, error) for each in chunk)
        except BaseException:
            for job in submitted:
                job.cancel()
            raise


def _extra(name: str) -> Any:
    """Import an optional executor, or say which extra brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"executor={name!r} needs the package {name!r}, which is not installed ({error}). "
            f"Install it with: pip install 'lm-eval-moecache[{name}]'."
        ) from error
