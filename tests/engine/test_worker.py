"""The worker serves in order, keeps to its throttle, tells its errors, and ends when told to."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.worker import Transfer, TransferError, Worker


class Copies:
    """A mover that writes down what it was given, and waits at a gate before each copy."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.keys: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.error: BaseException | None = None

    def fence(self) -> object:
        return None

    def place(self, transfer: Transfer) -> None:
        return

    def begin(self, transfer: Transfer) -> object:
        self.begun.set()
        assert self.gate.wait(10)
        self.keys.append(transfer.key)
        if self.error is not None:
            raise self.error
        return transfer.key

    def finish(self, token: object) -> float | None:
        return None

    def synchronize(self) -> None:
        return


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "moecache-link"]


@pytest.fixture
def copies() -> Iterator[Copies]:
    copies = Copies()
    yield copies
    copies.gate.set()


def held(copies: Copies, worker: Worker) -> Transfer:
    """Let a first transfer stand at the gate, so that the queues behind it can be looked at."""
    copies.gate.clear()
    copies.begun.clear()
    first = Transfer(99, 0, 1)
    worker.put(first, demanded=False)
    assert copies.begun.wait(10)
    return first


def wait_for(worker: Worker, count: int) -> list[Transfer]:
    arrived: list[Transfer] = []
    end = time.perf_counter() + 10
    while len(arrived) < count:
        assert time.perf_counter() < end
        arrived += worker.collect()
    return arrived


@pytest.mark.parametrize("depth", [1, 2])
def test_demanded_transfers_go_before_queued_prefetches(depth: int) -> None:
    copies = Copies(depth)
    worker = Worker(copies)
    held(copies, worker)
    for key, demanded in ((1, False), (2, False), (3, True), (4, True)):
        worker.put(Transfer(key, key, 1), demanded)
    copies.gate.set()
    assert [t.key for t in wait_for(worker, 5)] == [99, 3, 4, 1, 2] == copies.keys
    worker.close()


def test_a_promoted_prefetch_goes_before_others_and_a_withdrawn_one_never(copies: Copies) -> None:
    worker = Worker(copies)
    moving = held(copies, worker)
    queued = [Transfer(key, key, 1) for key in (1, 2, 3)]
    for transfer in queued:
        worker.put(transfer, demanded=False)
    worker.promote(queued[2])
    assert worker.withdraw(queued[0])
    assert not worker.withdraw(moving)
    copies.gate.set()
    assert [t.key for t in wait_for(worker, 3)] == [99, 3, 2]
    worker.close()


def test_a_throttled_link_takes_the_asked_time_and_counts_it_as_busy(copies: Copies) -> None:
    worker = Worker(copies, bytes_per_s=1e6)
    start = time.perf_counter()
    for key in range(10):
        worker.put(Transfer(key, key, 10_000), demanded=True)
    wait_for(worker, 10)
    seconds = time.perf_counter() - start
    assert 0.1 <= seconds < 0.2
    # A few percent are the timers' of a busy machine.
    assert 0.08 < worker.busy_s <= seconds
    worker.close()


@pytest.mark.parametrize("error", [OSError("bad shard"), KeyboardInterrupt(), MemoryError("full")])
def test_what_goes_wrong_in_the_thread_is_raised_where_it_is_waited_for(
    copies: Copies, error: BaseException
) -> None:
    worker = Worker(copies)
    copies.error = error
    worker.put(Transfer(1, 0, 1), demanded=True)
    with pytest.raises(TransferError, match=type(error).__name__) as caught:
        worker.wait_for({1})
    assert caught.value.__cause__ is error
    with pytest.raises(TransferError):
        worker.put(Transfer(2, 0, 1), demanded=True)
    worker.close()
    assert worker._thread not in threading.enumerate()


def test_a_closed_worker_refuses_and_does_not_hang(copies: Copies) -> None:
    worker = Worker(copies, bytes_per_s=1.0)
    worker.put(Transfer(1, 0, 1000), demanded=True)
    start = time.perf_counter()
    worker.close()
    worker.close()
    assert time.perf_counter() - start < 5
    with pytest.raises(TransferError, match="closed"):
        worker.wait_for({2})


def test_a_link_that_is_dropped_leaves_no_thread(copies: Copies) -> None:
    before = threads()
    link = WallLink(copies, None)
    assert len(threads()) == len(before) + 1
    gone = weakref.ref(link)
    del link
    gc.collect()
    assert gone() is None and threads() == before
