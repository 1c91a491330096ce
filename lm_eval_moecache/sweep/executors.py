"""Where runs are made: here, in local processes, on a Ray cluster, or as Slurm jobs.

Each executor yields the outcomes as they come. All call the same worker, which writes the results
itself: Ray and Slurm need the experiment's folder on a file system that their machines share.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.sweep.identity import Planned
from lm_eval_moecache.sweep.worker import Outcome, run_cell, run_cells


def execute(
    stages: Sequence[Sequence[Planned]],
    folder: Path,
    experiment: str,
    *,
    executor: str = "local",
    jobs: int = 1,
    options: Mapping[str, Any],
) -> Iterator[Outcome]:
    """Run the cells, stage after stage: a replay needs the trace of a run before it.

    In a stage, cells that share a loaded model or a trace follow each other.
    """
    ordered = [sorted(stage, key=_neighbours) for stage in stages if stage]
    where = str(folder.resolve())
    if executor == "ray":
        return _ray(ordered, where, experiment, jobs, options)
    if executor == "submitit":
        return _submitit(ordered, where, experiment, jobs, options)
    if options:
        raise unknown("executor_options", next(iter(options)), ("none with executor=local",))
    if jobs == 1:
        return (run_cell(each, where, experiment) for stage in ordered for each in stage)
    return _processes(ordered, where, experiment, jobs)


def _neighbours(planned: Planned) -> tuple[str, ...]:
    share = planned.share
    return (*planned.load_key, "" if share is None else share.name)


def _processes(
    stages: Sequence[Sequence[Planned]], folder: str, experiment: str, jobs: int
) -> Iterator[Outcome]:
    with local_pool(jobs) as pool:
        for stage in stages:
            futures = {pool.submit(run_cell, each, folder, experiment): each for each in stage}
            for future in as_completed(futures):
                error = future.exception()
                if error is None:
                    yield future.result()
                else:
                    # The process died (memory, a kill): the run is reported, and retried next time.
                    yield Outcome(futures[future].run_id, f"{type(error).__name__}: {error}")


@contextmanager
def local_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with this one, and keep their loaded model between runs."""
    # spawn: a forked copy of torch's thread pools can hang.
    context = multiprocessing.get_context("spawn")
    # Read by torch when a worker imports it; what the user has set stays.
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // jobs)))
    with (
        mock.patch.dict(os.environ, OMP_NUM_THREADS=threads),
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker) as pool,
    ):
        yield pool


def _start_worker() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a pool's worker has a parent"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    """A pool's workers outlive a killed parent and would run on beside the sweep that resumes."""
    parent.join()
    os._exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ray(
    stages: Sequence[Sequence[Planned]],
    folder: str,
    experiment: str,
    jobs: int,
    options: Mapping[str, Any],
) -> Iterator[Outcome]:
    ray = _extra("ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(**{"log_to_driver": False, **options})
    cores = max(1, int(ray.cluster_resources().get("CPU", 1)) // jobs)
    # A worker process serves many tasks of one function, so a loaded model is shared there too.
    task = ray.remote(num_cpus=cores, max_retries=0)(run_cell)
    try:
        for stage in stages:
            waiting = {task.remote(each, folder, experiment): each for each in stage}
            while waiting:
                [done], _ = ray.wait(list(waiting), num_returns=1)
                each = waiting.pop(done)
                try:
                    yield ray.get(done)
                except ray.exceptions.RayError as error:
                    yield Outcome(each.run_id, f"{type(error).__name__}: {error}")
    finally:
        if ours:
            ray.shutdown()


def _submitit(
    stages: Sequence[Sequence[Planned]],
    folder: str,
    experiment: str,
    jobs: int,
    options: Mapping[str, Any],
) -> Iterator[Outcome]:
    submitit = _extra("submitit")
    parameters = dict(options)
    cluster = parameters.pop("cluster", None)
    executor = submitit.AutoExecutor(folder=f"{folder}/submitit", cluster=cluster)
    parameters.setdefault("timeout_min", 24 * 60)
    executor.update_parameters(**parameters)
    for stage in stages:
        # Neighbours share a loaded model: consecutive runs go into one job.
        size = -(-len(stage) // jobs)
        chunks = [stage[start : start + size] for start in range(0, len(stage), size)]
        submitted = executor.map_array(
            run_cells, chunks, [folder] * len(chunks), [experiment] * len(chunks)
        )
        for job, chunk in zip(submitted, chunks, strict=True):
            try:
                yield from job.result()
            except Exception as error:  # submitit raises several kinds, the job's own included
                for each in chunk:
                    yield Outcome(each.run_id, f"{type(error).__name__}: {error}")


def _extra(name: str) -> Any:
    """Import an optional executor, or say which extra brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"executor={name!r} needs the package {name!r}, which is not installed ({error}). "
            f"Install it with: pip install 'lm-eval-moecache[{name}]'."
        ) from error
