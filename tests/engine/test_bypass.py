"""An event larger than the cache passes it by, worked by hand on the machine of `scripted.py`."""

from __future__ import annotations

import pytest

from lm_eval_moecache.algorithms.eviction.bypass_lru import BypassLRU
from lm_eval_moecache.algorithms.eviction.lru import LRU
from tests.engine.scripted import Always, ScriptedPolicy, decode, make_engine, make_geometry


@pytest.mark.parametrize(("rule", "kept"), [(BypassLRU, {1, 2}), (LRU, set())])
def test_an_event_larger_than_the_cache_leaves_what_was_there(rule: type, kept: set[int]) -> None:
    geometry = make_geometry(num_layers=1, num_experts=8, top_k=4)
    engine = make_engine(ScriptedPolicy(eviction=Always(rule)), 3, geometry)
    decode(engine, [0, 1, 2])
    record = decode(engine, [3, 4, 5, 6])
    # Room for three: 0, the oldest, makes room for 3, which makes room for 4, then 5, then 6.
    assert (record.misses, record.bytes_moved) == (4, 400)
    assert set(engine.pools[0].resident) & {0, 1, 2} == kept
    # The next event fits, and the staging place is the first to be taken.
    record = decode(engine, [1, 2, 7])
    assert record.misses == 3 - len(kept)
    assert set(engine.pools[0].resident) == {1, 2, 7}


def test_residents_are_used_where_an_event_passes_by_and_transfers_take_turns() -> None:
    geometry = make_geometry(num_layers=1, num_experts=8, top_k=4)
    engine = make_engine(ScriptedPolicy(eviction=Always(BypassLRU)), 2, geometry)
    decode(engine, [0, 1])
    record = decode(engine, [1, 2, 3])
    # dense 0-2, expert 2 moves 2-7, it and the resident 1 run 7-9, expert 3 moves 9-14, runs 14-15.
    assert (record.hits, record.misses, record.end_s - record.start_s) == (1, 2, 15.0)
    assert set(engine.pools[0].resident) == {1, 3}
    # What was staged is a resident like any other once an event that fits uses it.
    decode(engine, [3])
    assert decode(engine, [4]).misses == 1
    assert set(engine.pools[0].resident) == {3, 4}
