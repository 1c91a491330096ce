"""Host compute against timelines worked by hand, on the machine of `scripted.py`.

The dense part of a layer takes 2 s, an expert 1 s on the device and 5 s over the link: 1 s of
latency, which is all that activations cost here, and 4 s for its bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.miss.bounded_insertion import BoundedInsertion
from lm_eval_moecache.algorithms.miss.host import Host
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.host import RULES, Work, share_out
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.ledger import PassRecord
from tests.engine.scripted import (
    Always,
    FixedPrefetch,
    ScriptedPolicy,
    decode,
    make_engine,
    make_geometry,
    make_hardware,
)

CACHED, ABSENT = [0, 1], [2, 3]


def machine(
    rule: str, host_s: float, ahead: tuple[int, ...] = (), hidden: int = 0
) -> VirtualEngine:
    """An engine that holds experts 0 and 1 of layer 0, whose second pass prefetches `ahead`."""
    script = {(0, 0): CACHED, (1, 0): ahead}
    policy = ScriptedPolicy(
        prefetch=Always(lambda geometry: FixedPrefetch(geometry, script)),
        miss=Always(lambda geometry: Host(geometry, rule=rule)),  # type: ignore[arg-type]
    )
    hardware = make_hardware(host_flops=1e30, host_memory_bytes_per_s=100 / host_s)
    geometry = make_geometry(top_k=4, hidden_size=hidden)
    engine = make_engine(policy, hardware=hardware, geometry=geometry)
    decode(engine, [2], [4], [8])
    core.reset(engine.state, CACHED)
    assert sorted(engine.pools[0].resident) == CACHED
    return engine


def second_pass(engine: VirtualEngine) -> tuple[float, PassRecord]:
    record = decode(engine, [*CACHED, *ABSENT])
    return record.end_s - record.start_s, record


@pytest.mark.parametrize(
    ("given", "seconds", "figures"),
    [
        # dense 0-2; activations out 2-3; host 3-13, the two cached run 2-4; back 13-14.
        (("always", 5.0), 14.0, {"host_s": 10.0, "host_wait_s": 10.0, "host_executed": 2}),
        (("always", 5.0), 14.0, {"hits": 2, "misses": 2, "stall_s": 0.0, "bytes_moved": 0}),
        # Out, host and back are 1 + 5 + 1 = 7 against 5 + 1 = 6: both load, 2-7, 7-12; run 12-14.
        (("first", 5.0), 14.0, {"host_executed": 0, "stall_s": 8.0}),
        # 1 + 2 + 1 = 4 against 6: out 2-3, host 3-7, back 7-8.
        (("first", 2.0), 8.0, {"host_executed": 2, "host_wait_s": 4.0}),
        # Over the link the first would end at 2 + 5 + 1 = 8, on the host at 2 + 1 + 5 + 1 = 9: the
        # link takes it. The other would end at 13 over the link: the host takes it.
        # out 2-3, load 3-8, host 3-8, the two cached 2-4; the loaded one runs 8-9, back 8-9.
        (("balanced", 5.0), 9.0, {"host_executed": 1, "host_s": 5.0, "stall_s": 4.0}),
        # out 2-3; prefetches 3-8 and 8-13; the host ends at 13: back 13-14, as without them.
        (("always", 5.0, (4, 5)), 14.0, {"host_wait_s": 10.0, "bytes_moved": 200}),
        # As without prefetches: out 2-3, host 3-7. The first prefetch moves 3-8, and the outputs,
        # ready at 7, follow it: back 8-9. The second prefetch moves from 9.
        (("first", 2.0, (4, 5)), 9.0, {"host_wait_s": 5.0, "bytes_moved": 100}),
        # The demands have the link 2-12, the prefetch from 12; the two cached run 2-4, the two
        # loaded 12-14.
        (("first", 5.0, (4,)), 14.0, {"host_executed": 0, "stall_s": 8.0}),
        # The host ends at 12, while the second prefetch moves until 13: back 13-14.
        (("always", 4.5, (4, 5)), 14.0, {"host_s": 9.0}),
        # Outputs go before a prefetch that could start at the same instant: load 3-8, host 3-8,
        # back 8-9; the prefetch starts after the pass, and is not among its bytes.
        (("balanced", 5.0, (4,)), 9.0, {"bytes_moved": 100}),
        # Activations take the link both ways: 25 numbers of 2 bytes are 1 + 2 s. out 2-5, host
        # 5-15, back 15-18.
        (("always", 5.0, (), 25), 18.0, {"bytes_moved": 100}),
    ],
)
def test_an_event_of_two_absent_experts(
    given: tuple[Any, ...], seconds: float, figures: dict[str, float]
) -> None:
    engine = machine(*given)
    took_s, record = second_pass(engine)
    assert took_s == seconds
    assert {name: getattr(record, name) for name in figures} == figures
    ahead = set(given[2]) if len(given) > 2 else set()
    if given[0] == "always":
        # Experts computed on the host do not become resident.
        assert set(engine.pools[0].resident) == {*CACHED, *ahead}


def test_bounded_insertion_uploads_one_miss_and_waits_for_it_where_it_is_needed() -> None:
    policy = ScriptedPolicy(miss=Always(lambda geometry: BoundedInsertion(geometry, uploads=1)))
    hardware = make_hardware(host_flops=1e30, host_memory_bytes_per_s=20)
    engine = make_engine(policy, 4, make_geometry(num_layers=1, top_k=4), hardware)
    core.fill(engine.state, CACHED[::-1])
    seconds, record = second_pass(engine)
    # 14 s, as with `always`; then expert 2 moves 14-19 without a stall.
    assert (seconds, record.host_executed, record.stall_s) == (14.0, 2, 0.0)
    assert (record.bytes_moved, sorted(engine.pools[0].resident)) == (100, [0, 1, 2])
    repeat = decode(engine, [0, 1, 2])
    # dense 14-16; expert 2 arrives at 19, the three run 19-22.
    assert (repeat.end_s - repeat.start_s, repeat.stall_s, repeat.host_executed) == (8.0, 3.0, 0)
    assert (repeat.hits, repeat.misses) == (3, 0)


def test_a_timeline_of_a_real_machine_to_the_nanosecond() -> None:
    """Mixtral's experts on an RTX 4090: 352,321,536 bytes, 2 absent, top-4 of 8 experts."""
    size, dense, hidden = 352_321_536, 100_000_000, 4096
    hardware = load_hardware("rtx-4090")
    policy = ScriptedPolicy(miss=Always(lambda geometry: Host(geometry, rule="balanced")))
    sizes = {"expert_bytes": ((size,),), "dense_bytes": (dense,), "hidden_size": hidden}
    geometry = make_geometry(num_layers=1, num_experts=8, top_k=4, **sizes)
    engine = make_engine(policy, 8, geometry, hardware)
    core.fill(engine.state, CACHED)
    record = engine.begin_pass(DECODE, 1)
    engine.enter(0, 1)
    engine.run(Event(0, 0, DECODE, 1, [*CACHED, *ABSENT]))
    # Bytes over bytes/s: for one token, reading weights is the bottleneck on device and host.
    dense_s = dense / 1.008e12 + 30 * 5e-6
    load_s = 10e-6 + size / 32e9
    host_s = size / 307.2e9
    way_s = 10e-6 + hidden * 2 / 32e9
    # The link would end its first expert at load_s, the host both well before that.
    assert way_s + 2 * host_s + way_s < load_s
    cached_s = 2 * size / 1.008e12 + 15 * 5e-6
    expected_s = dense_s + max(way_s + 2 * host_s + way_s, cached_s)
    assert record.host_executed == 2 and record.bytes_moved == 0
    assert round(engine.clock.now * 1e9) == round(expected_s * 1e9)


def test_an_expert_of_many_tokens_is_read_once_and_multiplied_often() -> None:
    engine = machine("balanced", 5.0)
    waves: list[list[int]] = []
    engine.watch_waves(lambda keys: waves.append(sorted(keys)))
    record = engine.begin_pass(DECODE, 3)
    engine.enter(0, 3)
    experts = np.array([[2, 3, 0, 1]] * 3)
    engine.run(Event(record.index, 0, DECODE, 3, [2, 3, 0, 1], experts=experts))
    engine.end_pass()
    # The host reads the weights once: 5 s, as for one token.
    assert (record.host_s, record.host_executed) == (5.0, 3)
    assert sorted(key for keys in waves for key in keys) == [0, 1, 2, 3]


def test_only_loaded_experts_cost_the_compute_their_bookkeeping() -> None:
    """At 0.01 s a byte an expert's 100 bytes cost 1 s; what the host computes is never loaded."""

    def end_s(miss: Any, script: Any, **figures: float) -> float:
        policy = ScriptedPolicy(
            prefetch=Always(lambda geometry: FixedPrefetch(geometry, script)), miss=Always(miss)
        )
        host = {"host_flops": 1e30, "host_memory_bytes_per_s": 20.0}
        hardware = make_hardware(**host, **figures)
        engine = make_engine(policy, 12, make_geometry(top_k=4), hardware)
        return decode(engine, [0], [4, 5, 6], [8]).end_s

    def on_host(geometry: Geometry) -> Host:
        return Host(geometry, rule="always")

    fetch = find_algorithm("miss", "fetch")
    cost = {"load_overhead_s_per_byte": 0.01}
    assert end_s(on_host, {}, **cost) == end_s(on_host, {})
    assert end_s(fetch, {}, **cost) == end_s(fetch, {}) + 5
    # Dense 0-2, bookkeeping 2-3, transfer 3-8, expert 8-9, dense 9-11; the prefetch of key 8 moves
    # 8-13; bookkeeping of four experts 11-15, transfers 15-30, experts 30-33, dense 33-35, key 8.
    assert end_s(fetch, {(0, 0): [8]}, **cost) == 36


def test_a_profile_without_a_host_is_refused() -> None:
    policy = ScriptedPolicy(miss=Always(lambda geometry: Host(geometry)))
    with pytest.raises(ValueError, match="has no host_flops and host_memory_bytes_per_s"):
        make_engine(policy, hardware=make_hardware())


WORKS = st.lists(
    st.tuples(st.floats(0.1, 9), st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=7
)


@given(WORKS, st.floats(0, 3), st.floats(0, 3), st.floats(0, 2))
def test_the_rules_agree_with_what_they_say(
    times: list[tuple[float, float, float]], link_free: float, host_free: float, way: float
) -> None:
    works = [
        Work(key=key, load_s=load, device_s=device, host_s=host)
        for key, (load, device, host) in enumerate(times)
    ]
    given = {"now": 1.0, "link_free": link_free, "host_free": host_free}
    given |= {"out_s": way, "back_s": way}
    on_host = {rule: share_out(rule, works, **given) for rule in RULES}
    keys = {work.key for work in works}
    assert on_host["always"] == keys
    for work in works:
        ends_sooner = 2 * way + work.host_s < work.load_s + work.device_s
        assert (work.key in on_host["first"]) == ends_sooner
    # The host has the cheap end of the queue, the link the rest.
    order = [work.key for work in sorted(works, key=lambda work: (work.host_s, work.key))]
    assert set(order[: len(on_host["balanced"])]) == on_host["balanced"]
    slow = [work._replace(host_s=1e9) for work in works]
    assert share_out("balanced", slow, **given) == set()
    stuck = [work._replace(load_s=1e9) for work in works]
    assert share_out("balanced", stuck, **given) == keys
