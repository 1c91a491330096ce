"""Host compute on a real machine by hand; `test_oracle.py` compares its rules."""

from __future__ import annotations

import pytest

from lm_eval_moecache.algorithms.miss.host import Host
from lm_eval_moecache.engine import core
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.hardware import load_hardware
from tests.engine.scripted import (
    Always,
    ScriptedPolicy,
    make_engine,
    make_geometry,
    make_hardware,
)

CACHED, ABSENT = [0, 1], [2, 3]


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


def test_a_profile_without_a_host_is_refused() -> None:
    policy = ScriptedPolicy(miss=Always(lambda geometry: Host(geometry)))
    with pytest.raises(ValueError, match="has no host_flops and host_memory_bytes_per_s"):
        make_engine(policy, hardware=make_hardware())
