"""Host compute against timelines worked by hand, on the machine of `scripted.py`.

The dense part of a layer takes 2 s, an expert 1 s on the device and 5 s over the link: 1 s of
latency, which is all that activations cost here, and 4 s for its bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lm_eval_moecache.algorithms.miss.lossless import BoundedInsertion, Host
from lm_eval_moecache.engine.engine import Engine as VirtualEngine
from lm_eval_moecache.records.hardware import load_hardware
from tests.engine.scripted import (
    decode,
    fill,
    make_engine,
    make_geometry,
    make_hardware,
)

CACHED, ABSENT = [0, 1], [2, 3]


def machine(
    rule: str, host_s: float, ahead: tuple[int, ...] = (), hidden: int = 0
) -> VirtualEngine:
    """An engine that holds experts 0 and 1 of layer 0, whose second pass prefetches `ahead`."""
    engine = make_engine(
        {(0, 0): CACHED, (1, 0): ahead},
        geometry=make_geometry(top_k=4, hidden_size=hidden),
        hardware=make_hardware(host_flops=1e30, host_memory_bytes_per_s=100 / host_s),
        miss=partial(Host, rule=rule),
    )
    decode(engine, [2], [4], [8])
    fill(engine, CACHED)
    assert sorted(engine.pools[0].resident) == CACHED
    return engine


@pytest.mark.parametrize(
    ("given", "figures"),
    [
        # dense 0-2; activations out 2-3; host 3-13, the two cached run 2-4; back 13-14.
        (("always", 5.0), "duration_s=14 host_s=10 host_wait_s=10 host_executed=2"),
        (("always", 5.0), "duration_s=14 hits=2 misses=2 stall_s=0 bytes_moved=0"),
        # Out, host and back are 1 + 5 + 1 = 7 against 5 + 1 = 6: both load, 2-7, 7-12; run 12-14.
        (("first", 5.0), "duration_s=14 host_executed=0 stall_s=8"),
        # 1 + 2 + 1 = 4 against 6: out 2-3, host 3-7, back 7-8.
        (("first", 2.0), "duration_s=8 host_executed=2 host_wait_s=4"),
        # Over the link the first would end at 2 + 5 + 1 = 8, on the host at 2 + 1 + 5 + 1 = 9: the
        # link takes it. The other would end at 13 over the link: the host takes it.
        # out 2-3, load 3-8, host 3-8, the two cached 2-4; the loaded one runs 8-9, back 8-9.
        (("balanced", 5.0), "duration_s=9 host_executed=1 host_s=5 stall_s=4"),
        # out 2-3; prefetches 3-8 and 8-13; the host ends at 13: back 13-14, as without them.
        (("always", 5.0, (4, 5)), "duration_s=14 host_wait_s=10 bytes_moved=200"),
        # As without prefetches: out 2-3, host 3-7. The first prefetch moves 3-8, and the outputs,
        # ready at 7, follow it: back 8-9. The second prefetch moves from 9.
        (("first", 2.0, (4, 5)), "duration_s=9 host_wait_s=5 bytes_moved=100"),
        # The demands have the link 2-12, the prefetch from 12; the two cached run 2-4, the two
        # loaded 12-14.
        (("first", 5.0, (4,)), "duration_s=14 host_executed=0 stall_s=8"),
        # The host ends at 12, while the second prefetch moves until 13: back 13-14.
        (("always", 4.5, (4, 5)), "duration_s=14 host_s=9"),
        # Outputs go before a prefetch that could start at the same instant: load 3-8, host 3-8,
        # back 8-9; the prefetch starts after the pass, and is not among its bytes.
        (("balanced", 5.0, (4,)), "duration_s=9 bytes_moved=100"),
        # Activations take the link both ways: 25 numbers of 2 bytes are 1 + 2 s. out 2-5, host
        # 5-15, back 15-18.
        (("always", 5.0, (), 25), "duration_s=18 bytes_moved=100"),
    ],
)
def test_an_event_of_two_absent_experts(given: tuple[Any, ...], figures: str) -> None:
    engine = machine(*given)
    decode(engine, [*CACHED, *ABSENT], says=figures)
    if given[0] == "always":
        # Experts computed on the host do not become resident.
        assert set(engine.pools[0].resident) == {*CACHED, *(given[2] if given[2:] else ())}


def test_bounded_insertion_uploads_one_miss_and_waits_for_it_where_it_is_needed() -> None:
    hardware = make_hardware(host_flops=1e30, host_memory_bytes_per_s=20)
    geometry = make_geometry(num_layers=1, top_k=4)
    engine = make_engine(None, 4, geometry, hardware, miss=partial(BoundedInsertion, uploads=1))
    fill(engine, CACHED[::-1])
    # 14 s, as with `always`; then expert 2 moves 14-19 without a stall.
    figures = "duration_s=14 host_executed=2 stall_s=0 bytes_moved=100"
    decode(engine, [*CACHED, *ABSENT], says=figures)
    assert sorted(engine.pools[0].resident) == [0, 1, 2]
    # dense 14-16; expert 2 arrives at 19, the three run 19-22.
    decode(engine, [0, 1, 2], says="duration_s=8 stall_s=3 host_executed=0 hits=3 misses=0")


def test_a_timeline_of_a_real_machine_to_the_nanosecond() -> None:
    """Mixtral's experts on an RTX 4090: 352,321,536 bytes, 2 absent, top-4 of 8 experts."""
    size, dense, hidden = 352_321_536, 100_000_000, 4096
    sizes = {"expert_bytes": ((size,),), "dense_bytes": (dense,), "hidden_size": hidden}
    geometry = make_geometry(num_layers=1, num_experts=8, top_k=4, **sizes)
    hardware = load_hardware("rtx-4090")
    engine = make_engine(None, 8, geometry, hardware, miss=partial(Host, rule="balanced"))
    fill(engine, CACHED)
    # No expert moves, but activations do, both ways.
    decode(engine, [*CACHED, *ABSENT], says=f"host_executed=2 bytes_moved={4 * hidden}")
    # Bytes over bytes/s: for one token, reading weights is the bottleneck on device and host.
    dense_s = dense / 1.008e12 + 30 * 5e-6
    load_s = 10e-6 + size / 32e9
    host_s = size / 307.2e9
    way_s = 10e-6 + hidden * 2 / 32e9
    # The link would end its first expert at load_s, the host both well before that.
    assert way_s + 2 * host_s + way_s < load_s
    cached_s = 2 * size / 1.008e12 + 15 * 5e-6
    expected_s = dense_s + max(way_s + 2 * host_s + way_s, cached_s)
    assert round(engine.now * 1e9) == round(expected_s * 1e9)


def test_a_profile_without_a_host_is_refused() -> None:
    with pytest.raises(ValueError, match="has no host_flops and host_memory_bytes_per_s"):
        make_engine(miss=Host)
