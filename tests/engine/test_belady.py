"""Belady against the exhaustive optimum, and the law that nobody misses less on demand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.records.event import PHASES, PREFILL
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.columns import Columns
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace, build_trace

from . import traces


def decode_trace(experts: np.ndarray, num_experts: int) -> Trace:
    """Make a trace of equally large experts from ids [passes, layers, top_k]."""
    num_passes, num_layers, top_k = experts.shape
    passes = np.repeat(np.arange(num_passes, dtype=np.int32), num_layers)
    return build_trace(
        "generated",
        Geometry(
            model="generated",
            num_layers=num_layers,
            num_experts=num_experts,
            top_k=top_k,
            expert_bytes=((1,),) * num_layers,
            dense_bytes=(0,) * num_layers,
        ),
        Columns(
            request=np.zeros_like(passes),
            pass_index=passes,
            phase=np.full_like(passes, PHASES.index("decode")),
            token=passes,
            layer=np.tile(np.arange(num_layers, dtype=np.int32), num_passes),
            experts=experts.reshape(-1, top_k).astype(np.int32),
        ),
    )


def misses(
    trace: Trace,
    eviction: str,
    capacity: int,
    seed: int = 0,
    parameters: Mapping[str, object] | None = None,
) -> int:
    axes = {"eviction": eviction, **(parameters or {})}
    engine = replay(
        trace, traces.setting_for(trace, capacity, axes, seed=seed), future=Future(trace)
    )
    engine.check_integrity()
    return sum(record.misses for record in engine.ledger.passes)


def fewest_misses(trace: Trace, capacity: int, counted: Sequence[bool] = ()) -> int:
    """Try every choice of victims; the experts of an event stay until it is over.

    `counted` says which events' misses count; all of them unless given.
    """
    bounds = trace.key_bounds
    needs = [frozenset(trace.keys[a:b].tolist()) for a, b in pairwise(bounds)]

    @cache
    def best(event: int, held: frozenset[int]) -> int:
        if event == len(needs):
            return 0
        missing = needs[event] - held
        others = held - needs[event]
        room = capacity - len(needs[event])
        kept = [frozenset(c) for c in combinations(sorted(others), min(room, len(others)))]
        cost = len(missing) if not counted or counted[event] else 0
        return cost + min(best(event + 1, needs[event] | k) for k in kept)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_belady_misses_as_little_as_any_choice_of_victims(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, top_k = (1, 1) if seed % 2 else (2, 2)
    drawn = rng.random((7, layers, 4)).argsort(-1)[..., :top_k]
    trace = decode_trace(drawn, 4)
    for capacity in range(top_k, 5):
        assert misses(trace, "belady", capacity) == fewest_misses(trace, capacity)


def phased_trace(experts: np.ndarray, num_experts: int, phases: Sequence[str]) -> Trace:
    """As `decode_trace`, with a phase for each pass."""
    num_layers = experts.shape[1]
    plain = decode_trace(experts, num_experts)
    each = np.repeat(np.asarray([PHASES.index(p) for p in phases], np.int32), num_layers)
    return build_trace("generated", plain.geometry, dataclasses.replace(plain.columns, phase=each))


def decode_misses(trace: Trace, eviction: str, capacity: int, *, free_prefill: bool = False) -> int:
    setting = traces.setting_for(trace, capacity, {"eviction": eviction})
    engine = replay(trace, setting, future=Future(trace, free_prefill=free_prefill))
    return sum(p.misses for p in engine.ledger.passes if p.phase != PREFILL)


@pytest.mark.parametrize("seed", range(30))
def test_with_prefill_for_free_belady_has_the_fewest_decode_misses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, top_k = (1, 1) if seed % 2 else (2, 2)
    drawn = rng.random((8, layers, 4)).argsort(-1)[..., :top_k]
    phases = ["prefill" if step % 4 == 0 else "decode" for step in range(8)]
    trace = phased_trace(drawn, 4, phases)
    counted = [phase != "prefill" for phase in phases for _ in range(layers)]
    for capacity in range(top_k, 5):
        fewest = decode_misses(trace, "belady", capacity, free_prefill=True)
        assert fewest == fewest_misses(trace, capacity, counted)
        for other in ("belady", "lru", "fifo"):
            assert fewest <= decode_misses(trace, other, capacity)


def test_the_usual_belady_is_no_bound_on_decode_misses() -> None:
    """Why there are two: it keeps what the next prefill needs, and decoding pays."""
    drawn = np.asarray([[[0]], [[1]], [[2]], [[0]], [[1]]])
    trace = phased_trace(drawn, 3, ["prefill", "decode", "decode", "prefill", "decode"])
    assert decode_misses(trace, "belady", 2) == 3
    assert decode_misses(trace, "belady", 2, free_prefill=True) == 2


def test_belady_evicts_the_expert_needed_last_and_then_the_smaller_key() -> None:
    # 3 comes back first, then 1; 0 and 2 never do, so 0 leaves before 2.
    trace = decode_trace(np.asarray([[[0]], [[2]], [[3]], [[1]], [[4]], [[3]], [[1]]]), 5)
    assert misses(trace, "belady", 4) == 5
    assert misses(trace, "lru", 4) == 5
    assert misses(trace, "belady", 2) == 6
    assert misses(trace, "lru", 2) == 7


def test_the_future_lists_each_need_of_each_key() -> None:
    future = Future(decode_trace(np.asarray([[[0, 1]], [[2, 0]], [[1, 0]]]), 3))
    needs = [future.times[future.start[k] : future.start[k + 1]].tolist() for k in range(3)]
    assert needs == [[0, 1, 2, 3], [0, 2, 3], [1, 3]]
    assert future.keys_of(1) == [2, 0] and future.keys_of(3) == []
