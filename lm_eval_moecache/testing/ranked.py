"""Ranked evictions by themselves: the kernel's features of experts, one call at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import RankedEviction
from lm_eval_moecache.engine.kernel import ranking, state
from lm_eval_moecache.engine.memory import Memory, make_tables, rank_by
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.memory import address_of, make_record


class Played:
    """A ranked eviction with one cache for all layers, called as one with a state of its own is."""

    def __init__(self, rule: RankedEviction) -> None:
        self.rule, self.geometry = rule, rule.geometry
        self._future: Any = None
        self._made: Memory | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def prepare(self, future: Any) -> None:
        self._future = future

    @property
    def _memory(self) -> Memory:
        if self._made is None:
            geometry = self.geometry
            given = {"num_layers": geometry.num_layers, "num_experts": geometry.num_experts}
            run = make_record(state.Run, **given, top_k=geometry.top_k, num_levels=1)
            rank_by(run, self.rule)
            self._made = Memory(run, make_tables(run, 1))
            self._made.layers["slots"] = self.num_slots
            self._made.caches["end_layer"] = geometry.num_layers
            if self._future is not None:
                self._made.experts["next_use"] = self._future.first_use
        return self._made

    def on_pass(self, pass_index: int) -> None:
        ranking.note_pass(self._memory.run, pass_index)

    def on_insert(self, key: int, prefetched: bool) -> None:
        ranking.note_load(self._memory.run, key, prefetched)

    def on_predicted(self, key: int) -> None:
        ranking.note_hint(self._memory.run, key)

    def on_evict(self, key: int) -> None:
        ranking.note_eviction(self._memory.run, key)

    def on_miss(self, key: int) -> None:
        return

    def on_levels(self, event: Event, levels: Mapping[int, int]) -> None:
        """Note the use of the event's keys, each executed at a level of precision."""
        low = self._memory.experts["ran_below_best_precision"]
        for key, level in levels.items():
            low[key] = level > 0
        self.on_event(event)
        low[:] = 0

    def on_event(self, event: Event) -> None:
        run, keys = self._memory.run, np.array(event.keys, np.int64)
        experts, weights = np.ascontiguousarray(event.experts), event.weights.astype(np.float32)
        call = make_record(state.Call, executed=address_of(experts), looked_up=address_of(experts))
        call.seen_weights = address_of(weights)
        if self._future is not None:
            after = run.pass_index * run.num_layers + event.layer + 1
            needs = np.array([self._future.rank_from(key, after) for key in event.keys], np.int64)
            call.next_use = address_of(needs)
        run.layer, run.tokens_here, run.cursor = event.layer, len(experts), 0
        run.top_k = experts.shape[1]
        run.first_entry, run.end_entry, run.num_keys = 0, experts.size, len(keys)
        self._memory.scratch["keys"][: len(keys)] = keys
        ranking.note_event(run, call)

    def victim(self, pinned: Collection[int], layer: int) -> int | None:
        memory = self._memory
        memory.run.mark += 1
        memory.run.layer = layer
        memory.experts["pinned"][[*pinned]] = memory.run.mark
        memory.layers["stale"] = 1
        found = ranking.find_victim(memory.run, 0, memory.run.mark)
        return None if found < 0 else found


def as_stateful(rule: Any) -> Any:
    """Return an eviction that hears of all that the cache does, whatever its kind."""
    return Played(rule) if isinstance(rule, RankedEviction) else rule
