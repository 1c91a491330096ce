"""Several levels of precision in one cache: bytes, upgrades, prefetches and times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm
from lm_eval_moecache.engine.engine import Engine as VirtualEngine
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.header import HEADER_KEY, Header, read_header, write_header
from tests.engine.scripted import decode, make_engine, make_geometry, make_hardware

LADDER = make_geometry(
    2,
    expert_bytes=((100, 50, 25),) * 2,
    precision=("int8", "int4", "int2"),
    compute_bytes=(200, 200),
)


class Wanted(MissAlgorithm):
    """Demands each key at its level of `demanded`, there or not; prefetches at those of `ahead`."""

    source: ClassVar[str] = "test"
    uses_ladder: ClassVar[bool] = True
    upgrade = True

    def __init__(
        self, geometry: Geometry, levels: Mapping[int, int], ahead: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(geometry)
        self.demanded, self.ahead = levels, ahead or {}

    def choose(self, event: Event) -> Selection | None:
        self.layer = event.layer
        return None

    def levels(self, experts: Any, weights: Any) -> Any:
        keys = experts + self.layer * self.geometry.num_experts
        return np.vectorize(lambda key: self.demanded.get(key, 0))(keys)

    def prefetch_levels(self, event: Event, layer: int, experts: Any) -> Any:
        keys = experts + layer * self.geometry.num_experts
        return np.array([self.ahead.get(key, 0) for key in keys.tolist()])


def make(
    levels: Mapping[int, int],
    capacity: str = "225B",
    script: Any = None,
    ahead: Mapping[int, int] | None = None,
    **figures: float,
) -> VirtualEngine:
    hardware = make_hardware(**figures)
    return make_engine(
        script, capacity, LADDER, hardware, miss=lambda geometry: Wanted(geometry, levels, ahead)
    )


def test_each_level_has_its_own_bytes_transfer_and_execution() -> None:
    engine = make({0: 0, 1: 2})
    # dense 0-2; 1 s + 100 B / 25 B/s, then 1 s + 1 s: 2-9; 1 s at int8, then 0.25 s at int2.
    decode(engine, [0, 1], says="stall_s=7 end_s=10.25 bytes_moved=125 low_precision=1 executed=2")
    assert engine.pools[0].resident == {0: 0, 1: 2}


def test_a_hit_at_a_lower_level_is_a_hit_of_that_level() -> None:
    levels = {0: 2, 1: 2}
    engine = make(levels)
    decode(engine, [0, 1])
    levels[1] = 1  # now demanded at a better level; an upgrade is a transfer
    figures = "requests=2 misses=0 hits=2 low_precision=2 bytes_moved=50 evictions=0"
    decode(engine, [0, 1], says=figures)
    assert (engine.pools[0].resident, engine.pools[0]["replaced"]) == ({0: 2, 1: 1}, 1)


def test_an_upgrade_frees_the_old_copy_first_and_is_no_departure_to_an_eviction_rule() -> None:
    """Ghost lists would take the expert for one that had left and was missed again."""
    levels = {0: 1, 1: 1}
    engine = make(levels, "150B")
    decode(engine, [0, 1])
    levels[0] = 0
    decode(engine, [0, 1], says="evictions=0")  # 50 + 100 fit only without the old 50
    assert (engine.pools[0].resident, engine.pools[0]["used"]) == ({1: 1, 0: 0}, 150)
    told = [("insert", 0), ("insert", 1)]
    assert engine.eviction.told("insert", "evict") == told
    # It is as old as before: the first to leave.
    decode(engine, [2])
    assert engine.eviction.told("insert", "evict") == [*told, ("evict", 0), ("insert", 2)]


def test_a_prefetch_in_flight_at_a_lower_level_than_demanded_is_loaded_again() -> None:
    engine = make({0: 0, 1: 0, 4: 0, 5: 0}, "300B", {(0, 0): [4]}, {4: 2})
    # dense 0-2, two transfers 2-12, experts 12-14, dense 14-16; key 4 moves at int2 12-14 and
    # is resident, but int8 is demanded: 5 s, and 5 s for key 5: 16-26; two experts.
    decode(engine, [0, 1], [4, 5], says="end_s=28 bytes_moved=425")
    assert (engine.pools[0].resident[4], engine.pools[0]["replaced"]) == (0, 1)


def test_a_trace_header_keeps_the_ladder() -> None:
    header = read_header("x", {HEADER_KEY: write_header(Header(geometry=LADDER, seed=0))})
    assert header.geometry == LADDER
