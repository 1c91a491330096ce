"""A lower bound on the misses of any eviction algorithm under on-demand loading, waves included."""

from __future__ import annotations

from collections.abc import Set
from itertools import pairwise

import numpy as np

from lm_eval_moecache.engine.engine import Engine as VirtualEngine
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
    cache_reset: str = "request",
    free_prefill: bool = False,
    allow_bypass: bool = False,
) -> tuple[int, int]:
    """Return a lower bound on the misses of any eviction on demand, and the number of requests.

    Both count each expert of an event once, and with `free_prefill` leave out prefill passes. Where
    every event fits the cache and all experts of a cache have one size, Belady's rule attains the
    bound. Elsewhere it is the optimum of a relaxed problem, which furthest-next-use solves exactly:

    - An event larger than its cache leaves behind the experts of its last wave, which follow from
      the order of need and from the residents before it, and some of those executed earlier. The
      bound admits whatever *some* set of as many residents could have led to (`_stay`).
    - A cache whose layers differ in expert size is taken to hold only experts of the smallest.

    With `allow_bypass` an expert may be executed without ever entering the cache: the bound for
    rules that also choose which experts to admit, as the engine's do not. The gap between the two
    bounds is out of reach for eviction alone, however well it chooses its victims.

    Only the caches of the setting matter (capacity, sizes, `warm`). Cost: O(experts) per event, in
    numpy.
    """
    future = Future(trace, free_prefill=free_prefill)
    engine = VirtualEngine(trace.geometry, setting, future)
    num_layers, num_experts = trace.geometry.num_layers, trace.geometry.num_experts
    sizes = [levels[0] for levels in engine.geometry.expert_bytes]
    caches, shared = engine.caches, len(engine.pools) == 1
    num_slots = [cache.capacity_bytes // size for cache, size in zip(caches, sizes, strict=True)]
    slot_limits = [caches[0].capacity_bytes // min(sizes)] * num_layers if shared else num_slots

    cold: Set[int] = {0}
    if cache_reset == "request":
        cold |= cold_passes(trace, enter_requests(trace, engine), frozenset())[0]
    warm = [key for pool in engine.pools for key in pool.resident]
    phases = trace.columns.phase[trace.row_bounds[:-1:num_layers]]
    free = (phases == PHASES.index(PREFILL)) & free_prefill
    due = np.full(num_layers * num_experts, _ABSENT)
    """Key -> the next event that needs it while it is resident, else `_ABSENT`."""
    views = [
        due if shared else due[at : at + num_experts] for at in range(0, len(due), num_experts)
    ]
    misses = requests = 0
    for event, (start, stop) in enumerate(pairwise(trace.key_bounds.tolist())):
        index, layer = divmod(event, num_layers)
        if layer == 0 and index in cold:
            due[:] = _ABSENT
            due[warm] = [future.rank_from(key, event) for key in warm]
        keys, needs, layer_due = trace.keys[start:stop], future.next_use[start:stop], views[layer]
        num_hits = int(np.count_nonzero(due[keys] != _ABSENT))
        if not free[index]:
            requests += len(keys)
            misses += len(keys) - num_hits
        if len(keys) > num_slots[layer] and not allow_bypass:
            layer_due[:] = _ABSENT
            # Where hits count for nothing, residents may have been chosen for the order they force.
            num_residents = num_slots[layer] if free[index] else num_hits
            stay = _stay(needs, num_slots[layer], num_residents)
            due[keys[stay]] = needs[stay]
            continue
        # Executed experts are resident meanwhile, unless they may bypass the cache.
        due[keys] = needs if allow_bypass else _ABSENT
        entering = 0 if allow_bypass else len(keys)
        excess = int(np.count_nonzero(layer_due != _ABSENT)) + entering - slot_limits[layer]
        if excess > 0:
            layer_due[np.argpartition(layer_due, -excess)[-excess:]] = _ABSENT
        if not allow_bypass:
            due[keys] = needs
    return misses, requests


def _stay(needs: IntArray, slots: int, num_hits: int) -> IntArray:
    """Return which experts (by place in order of need) an oversized event had best leave resident.

    Residents, in any place, are executed first; absent experts follow in order. All of the last
    wave stay, and the rest come from the wave before. So at least as many as the last wave has lie
    among the last (size of that wave + `num_hits`) places, and all of them within `slots` more.
    """
    last_wave = (len(needs) - 1) % slots + 1
    tail = len(needs) - last_wave - num_hits
    by_need = np.argsort(needs, kind="stable")
    early = by_need[(by_need < tail) & (by_need >= tail - slots)][: slots - last_wave]
    candidates = np.concatenate([early, by_need[by_need >= tail]])
    return candidates[np.argsort(needs[candidates], kind="stable")][:slots]
