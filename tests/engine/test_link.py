"""The link: one transfer at a time, demands before queued prefetches, nothing interrupted."""

from __future__ import annotations

import pytest

from lm_eval_moecache.engine.virtual.link import VirtualLink
from tests.engine.scripted import make_hardware


def make_link() -> VirtualLink:
    return VirtualLink(make_hardware())  # 1 s + bytes / 25 bytes/s: 100 bytes take 5 s


def test_a_transfer_takes_latency_plus_bytes_over_bandwidth() -> None:
    link = make_link()
    assert link.transfer(100, now=2.0) == 7.0
    assert (link.bytes_moved, link.busy_s, link.transfers) == (100, 5.0, 1)


def test_a_second_transfer_waits_for_the_first() -> None:
    link = make_link()
    link.transfer(100, now=2.0)
    assert link.transfer(50, now=3.0) == 10.0  # 7 + 1 + 2
    assert link.transfer(50, now=20.0) == 23.0  # the link was idle from 10 to 20
    assert link.busy_s == 5.0 + 3.0 + 3.0


def test_the_earliest_due_prefetch_goes_first_then_the_order_of_submission() -> None:
    link = make_link()
    for key, due in ((7, 2), (3, 1), (9, 1)):
        link.submit([key], due, now=0.0)
    order = []
    while (head := link.peek()) is not None:
        order.append(head[0])
        link.withdraw(head[0])
    assert order == [3, 9, 7]
    assert not link.active


def test_a_prefetch_cannot_start_before_its_submission_nor_before_the_link_is_free() -> None:
    link = make_link()
    link.submit([1], due=0, now=4.0)
    assert link.peek() == (1, 4.0)
    link.transfer(100, now=2.0)
    assert link.peek() == (1, 7.0)


def test_a_demand_overtakes_the_queue_but_not_the_transfer_in_flight() -> None:
    link = make_link()
    link.submit([1], due=0, now=0.0)
    link.submit([2], due=0, now=0.0)
    link.start(1, 100, now=0.0)
    assert link.transfer(100, now=2.0) == 10.0  # behind key 1, which lands at 5
    assert link.peek() == (2, 10.0)  # key 2 is overtaken


def test_postponed_prefetches_keep_their_place_in_the_queue() -> None:
    link = make_link()
    link.submit([1], due=0, now=0.0)
    link.submit([2], due=0, now=0.0)
    link.postpone(1, until=6.0)
    assert link.peek() == (1, 6.0)


def test_a_key_withdrawn_and_submitted_again_has_its_new_place() -> None:
    link = make_link()
    link.submit([1], due=0, now=0.0)
    link.submit([2], due=0, now=0.0)
    link.withdraw(1)
    link.submit([1], due=5, now=3.0)
    assert link.peek() == (2, 0.0)
    assert link.cancel_due(0) == 1
    assert link.peek() == (1, 3.0)


def test_cancelling_drops_what_is_due_and_leaves_the_rest_and_the_flight() -> None:
    link = make_link()
    for key, due in ((1, 0), (2, 1), (3, 2)):
        link.submit([key], due, now=0.0)
    link.start(1, 100, now=0.0)
    assert link.cancel_due(1) == 1
    assert [key for key in (1, 2, 3) if link.is_pending(key)] == [1, 3]
    assert link.bytes_moved == 100


def test_what_is_on_its_way_is_not_queued_again() -> None:
    link = make_link()
    assert link.submit([1, 2], due=0, now=0.0) == [1, 2]
    assert link.submit([2, 3, 1], due=5, now=0.0) == [3]
    link.start(1, 100, now=0.0)
    assert link.submit([1], due=0, now=0.0) == []
    assert link.without_pending([1, 2, 3, 4]) == [4]
    assert link.cancel_due(0) == 1, "key 2 is due at the event that it was asked for first"


def test_only_one_prefetch_is_in_flight() -> None:
    link = make_link()
    link.submit([1], due=0, now=0.0)
    link.submit([2], due=0, now=0.0)
    link.start(1, 100, now=0.0)
    with pytest.raises(AssertionError, match="key 1 is still in flight"):
        link.start(2, 100, now=5.0)
    assert link.land() == 1
    with pytest.raises(AssertionError, match="nothing is in flight"):
        link.land()


def test_clearing_keeps_only_the_transfer_in_flight() -> None:
    link = make_link()
    link.submit([1], due=0, now=0.0)
    link.submit([2], due=0, now=0.0)
    link.start(1, 100, now=0.0)
    link.clear()
    assert link.active
    assert link.land() == 1
    assert not link.active
    assert link.peek() is None


def test_a_batch_that_moves_without_a_gap_pays_one_latency() -> None:
    link = make_link()
    for key in (1, 2):
        link.submit([key], due=0, now=0.0, batch=7)
    link.submit([3], due=0, now=0.0, batch=8)
    for key, lands_at in ((1, 5.0), (2, 9.0), (3, 14.0)):  # 1 + 4, then 4, then a batch of its own
        assert link.peek() == (key, link.busy_until)
        link.start(key, 100, now=link.busy_until)
        assert link.busy_until == lands_at
        link.land()
    assert link.busy_s == 14.0


@pytest.mark.parametrize("gap", ["a demand between", "a pause", "another batch", "no batch"])
def test_whatever_comes_between_ends_a_batch(gap: str) -> None:
    link = make_link()
    batch = None if gap == "no batch" else 7
    link.submit([1], due=0, now=0.0, batch=batch)
    link.submit([2], due=1, now=0.0, batch=batch)
    link.start(1, 100, now=0.0)
    link.land()
    if gap == "a demand between":
        assert link.transfer(100, now=0.0) == 10.0
    elif gap == "a pause":
        link.postpone(2, until=10.0)
    elif gap == "another batch":
        link.submit([3], due=0, now=0.0, batch=8)
        link.start(3, 100, now=5.0)
        link.land()
    before = 5.0 if gap == "no batch" else 10.0
    assert link.peek() == (2, before)
    link.start(2, 100, now=before)
    assert link.busy_until == before + 5.0
