"""The layer step under changed selections: dropping, substituting, lower precision."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import ClassVar

import numpy as np
import pytest

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, Resolution
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.records.event import DECODE, PREFILL, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.selection import Selection
from tests.engine.scripted import (
    Always,
    FixedPrefetch,
    ScriptedPolicy,
    decode,
    make_engine,
    make_geometry,
    prefill_event,
)


class DropAbsent(MissAlgorithm):
    """Loads nothing: drops absent experts."""

    source: ClassVar[str] = "test"

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        keys = event.experts + event.layer * self.geometry.num_experts
        return Resolution([], Selection(event.experts, ~np.isin(keys, absent)))


class KeepFirst(RoutingAlgorithm):
    """Drops all but each token's heaviest expert."""

    source: ClassVar[str] = "test"

    def select(self, event: Event, resident: Container[int]) -> Selection | None:
        keep = np.zeros(event.experts.shape, dtype=bool)
        keep[:, 0] = True
        return Selection(event.experts, keep)


def run_layer(engine: VirtualEngine, layer: int, experts: list[list[int]]) -> Selection | None:
    assert engine.record is not None
    engine.enter(layer, len(experts))
    return engine.run(prefill_event(engine.record, engine.geometry, layer, experts)).selection


def test_dropped_assignments_are_no_misses_of_the_last_expert() -> None:
    geometry = make_geometry(num_layers=1, num_experts=4, top_k=2)
    engine = make_engine(ScriptedPolicy(miss=Always(DropAbsent)), 4, geometry)
    core.fill(engine.state, [0])
    record = engine.begin_pass(PREFILL, 2)
    engine.enter(0, 2)
    engine.run(Event(0, 0, PREFILL, 2, [0, 3], np.asarray([[0, -1], [3, -1]])))
    assert (record.misses, record.token_misses) == (1, 1)


def test_dropping_everything_absent_neither_moves_nor_waits() -> None:
    engine = make_engine(ScriptedPolicy(miss=Always(DropAbsent)))
    core.fill(engine.state, [0])
    record = engine.begin_pass(DECODE, 1)
    selection = run_layer(engine, 0, [[0, 1]])
    engine.end_pass()
    # dense 0-2, expert 2-3.
    assert (record.end_s, record.stall_s) == (3.0, 0.0)
    assert (record.requests, record.misses, record.dropped, record.executed) == (2, 1, 1, 1)
    assert selection is not None
    assert selection.keep is not None
    assert selection.keep.tolist() == [[True, False]]


def test_a_flight_that_nobody_waits_for_lands_no_earlier_than_its_time() -> None:
    def make_prefetch(geometry: Geometry) -> FixedPrefetch:
        return FixedPrefetch(geometry, {(0, 0): [8]})

    policy = ScriptedPolicy(miss=Always(DropAbsent), prefetch=Always(make_prefetch))
    engine = make_engine(policy)
    engine.begin_pass(DECODE, 1)
    run_layer(engine, 0, [[0, 1]])  # dense 0-2; both dropped; key 8 starts at 2 or later
    run_layer(engine, 1, [[0, 1]])  # dense 2-4; both dropped: key 8 is still in flight, until 7
    assert engine.link.inflight == 8
    assert 8 not in engine.pools[0].resident
    engine.end_pass()
    engine.check_integrity()


def test_pruning_by_the_router_is_counted_and_not_fetched() -> None:
    engine = make_engine(ScriptedPolicy(routing=Always(KeepFirst)))
    record = engine.begin_pass(PREFILL, 2)
    run_layer(engine, 0, [[0, 3], [1, 3]])
    engine.end_pass()
    # dense 0-2; keys 0 and 1 move 2-12; two experts 12-14.
    assert (record.end_s, record.requests, record.misses) == (14.0, 2, 2)
    assert (record.dropped, record.executed, record.unfaithful) == (2, 2, 0)
    assert record.token_misses == 2


def test_lossy_algorithms_of_a_decode_only_policy_stand_aside_in_prefill() -> None:
    policy = ScriptedPolicy(routing=Always(KeepFirst), phases="decode")
    engine = make_engine(policy)
    record = engine.begin_pass(PREFILL, 2)
    assert run_layer(engine, 0, [[0, 3], [1, 3]]) is None
    engine.end_pass()
    assert (record.requests, record.dropped) == (3, 0)


@pytest.mark.parametrize(
    ("late", "script", "end_s", "stall_s", "substituted", "resident"),
    [
        # Key 4 is in flight until 29 and key 5 is queued: 6 and 7 stand in at once, 27-29; the
        # transfer in flight still lands.
        ("replace", [4, 5], 29.0, 0.0, 2, {0, 4, 6, 7}),
        # Key 4 lands at 29, key 5 follows as a demand until 34: 34-36.
        ("await", [4, 5], 36.0, 7.0, 0, {0, 4, 5, 6, 7}),
        # Key 5 is not on its way: it is replaced, and key 4 awaited: 29-31.
        ("await", [4], 31.0, 2.0, 1, {0, 4, 6, 7}),
        ("replace", [4], 29.0, 0.0, 2, {0, 4, 6, 7}),
    ],
)
def test_what_a_prefetch_has_under_way_is_replaced_or_awaited(
    late: str, script: list[int], end_s: float, stall_s: float, substituted: int, resident: set[int]
) -> None:
    """BuddyMoE's algorithm 1 tests residency only; it leaves a prefetch in flight open."""
    random = find_algorithm("miss", "substitute_random")
    policy = ScriptedPolicy(
        prefetch=Always(lambda geometry: FixedPrefetch(geometry, {(1, 0): script})),
        miss=Always(lambda geometry: random(geometry, late=late)),
    )
    engine = make_engine(policy, capacity=8)
    # dense 0-2; 0 moves 2-7; expert 7-8; dense 8-10; 6 and 7 move 10-20; experts 20-22.
    assert decode(engine, [0], [6, 7]).end_s == 22.0
    # dense 22-24; expert 0 24-25, while 4 moves 24-29; dense 25-27.
    record = decode(engine, [0], [4, 5])
    assert (record.end_s, record.stall_s) == (end_s, stall_s)
    assert (record.late, record.misses) == (len(script), 2 - len(script))
    assert record.substituted == substituted
    assert set(engine.pools[0].resident) == resident


def test_lost_weight_and_avoided_misses_are_counted_where_a_lossy_rule_acts() -> None:
    geometry = make_geometry(num_layers=1, num_experts=6, top_k=2)
    drop_cold = find_algorithm("miss", "drop_cold")
    engine = make_engine(ScriptedPolicy("decode", miss=Always(drop_cold)), 4, geometry)
    experts = np.array([[0, 1], [2, 1]])
    weights = np.array([[0.3, 0.1], [0.2, 0.2]], dtype=np.float32)
    prompt = Event(0, 0, PREFILL, 2, [0, 1, 2], experts, weights)
    engine.begin_pass(PREFILL, 2)
    engine.enter(0, 2)
    engine.run(prompt)
    engine.end_pass()
    record = engine.record
    assert (record.weighed_tokens, record.lost_weight, record.avoided) == (0, 0.0, 0)
    # 0, 1 and 2 are resident. Expert 3 has a quarter of the first token's weight, less than the
    # even half, and no other token needs it; 4 has half of the second's, and is loaded.
    experts = np.array([[0, 3], [4, 1]])
    record = engine.begin_pass(DECODE, 2)
    engine.enter(0, 2)
    engine.run(Event(1, 0, DECODE, 2, [0, 3, 4, 1], experts, weights))
    engine.end_pass()
    assert (record.misses, record.avoided, record.weighed_tokens) == (2, 1, 2)
    assert record.lost_weight == pytest.approx(0.25)
    assert record.bytes_moved == 100
