"""Conservation laws and counts of the layer step when the link is a thread in real time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.engine.wall.engine import HostCosts, WallEngine
from lm_eval_moecache.engine.wall.link import Transfer
from lm_eval_moecache.engine.wall.slots import SlottedCache
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord
from tests.engine.scripted import (
    Script,
    StillMover,
    decode,
    expect,
    experts_of,
    make_engine,
    make_geometry,
    make_setting,
    run_layer,
)
from tests.engine.test_ladder import LADDER, Wanted


class Slots(StillMover):
    """A mover that writes keys into a list of slots, sometimes late."""

    def __init__(self, num_slots: int, seed: int | None = None) -> None:
        self.slots: list[int | None] = [None] * num_slots
        self.executing: set[int] = set()
        self._random = None if seed is None else random.Random(seed)

    def begin(self, transfer: Transfer) -> object:
        assert transfer.slot not in self.executing, "a slot in use was written"
        self.slots[transfer.slot] = None
        if self._random is not None:
            time.sleep(self._random.choice((0.0, 0.0, 0.0005, 0.001)))
        self.slots[transfer.slot] = transfer.key
        return None


class Roomy(Slots):
    """Slots for any number of keys."""

    def __init__(self, num_slots: int, seed: int | None = None) -> None:
        super().__init__(99, seed)


def wall_engine(
    script: Script | None,
    capacity: object,
    seed: int | None = None,
    mover: type[Slots] = Slots,
    *,
    geometry: Geometry | None = None,
    **axes: Any,
) -> tuple[WallEngine, Any]:
    geometry = geometry or make_geometry()
    setting = make_setting(script, capacity, geometry, **axes)
    sizes = setting.capacity.bytes_by_partition
    slots = mover(max(sizes) // 100 * len(sizes), seed)
    return WallEngine(geometry, setting, slots), slots


def execute(engine: WallEngine, slots: Slots, layer: int) -> list[int]:
    """Run all waves of an event, check that each expert is in its slot, and return the order."""
    executed: list[int] = []
    for keys, _ in engine.waves():
        executed.extend(keys)
        if engine.setting.capacity.per_layer:
            continue
        places = [engine.caches[layer].slots[key] for key in keys]
        slots.executing = set(places)
        assert [slots.slots[place] for place in places] == list(keys)
        time.sleep(0)
        assert [slots.slots[place] for place in places] == list(keys)
        slots.executing = set()
    return executed


def serve(
    engine: WallEngine, slots: Slots, passes: Sequence[Sequence[Sequence[int]]], phase: str = DECODE
) -> list[PassRecord]:
    records = []
    for keys_by_layer in passes:
        engine.begin_pass(phase, 1)
        for layer, keys in enumerate(keys_by_layer):
            run_layer(engine, experts_of(engine, layer, keys), layer)
            assert sorted(execute(engine, slots, layer)) == sorted(keys)
        records.append(engine.end_pass())
        engine.check_integrity()
    return records


def events(num_layers: int, num_experts: int, top_k: int) -> Any:
    """Passes -> layers -> distinct experts, as keys."""
    layer = st.lists(st.integers(0, num_experts - 1), min_size=1, max_size=top_k, unique=True)
    pass_keys = st.tuples(*[layer] * num_layers).map(
        lambda ls: [[i * num_experts + e for e in experts] for i, experts in enumerate(ls)]
    )
    return st.lists(pass_keys, min_size=1, max_size=6)


@settings(max_examples=40)
@given(passes=events(3, 4, 4), capacity=st.sampled_from([1, 2, 4, 7, 12, "2/layer"]))
def test_without_prefetching_every_count_is_the_virtual_clocks(
    passes: list[list[list[int]]], capacity: object
) -> None:
    geometry = make_geometry(top_k=4)
    wall, slots = wall_engine(None, capacity, geometry=geometry)
    virtual = make_engine(None, capacity, geometry)
    wall_records = serve(wall, slots, passes)
    wall.close()
    for wall_record, keys in zip(wall_records, passes, strict=True):
        virtual_record = decode(virtual, *keys)
        for name in ("requests", "misses", "late", "collisions", "bytes_moved", "evictions"):
            assert getattr(wall_record, name) == getattr(virtual_record, name), name
    assert isinstance(wall.pools[0], SlottedCache)
    assert wall.pools[0].resident.keys() == virtual.pools[0].resident.keys()


@settings(max_examples=30)
@given(
    passes=events(3, 4, 3),
    script=st.dictionaries(
        st.tuples(st.integers(0, 5), st.integers(0, 2)),
        st.lists(st.integers(0, 11), max_size=5, unique=True),
    ),
    capacity=st.sampled_from([2, 3, 5, 12]),
    phase=st.sampled_from([DECODE, PREFILL]),
    seed=st.integers(0, 1000),
)
def test_laws_hold_with_prefetches_and_transfers_that_come_late(
    passes: list[list[list[int]]],
    script: dict[tuple[int, int], list[int]],
    capacity: int,
    phase: str,
    seed: int,
) -> None:
    engine, slots = wall_engine(script, capacity, seed, geometry=make_geometry(top_k=3))
    records = serve(engine, slots, passes, phase)
    assert sum(r.requests for r in records) == sum(len(k) for p in passes for k in p)
    assert all(r.hits >= 0 and r.late >= 0 and r.bytes_moved >= 0 for r in records)
    engine.restart()
    assert not engine.pools[0].resident and not engine.pools[0].arriving
    assert not engine.link.issued
    # Arrivals during the reset count towards the next pass, which checks the accounts again.
    serve(engine, slots, passes, phase)
    engine.close()


def test_a_pass_that_broke_off_does_not_harm_the_next() -> None:
    engine, slots = wall_engine(None, 2, seed=1)
    for _ in range(5):
        engine.begin_pass(DECODE, 1)
        run_layer(engine, [[0, 1]])
        serve(engine, slots, [[[2, 3], [4, 5], [8, 9]]])
    engine.close()


def test_layers_of_different_sizes_cannot_share_slots() -> None:
    uneven = make_geometry(expert_bytes=((100,), (100,), (200,)))
    with pytest.raises(ValueError, match="n/layer"):
        wall_engine(None, 4, geometry=uneven)


class Gated(Slots):
    """Moves nothing until `open` is set."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.open = threading.Event()

    def begin(self, transfer: Transfer) -> object:
        assert self.open.wait(10)
        return super().begin(transfer)


def gated_pass(
    before: Callable[[WallEngine, Gated], None] | None = None, after: bool = False, **axes: Any
) -> tuple[PassRecord, list[int]]:
    """Run a pass whose prefetch of key 4 waits at the gate, opened before or after layer 1's event.

    Return its record and the keys it executed.
    """
    engine, slots = wall_engine({(1, 0): [4]}, 12, mover=Gated, **axes)
    slots.open.set()
    serve(engine, slots, [[[0], [5], [8]]])
    slots.open.clear()
    engine.begin_pass(DECODE, 1)
    executed: list[int] = []
    for layer, keys in enumerate([[0], [4], [8]]):
        if layer == 1 and before is not None:
            before(engine, slots)
        run_layer(engine, experts_of(engine, layer, keys), layer)
        if layer == 1 and after:
            slots.open.set()
        executed += execute(engine, slots, layer)
    slots.open.set()
    record = engine.end_pass()
    engine.close()
    return record, executed


def arrive(engine: WallEngine, slots: Gated) -> None:
    slots.open.set()
    while not engine.link._worker._finished:
        time.sleep(0.001)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_prefetch_that_arrives_while_the_router_is_read_is_a_hit(in_time: bool) -> None:
    record, _ = gated_pass(arrive if in_time else None, after=True)
    hits, late = int(in_time), int(not in_time)
    expect(record, f"prefetch_hits={hits} late={late} misses=0")


@pytest.mark.parametrize("late", ["replace", "await"])
def test_a_late_expert_is_replaced_or_awaited(late: str) -> None:
    miss = partial(find_algorithm("miss", "substitute_random"), late=late)
    # Under `replace` nothing waits for the gate, which is still closed.
    record, executed = gated_pass(after=late == "await", miss=miss)
    assert executed == ([0, 5, 8] if late == "replace" else [0, 4, 8])
    assert (record.late, record.misses, record.substituted) == (1, 0, late == "replace")


@pytest.mark.parametrize(
    ("seconds", "on_host"),
    [
        ((0, 0.5, 0, 0), 2),
        ((0, 4, 0, 0), 0),
        ((4, 0, 0, 0), 0),
        ((0, 4, 0, 3), 1),
        ((0, 4, 3, 0), 1),
    ],
)
def test_the_hosts_measured_times_are_of_the_first_layer_and_others_scale(
    seconds: tuple[float, ...], on_host: int
) -> None:
    """Loading takes 2 s and, of the second layer's experts of 300 bytes, 6 s; a way half a second.

    `seconds` are host fixed and each, device fixed and each. 4 s on the host are too long in the
    first layer, and in the second 12 s; not so where the device takes 3 s more, and then 9 s.
    """
    geometry = make_geometry(2, top_k=1, expert_bytes=((100,), (300,)))
    miss = partial(find_algorithm("miss", "host"), rule="first")
    engine, slots = wall_engine(None, "1/layer", geometry=geometry, miss=miss)
    engine.set_host_costs(HostCosts(*map(float, seconds), load_s=2.0, way_s=0.5))
    (record,) = serve(engine, slots, [[[0], [4]]])
    assert (record.misses, record.host_executed) == (2, on_host)
    engine.close()


def test_what_the_link_has_to_bring_before_is_of_its_layers_size() -> None:
    """Layer 1's key 4 is on its way for 6 s: the other comes at 12, and from the host at 10."""
    geometry = make_geometry(2, expert_bytes=((100,), (300,)))
    miss = partial(find_algorithm("miss", "host"), rule="balanced")
    engine, slots = wall_engine({(1, 0): [4]}, "3/layer", mover=Gated, geometry=geometry, miss=miss)
    engine.set_host_costs(HostCosts(0.0, 3.0, 0.0, 0.0, load_s=2.0, way_s=0.5))
    slots.open.set()
    serve(engine, slots, [[[0], [6]]])
    slots.open.clear()
    engine.begin_pass(DECODE, 1)
    for layer, keys in enumerate([[0], [4, 5]]):
        run_layer(engine, experts_of(engine, layer, keys), layer)
        if layer:
            slots.open.set()
        execute(engine, slots, layer)
    assert engine.end_pass().host_executed == 1
    engine.close()


def test_an_upgrade_gives_its_old_slot_back() -> None:
    levels = {0: 1, 1: 1}
    miss = partial(Wanted, levels=levels)
    engine, slots = wall_engine(None, "150B", mover=Roomy, geometry=LADDER, miss=miss)
    for levels[0] in (1, 0):  # 100 bytes fit only into the place of the old 50
        serve(engine, slots, [[[0, 1]]])
    assert engine.pools[0].resident == {1: 1, 0: 0}
    engine.close()
