"""The real link: its worker's order of service, and how many prefetches a visit issues."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest

from lm_eval_moecache.engine.kernel.link import hint
from lm_eval_moecache.engine.wall.engine import WallEngine
from lm_eval_moecache.engine.wall.link import Traffic, Transfer, WallLink, Worker
from lm_eval_moecache.records.errors import TransferError
from tests.engine.scripted import StillMover, make_geometry, make_setting


class Copies(StillMover):
    """A mover that logs the keys of its transfers and waits at a gate before each copy."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.keys: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.error: BaseException | None = None

    def begin(self, transfer: Transfer) -> object:
        self.begun.set()
        assert self.gate.wait(10)
        self.keys.append(transfer.key)
        if self.error is not None:
            raise self.error
        return transfer.key


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "moecache-link"]


@pytest.fixture
def copies() -> Iterator[Copies]:
    copies = Copies()
    yield copies
    copies.gate.set()


def held(copies: Copies, worker: Worker) -> Transfer:
    """Hold a first transfer at the gate, so that others queue behind it."""
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


class Ticks(threading.Event):
    """A clock that moves only while a throttled transfer is waited for."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return self.is_set()


def test_a_throttled_link_takes_the_asked_time_and_counts_it_as_busy(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, ticks = Worker(copies, bytes_per_s=1e6), Ticks()
    monkeypatch.setattr(worker, "_closing", ticks)
    monkeypatch.setattr("lm_eval_moecache.engine.wall.link.time", ticks)
    transfers = [Transfer(key, key, 10_000, submitted_s=0.0) for key in range(10)]
    for transfer in transfers:
        worker.put(transfer, demanded=True)
    wait_for(worker, 10)
    assert [t.ended_s for t in transfers] == pytest.approx([0.01 * n for n in range(1, 11)])
    assert [t.lag_s for t in transfers] == pytest.approx([0.0] * 10)
    assert worker.busy_s == pytest.approx(0.1)
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
    gc.collect()
    before = threads()
    link = WallLink(copies, None)
    assert len(threads()) == len(before) + 1
    reference = weakref.ref(link)
    del link
    gc.collect()
    assert reference() is None and threads() == before


# --- how many prefetches are issued at a visit ---


class ScriptedLink:
    """Transfers of equal duration, one after another, on a clock set by the test."""

    def __init__(self, transfer_s: float) -> None:
        self.transfer_s, self.busy_until_s = transfer_s, 0.0
        self.issued: list[int] = []

    def arrivals(self) -> list[int]:
        return []

    def free_s(self, now: float) -> float:
        return max(now, self.busy_until_s)

    def issue(self, transfer: Transfer) -> None:
        self.issued.append(transfer.key)
        self.busy_until_s += self.transfer_s


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The current time, for tests to set."""
    times = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: times[0])
    return times


def make(transfer_s: float) -> tuple[Traffic, ScriptedLink, Callable[..., None]]:
    """Return traffic over a scripted link, and a function that queues prefetches of layer 1."""
    engine = WallEngine(make_geometry(), make_setting(capacity=12), StillMover())
    engine.close()

    def submit(keys: Sequence[int], now: float, batch: int = -1) -> None:
        for key in keys:
            hint(engine.memory.run, key, 0, 0, 0, now, batch)

    engine.link = link = ScriptedLink(transfer_s)
    return engine.traffic, link, submit


@pytest.mark.parametrize(
    ("transfer_s", "gap_s", "stood_still_s", "busy_s", "awaited", "begin"),
    [
        (6.0, 4.0, 0.0, 0.0, False, [4]),  # at 0; the next would at 6, after the visit at 4
        (1.5, 4.0, 0.0, 0.0, False, [4, 5, 6]),  # at 0, 1.5 and 3
        (2.0, 4.0, 0.0, 0.0, False, [4, 5, 6]),  # at 0, 2 and, together with the visit, 4
        # The compute's own waiting does not count into the gap between visits.
        (2.0, 1.0, 50.0, 0.0, False, [4]),
        # Nothing is issued to a link that stays busy past the next visit ...
        (6.0, 4.0, 0.0, 4.5, False, []),
        # ... but where the compute waits for the link, the next visit follows that wait at once.
        (6.0, 4.0, 0.0, 4.5, True, [4]),
    ],
)
def test_those_are_issued_that_begin_before_the_next_visit(
    now: list[float],
    transfer_s: float,
    gap_s: float,
    stood_still_s: float,
    busy_s: float,
    awaited: bool,
    begin: list[int],
) -> None:
    traffic, link, submit = make(transfer_s)
    # The time from `executed` to the next visit.
    traffic.drain(-1, "executed")
    now[0] += gap_s + stood_still_s
    traffic.note_stall(stood_still_s)
    traffic.drain(-1, "begun")
    link.busy_until_s = now[0] + busy_s
    submit([4, 5, 6, 7], now[0])
    traffic.drain(-1, "executed", awaited=awaited)
    assert link.issued == begin


def test_a_batch_is_issued_whole(now: list[float]) -> None:
    traffic, link, submit = make(2.0)
    submit([4, 5, 6], 0.0, batch=1)
    submit([7], 0.0, batch=2)
    traffic.drain(-1, "new")
    assert link.issued == [4, 5, 6]


def test_a_link_predicts_its_end_by_the_rate_of_what_it_moved(copies: Copies) -> None:
    link = WallLink(copies, None)
    copies.gate.clear()
    assert link.free_s(3.0) == 3.0
    link.demand(Transfer(0, 0, 100))
    assert link.free_s(3.0) == math.inf  # its rate is still unknown
    copies.gate.set()
    link.wait_for([0])
    copies.gate.clear()
    # It had the link to itself from start to end; its end is the last arrival.
    took_s, ended_s = link.busy_s, link._ended_s
    assert took_s > 0
    link.demand(Transfer(1, 1, 100))
    link.demand(Transfer(2, 2, 300))
    begun_s = min(transfer.submitted_s for transfer in link._flying.values())
    # Differences, as both moments are far larger than the time between them.
    assert link.free_s(begun_s) - max(begun_s, ended_s) == pytest.approx(4 * took_s)
    late_s = time.perf_counter() + 1000
    assert link.free_s(late_s) == late_s  # overdue: expected at any moment
    copies.gate.set()
    link.wait_for([1, 2], 2)
    link.close()


def test_how_long_demands_moved_leaves_out_what_was_no_moving(copies: Copies) -> None:
    """Three experts of 100 bytes at 10,000 bytes/s, however late the worker starts on them."""
    link = WallLink(copies, 1e4)
    begun_s = time.perf_counter()
    for key in range(3):
        link.demand(Transfer(key, key, 100))
    link.wait_for(range(3), 3)
    assert 0.0299 <= link.demanded_s <= time.perf_counter() - begun_s
    link.close()


@pytest.mark.parametrize(("rate", "lag_s"), [(None, 0.75), (100.0, 0.0), (200.0, 0.5)])
def test_a_link_that_begins_late_says_by_how_much(
    monkeypatch: pytest.MonkeyPatch, rate: float | None, lag_s: float
) -> None:
    """100 bytes, demanded at 8 s, started at 8.75 s, arrived at 9 s.

    A link throttled to 100 bytes/s would have needed that whole second anyway, and one at
    200 bytes/s half of it.
    """
    worker = Worker(Copies(), rate)
    transfer = Transfer(0, 0, 100, submitted_s=8.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 9.0)
    worker._finish(transfer, 8.75, None)
    worker.close()
    assert (transfer.lag_s, transfer.ended_s) == (lag_s, 9.0)
