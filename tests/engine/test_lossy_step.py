"""The layer step under changed selections: dropping, substituting, lower precision."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np
import pytest

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.selection import Selection
from tests.engine.scripted import decode, fill, make_engine, make_geometry, prefill, run_layer


class DropAbsent(MissAlgorithm):
    """Loads nothing: drops absent experts."""

    source: ClassVar[str] = "test"

    def choose(self, event: Event) -> Selection | None:
        return Selection(event.experts, ~event.is_missing)


class KeepFirst(RoutingAlgorithm):
    """Drops all but each token's heaviest expert."""

    source: ClassVar[str] = "test"

    def choose(self, event: Event) -> Selection | None:
        keep = np.zeros(event.experts.shape, dtype=bool)
        keep[:, 0] = True
        return Selection(event.experts, keep)


def test_dropping_everything_absent_neither_moves_nor_waits() -> None:
    engine = make_engine(miss=DropAbsent)
    fill(engine, [0])
    # dense 0-2, expert 2-3.
    figures = "end_s=3 stall_s=0 requests=2 misses=1 dropped=1 executed=1"
    selection = prefill(engine, [[0, 1]], phase=DECODE, says=figures)
    assert selection is not None and selection.keep is not None
    assert selection.keep.tolist() == [[True, False]]


def test_a_flight_that_nobody_waits_for_lands_no_earlier_than_its_time() -> None:
    engine = make_engine({(0, 0): [8]}, miss=DropAbsent)
    engine.begin_pass(DECODE, 1)
    run_layer(engine, [[0, 1]])  # dense 0-2; both dropped; key 8 starts at 2 or later
    run_layer(engine, [[0, 1]], 1)  # dense 2-4; both dropped: key 8 is still in flight, until 7
    assert engine.memory.run.inflight == 8
    assert 8 not in engine.pools[0].resident
    engine.end_pass()
    engine.check_integrity()


def test_lossy_algorithms_of_a_decode_only_policy_stand_aside_in_prefill() -> None:
    engine = make_engine(routing=KeepFirst, phases="decode")
    assert prefill(engine, [[0, 3], [1, 3]], says="requests=3 dropped=0") is None


@pytest.mark.parametrize(
    ("late", "script", "figures", "resident"),
    [
        # Key 4 is in flight until 29 and key 5 is queued: 6 and 7 stand in at once, 27-29; the
        # transfer in flight still lands.
        ("replace", [4, 5], "end_s=29 stall_s=0 substituted=2 late=2 misses=0", {0, 4, 6, 7}),
        # Key 4 lands at 29, key 5 follows as a demand until 34: 34-36.
        ("await", [4, 5], "end_s=36 stall_s=7 substituted=0 late=2 misses=0", {0, 4, 5, 6, 7}),
        # Key 5 is not on its way: it is replaced, and key 4 awaited: 29-31.
        ("await", [4], "end_s=31 stall_s=2 substituted=1 late=1 misses=1", {0, 4, 6, 7}),
        ("replace", [4], "end_s=29 stall_s=0 substituted=2 late=1 misses=1", {0, 4, 6, 7}),
    ],
)
def test_what_a_prefetch_has_under_way_is_replaced_or_awaited(
    late: str, script: list[int], figures: str, resident: set[int]
) -> None:
    """BuddyMoE's algorithm 1 tests residency only; it leaves a prefetch in flight open."""
    miss = partial(find_algorithm("miss", "substitute_random"), late=late)
    engine = make_engine({(1, 0): script}, 8, miss=miss)
    # dense 0-2; 0 moves 2-7; expert 7-8; dense 8-10; 6 and 7 move 10-20; experts 20-22.
    decode(engine, [0], [6, 7], says="end_s=22")
    # dense 22-24; expert 0 24-25, while 4 moves 24-29; dense 25-27.
    decode(engine, [0], [4, 5], says=figures)
    assert set(engine.pools[0].resident) == resident


def test_lost_weight_and_avoided_misses_are_counted_where_a_lossy_rule_acts() -> None:
    geometry = make_geometry(num_layers=1, num_experts=6)
    drop_cold = find_algorithm("miss", "drop_cold")
    engine = make_engine(None, 4, geometry, phases="decode", miss=drop_cold)
    weights = np.array([[0.3, 0.1], [0.2, 0.2]], dtype=np.float32)
    says = "weighed_tokens=0 lost_weight=0 avoided=0"
    prefill(engine, [[0, 1], [2, 1]], weights=weights, says=says)
    # 0, 1 and 2 are resident. Expert 3 has a quarter of the first token's weight, less than the
    # even half, and no other token needs it; 4 has half of the second's, and is loaded.
    says = "misses=2 avoided=1 weighed_tokens=2 bytes_moved=100"
    prefill(engine, [[0, 3], [4, 1]], weights=weights, phase=DECODE, says=says)
    assert engine.ledger.passes[-1].lost_weight == pytest.approx(0.25)
