"""Worker processes that end with their parent, however it ends.

Imports nothing heavy, so that a worker watches its parent before it has imported torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, TypeVar
from unittest import mock

from tqdm import tqdm

from lm_eval_moecache.records.numbers import read_count

MOST_JOBS = 1024
Item = TypeVar("Item")
Result = TypeVar("Result")


def read_jobs(value: object) -> int:
    """Return the number of jobs that `--jobs` gives."""
    return read_count("--jobs", value, least=1, most=MOST_JOBS)


@contextmanager
def local_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
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
        try:
            yield pool
        except BaseException:
            for worker in set(multiprocessing.active_children()) - other_children:
                worker.kill()
            pool.shutdown(cancel_futures=True)
            raise


def submit(
    pool: ProcessPoolExecutor, work: Callable[..., Result], items: Sequence[Item], *arguments: Any
) -> dict[Future[Result], Item]:
    """Submit `work(item, *arguments)` for each item; return future -> item."""
    with _sigint_blocked():
        return {pool.submit(work, item, *arguments): item for item in items}


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
