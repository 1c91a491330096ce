"""The fewest misses that any eviction can have on demand, waves included: a lower bound."""

from __future__ import annotations

from collections.abc import Set
from itertools import pairwise

import numpy as np

from lm_eval_moecache.engine.engine import VirtualEngine
from lm_eval_moecache.engine.replay import cold_passes, enter_requests
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.event import PHASES, PREFILL
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.trace import Trace

_ABSENT = -1


def fewest_misses(
    trace: Trace,
    setting: Setting,
    *,
    cache_reset: str = "never",
    free_prefill: bool = False,
    turns_away: bool = False,
) -> tuple[int, int]:
    """Return misses that no eviction goes below on demand, and the requests they are of.

    Both count each expert of an event once; with `free_prefill` only those of other passes. Where
    every event fits the cache and the experts of a cache are equally large, Belady's rule attains
    it. Elsewhere it is the optimum of a relaxed problem, which furthest-next-use solves exactly:

    - An event larger than its cache leaves there the experts of its last wave, which follow from
      the order of need and from what was resident, and some of those executed before. The bound
      lets it leave whatever *some* set of as many residents could have led to (`_stay`).
    - A cache whose layers differ in size holds as many experts as it would of the smallest.

    With `turns_away` an expert may be executed beside the cache and never enter it: the bound of
    rules that choose whom to admit as well, which the engine's do not. Between the two lies what
    the best victims cannot get.

    Of the setting, the caches count (capacity, sizes, `warm`). Cost: O(experts) per event, in
    numpy.
    """
    future = Future(trace, free_prefill=free_prefill)
    engine = VirtualEngine(trace.geometry, setting, future)
    num_layers, num_experts = trace.geometry.num_layers, trace.geometry.num_experts
    sizes = [levels[0] for levels in engine.geometry.expert_bytes]
    caches, shared = engine.caches, len(engine.pools) == 1
    fits = [cache.capacity_bytes // size for cache, size in zip(caches, sizes, strict=True)]
    most = [caches[0].capacity_bytes // min(sizes)] * num_layers if shared else fits

    cold: Set[int] = {0}
    if cache_reset == "request":
        cold |= cold_passes(trace, enter_requests(trace, engine), frozenset())[0]
    warm = [key for pool in engine.pools for key in pool.resident]
    phases = trace.columns.phase[trace.row_bounds[:-1:num_layers]]
    free = (phases == PHASES.index(PREFILL)) & free_prefill
    due = np.full(num_layers * num_experts, _ABSENT)
    """The event that needs what is resident next."""
    views = [
        due if shared else due[at : at + num_experts] for at in range(0, len(due), num_experts)
    ]
    misses = requests = 0
    for event, (start, stop) in enumerate(pairwise(trace.key_bounds.tolist())):
        index, layer = divmod(event, num_layers)
        if layer == 0 and index in cold:
            due[:] = _ABSENT
            due[warm] = [future.rank_from(key, event) for key in warm]
        keys, needs, here = trace.keys[start:stop], future.next_use[start:stop], views[layer]
        num_hits = int(np.count_nonzero(due[keys] != _ABSENT))
        if not free[index]:
            requests += len(keys)
            misses += len(keys) - num_hits
        if len(keys) > fits[layer] and not turns_away:
            here[:] = _ABSENT
            # Where hits are for nothing, what is resident may have been chosen for the order.
            chosen = fits[layer] if free[index] else num_hits
            stay = _stay(needs, fits[layer], chosen)
            due[keys[stay]] = needs[stay]
            continue
        # Who is executed is resident meanwhile, unless it may be beside the cache.
        due[keys] = needs if turns_away else _ABSENT
        entering = 0 if turns_away else len(keys)
        excess = int(np.count_nonzero(here != _ABSENT)) + entering - most[layer]
        if excess > 0:
            here[np.argpartition(here, -excess)[-excess:]] = _ABSENT
        if not turns_away:
            due[keys] = needs
    return misses, requests


def _stay(needs: IntArray, slots: int, num_hits: int) -> IntArray:
    """Return the places (in order of need) of what had best stay of an event larger than its cache.

    What is resident is executed first, in any place, and the absent ones follow in order: the last
    wave's all stay, and the others come from the wave before. So at least as many as the last wave
    has are among so many places and `num_hits` more from the end; all are among `slots` more.
    """
    last_wave = (len(needs) - 1) % slots + 1
    tail = len(needs) - last_wave - num_hits
    by_need = np.argsort(needs, kind="stable")
    early = by_need[(by_need < tail) & (by_need >= tail - slots)][: slots - last_wave]
    found = np.concatenate([early, by_need[by_need >= tail]])
    return found[np.argsort(needs[found], kind="stable")][:slots]
