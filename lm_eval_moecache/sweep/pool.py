"""Where work runs: worker processes that end with their parent, a Ray cluster, or Slurm jobs.

Each is a context that yields a `Submit`. Imports nothing heavy, so that a worker watches its parent
before it has imported torch.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from multiprocessing import resource_tracker
from typing import Any
from unittest import mock

from tqdm import tqdm

from lm_eval_moecache.records.numbers import read_count

MOST_JOBS = 1024
Work = Callable[..., Any]
Futures = dict[Future[Any], Any]
Submit = Callable[..., Futures]
"""(work, items, *arguments) -> future -> item, of `work(item, *arguments)` for each item."""


def read_jobs(value: object) -> int:
    """Return the number of jobs that `--jobs` gives."""
    return read_count("--jobs", value, least=1, most=MOST_JOBS)


@contextmanager
def local_pool(jobs: int) -> Iterator[Submit]:
    """Worker processes that end with this one, and keep their loaded model between runs.

    An exception in the block (an interrupt, an error) kills them at once: running work is lost, and
    queued work never starts.
    """
    # spawn: a forked copy of torch's thread pools can hang.
    context = multiprocessing.get_context("spawn")
    # Read by torch when a worker imports it; the user's setting wins.
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // jobs)))
    other_children = set(multiprocessing.active_children())
    with (
        mock.patch.dict(os.environ, OMP_NUM_THREADS=threads),
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker) as pool,
    ):

        def submit(work: Work, items: Sequence[Any], *arguments: Any) -> Futures:
            with _sigint_blocked():
                return {pool.submit(work, item, *arguments): item for item in items}

        try:
            yield submit
        except BaseException:
            for worker in set(multiprocessing.active_children()) - other_children:
                worker.kill()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT while workers start: they inherit the mask, so only this process gets Ctrl-C.

    A terminal sends it to all processes, and each worker would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # Started before: starting it unblocks the signal, in it and in this process.
    resource_tracker.ensure_running()
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # tqdm's default lock is a system semaphore, which Python reports as leaked by killed workers.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit with the parent: workers outlive a killed one and would run with the resumed sweep."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker of a pool"
    parent.join()
    os._exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- a Ray cluster and Slurm jobs: their machines must share the file system of the results ---


@contextmanager
def _ray(jobs: int, folder: str, options: Mapping[str, Any]) -> Iterator[Submit]:
    """Tasks of a Ray cluster, each with an equal share of its cores."""
    ray = import_extra("executor='ray'", "ray", "ray")
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(**{"log_to_driver": False, **options})
    cores = max(1, int(ray.cluster_resources().get("CPU", 1)) // jobs)
    # Ray's worker processes are reused for tasks of one function, so they share a loaded model.
    function_of = cache(ray.remote(num_cpus=cores, max_retries=0))
    submitted: list[Any] = []

    def submit(work: Work, items: Sequence[Any], *arguments: Any) -> Futures:
        submitted[:] = [function_of(work).remote(item, *arguments) for item in items]
        return {task.future(): item for task, item in zip(submitted, items, strict=True)}

    try:
        yield submit
    except BaseException:
        # On a cluster we did not start, queued tasks would still run.
        for task in submitted:
            ray.cancel(task, force=True)
        raise
    finally:
        if is_ours:
            ray.shutdown()


@contextmanager
def _submitit(jobs: int, folder: str, options: Mapping[str, Any]) -> Iterator[Submit]:
    """Slurm jobs (or `cluster=local`), one per item, which a thread each waits for."""
    submitit = import_extra("executor='submitit'", "submitit", "submitit")
    parameters = {"timeout_min": 24 * 60, **options}
    cluster = parameters.pop("cluster", None)
    executor = submitit.AutoExecutor(folder=f"{folder}/submitit", cluster=cluster)
    executor.update_parameters(**parameters)
    submitted: list[Any] = []
    with ThreadPoolExecutor(jobs) as waiting:

        def submit(work: Work, items: Sequence[Any], *arguments: Any) -> Futures:
            repeated = ([argument] * len(items) for argument in arguments)
            submitted[:] = executor.map_array(work, items, *repeated)
            return {
                waiting.submit(job.result): item for job, item in zip(submitted, items, strict=True)
            }

        try:
            yield submit
        except BaseException:
            for job in submitted:
                job.cancel()
            raise


EXECUTORS: Mapping[str, Callable[..., AbstractContextManager[Submit]]] = {
    "local": lambda jobs, *_: local_pool(jobs),
    "ray": _ray,
    "submitit": _submitit,
}
"""Executor -> its context, made of the number of jobs, the results' folder and its options."""


def import_extra(what: str, package: str, extra: str) -> Any:
    """Import an optional package. Raises ValueError naming the extra that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"{what} needs the package {package!r}, which is not installed ({error}). "
            f"Install it with `pip install {package}`, or this package with its extra {extra!r}."
        ) from error
