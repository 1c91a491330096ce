"""Worker processes that end with the process that started them, whatever ends it.

Imports nothing heavy, so that a worker is there to hear of the end before it has imported torch.
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

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def local_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with this one, and keep their loaded model between runs.

    Whatever ends the block early (an interrupt, an error) ends them at once: what runs is given up,
    and nothing that waits is begun.
    """
    # spawn: a forked copy of torch's thread pools can hang.
    context = multiprocessing.get_context("spawn")
    # Read by torch when a worker imports it; what the user has set stays.
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // jobs)))
    others = set(multiprocessing.active_children())
    with (
        mock.patch.dict(os.environ, OMP_NUM_THREADS=threads),
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker) as pool,
    ):
        try:
            yield pool
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
            pool.shutdown(cancel_futures=True)
            raise


def submit(
    pool: ProcessPoolExecutor, work: Callable[..., Result], items: Sequence[Item], *arguments: Any
) -> dict[Future[Result], Item]:
    """Put `work(item, *arguments)` before the pool's workers, starting those that are needed."""
    with _unheard():
        return {pool.submit(work, item, *arguments): item for item in items}


@contextmanager
def _unheard() -> Iterator[None]:
    """Hold Ctrl-C back while workers are started, which inherit that: only this process hears it.

    A terminal sends it to all of them, and a worker would tell of it with a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # Started first: it lets the signal through again, for itself and for us.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A bar's own lock is a semaphore of the system, which Python warns of where a worker is ended.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's workers outlive a killed parent and would run on beside the sweep that resumes."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker of a pool"
    parent.join()
    os._exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
