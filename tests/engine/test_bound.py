"""Belady and the miss bound against exhaustive search, and every eviction against the bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.engine.bound import fewest_misses
from lm_eval_moecache.records.event import PHASES, PREFILL
from lm_eval_moecache.sweep.replay_grid import victim_share
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import UseProfile

from . import traces
from .traces import decode_trace, draw_trace, misses, setting_for

EXPERTS = 5


def mixed_trace(seed: int, passes: int = 5, sizes: Sequence[int] = (1, 1), top_k: int = 1) -> Trace:
    return draw_trace(seed, sizes, EXPERTS, top_k, passes)


def what_waves_leave(
    needs: tuple[int, ...], held: frozenset[int], slots: int
) -> Iterator[frozenset[int]]:
    """Every set of keys that an event may leave in a cache of `slots`, by the engine's rules."""
    needed = frozenset(needs)
    if len(needed) <= slots:
        others = sorted(held - needed)
        for survivors in combinations(others, min(slots - len(needed), len(others))):
            yield needed | frozenset(survivors)
        return
    order = [key for key in needs if key in held] + [key for key in needs if key not in held]
    start = (len(order) - 1) // slots * slots
    for survivors in combinations(order[start - slots : start], slots - len(order[start:])):
        yield frozenset(order[start:]) | frozenset(survivors)


def what_refusing_leaves(
    needs: tuple[int, ...], held: frozenset[int], slots: int
) -> Iterator[frozenset[int]]:
    """Every set of resident and requested keys: any of them may be turned away."""
    candidates = sorted(held.union(needs))
    yield from map(frozenset, combinations(candidates, min(slots, len(candidates))))


def fewest_by_search(
    trace: Trace,
    slots: int,
    layers: Sequence[int] = (0, 1),
    decode: bool = False,
    leave: object = what_waves_leave,
) -> int:
    """Try every choice of victims in the cache that `layers` share."""
    num_layers, phases = trace.geometry.num_layers, trace.columns.phase[trace.row_bounds[:-1]]
    events = [
        (tuple(trace.keys[a:b].tolist()), not decode or PHASES[phases[event]] != PREFILL)
        for event, (a, b) in enumerate(pairwise(trace.key_bounds))
        if event % num_layers in layers
    ]

    @cache
    def best(event: int, held: frozenset[int]) -> int:
        if event == len(events):
            return 0
        needs, counts = events[event]
        cost = len(set(needs) - held) if counts else 0
        return cost + min(best(event + 1, contents) for contents in leave(needs, held, slots))

    return best(0, frozenset())


@pytest.mark.parametrize("decode", [False, True], ids=["all", "decode"])
@pytest.mark.parametrize("seed", range(16))
def test_the_bound_is_below_the_exhaustive_optimum_and_is_it_where_events_fit(
    seed: int, decode: bool
) -> None:
    """Belady is that optimum there too, with prefill misses free where only decoding counts."""
    trace = mixed_trace(seed, top_k=1 + seed % 2)
    largest = int(np.diff(trace.key_bounds).max())
    for slots in (2, 3, 4, 6):
        for form, shares in ((f"{slots}experts", [(0, 1)]), (f"{slots}/layer", [(0,), (1,)])):
            if slots > EXPERTS and len(shares) > 1:
                continue
            optimum = sum(fewest_by_search(trace, slots, layers, decode) for layers in shares)
            bound, requests = fewest_misses(
                trace, setting_for(trace, form), cache_reset="never", free_prefill=decode
            )
            rule = misses(trace, "belady", form, decode=decode, free_prefill=decode)
            assert bound <= optimum <= rule <= requests
            if largest <= slots:
                assert bound == optimum == rule


@pytest.mark.parametrize("seed", range(6))
def test_bypassing_is_the_optimum_of_a_cache_that_may_refuse(seed: int) -> None:
    trace = mixed_trace(seed, top_k=1 + seed % 2)
    for slots in (2, 3, 5):
        run = setting_for(trace, slots)
        bound, requests = fewest_misses(trace, run, cache_reset="never", allow_bypass=True)
        assert bound == fewest_by_search(trace, slots, leave=what_refusing_leaves)
        assert bound <= fewest_misses(trace, run, cache_reset="never")[0]
        assert requests == len(trace.keys)


def test_who_is_needed_once_is_turned_away_by_hand() -> None:
    """Two slots, a b c a b d a b e: admitting c, d or e evicts a or b; turning it away is free."""
    trace = decode_trace([[[expert]] for expert in (0, 1, 2, 0, 1, 3, 0, 1, 4)], EXPERTS)
    run = setting_for(trace, "2experts")
    # a b, c for b, b for c, d for b, b for d, and e: seven. Turned away, a b c d e: five.
    assert fewest_misses(trace, run, cache_reset="never") == (7, 9)
    assert fewest_misses(trace, run, cache_reset="never", allow_bypass=True) == (5, 9)
    lru = misses(trace, "lru", 2)
    assert lru == 9 and victim_share(lru, 7, 5) == 0.5
    assert victim_share(7, 7, 5) is None and victim_share(6, 7, 5) is None


def test_what_waves_can_leave_is_what_the_engine_does() -> None:
    """The best of many random evictions reaches the search's optimum and never beats it."""
    trace = mixed_trace(3, passes=3)
    for slots in (2, 3):
        random_misses = [misses(trace, "random", slots, seed=seed) for seed in range(60)]
        assert min(random_misses) == fewest_by_search(trace, slots)


def test_the_usual_belady_is_no_bound_on_decode_misses() -> None:
    """Hence the second form: this one keeps the next prefill's experts, and decoding pays."""
    phases = ["prefill", "decode", "decode", "prefill", "decode"]
    trace = decode_trace([[[0]], [[1]], [[2]], [[0]], [[1]]], 3, phases)
    assert misses(trace, "belady", 2, decode=True) == 3
    assert misses(trace, "belady", 2, decode=True, free_prefill=True) == 2


FORMS = ("1/layer", "2/layer", "4/layer", "3experts", "5experts", "30%", "70%", "7B")


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.sampled_from([(1, 1), (1, 1, 1), (1, 2), (3, 1, 2)]),
    top_k=st.integers(1, 3),
    form=st.sampled_from(FORMS),
    warm=st.booleans(),
    cache_reset=st.sampled_from(["never", "request"]),
)
def test_no_eviction_misses_less_than_the_bound(
    seed: int, sizes: tuple[int, ...], top_k: int, form: str, warm: bool, cache_reset: str
) -> None:
    trace = mixed_trace(seed, 10, sizes, top_k)
    counts = np.random.default_rng(seed).integers(0, 9, (len(sizes), EXPERTS)).tolist()
    profile = UseProfile(model="", counts=tuple(map(tuple, counts))) if warm else None
    try:
        lru = setting_for(trace, form, warm=profile)
    except ValueError:
        return  # too small for one token
    for decode in (False, True):
        bound, _ = fewest_misses(trace, lru, cache_reset=cache_reset, free_prefill=decode)
        for name in traces.ON_DEMAND_EVICTIONS:
            if "/layer" in form and find_algorithm("eviction", name).compares_layers:
                continue
            options = {"decode": decode, "free_prefill": decode, "cache_reset": cache_reset}
            assert bound <= misses(trace, name, form, warm=profile, **options), name


def test_after_a_reset_warm_experts_are_ranked_from_there_on() -> None:
    """Two slots, warmed with 0 and 1 for each request: 0 leaves for 2, as 1 is needed again."""
    geometry = traces.geometry_of((1,), 3, 1)
    chosen = [0, 2, 2, 1, 2, 1]
    rows = [(int(p > 1), p, int(p not in (0, 2)), p if p < 2 else p - 2, 0) for p in range(6)]
    trace = traces.from_rows(geometry, rows, [[expert] for expert in chosen])
    warm = UseProfile(model="", counts=((2, 1, 0),))
    run = setting_for(trace, "2experts", warm=warm)
    # Ranked from the first event on, 0 would be the one that is needed next.
    assert fewest_misses(trace, run, cache_reset="request") == (2, 6)
    assert misses(trace, "belady", "2experts", warm=warm, cache_reset="request") == 2
