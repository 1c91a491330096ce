"""The future of a replay: which events need which keys. Only offline algorithms see it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from functools import cached_property

import numpy as np

from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.event import PHASES, PREFILL
from lm_eval_moecache.trace.trace import Trace


class Future:
    """All requests of a trace, by key and by event.

    An event's number is pass * num_layers + layer. `times[start[key]:start[key + 1]]` are the
    numbers of the events that need a key, ascending and closed by `num_events`, meaning never.
    `ranks` are the same numbers as an eviction should weigh them: where only misses after the
    prefill count (`free_prefill`), a need in a prefill pass is as good as never, as its load
    costs nothing whether the key stayed or not.
    """

    def __init__(self, trace: Trace, *, free_prefill: bool = False) -> None:
        num_keys = trace.geometry.num_layers * trace.geometry.num_experts
        self.num_events = len(trace.key_bounds) - 1
        self._keys = trace.keys
        self._bounds = trace.key_bounds
        event_of = np.repeat(np.arange(self.num_events), np.diff(trace.key_bounds))
        order = np.argsort(trace.keys, kind="stable")
        counts = np.bincount(trace.keys, minlength=num_keys)
        ends = np.cumsum(counts)
        closed: IntArray = np.insert(event_of[order], ends, self.num_events).astype(np.int64)
        # Reading single elements of a numpy array is several times slower.
        self.times = array("q", closed.tobytes())
        self.ranks = self.times
        if free_prefill:
            in_prefill = trace.columns.phase[trace.row_bounds[:-1]] == PHASES.index(PREFILL)
            never = np.append(in_prefill, False)[closed]
            self.ranks = array("q", np.where(never, self.num_events, closed).tobytes())
        self.start: list[int] = [0, *(ends + np.arange(1, num_keys + 1)).tolist()]

    @property
    def first_use(self) -> IntArray:
        """Rank of each key's first need [keys]."""
        return np.frombuffer(self.ranks, np.int64)[self.start[:-1]]

    @cached_property
    def next_use(self) -> IntArray:
        """Rank of the key's next need after this event, for each entry of the trace's `keys`."""
        order = np.argsort(self._keys, kind="stable")
        ranks = np.empty(len(order), np.int64)
        # Each key's times end with one extra entry, which shifts those of key k by k places.
        ranks[order] = np.frombuffer(self.ranks, np.int64)[
            np.arange(1, len(order) + 1) + self._keys[order]
        ]
        return ranks

    def rank_from(self, key: int, event: int) -> int:
        """Return the rank of a key's first need at `event` or later."""
        start, stop = self.start[key], self.start[key + 1]
        return self.ranks[bisect_left(self.times, event, start, stop - 1)]

    def keys_of(self, event: int) -> list[int]:
        """Return the keys that an event needs, in order of first need; none after the end."""
        if event >= self.num_events:
            return []
        keys: list[int] = self._keys[self._bounds[event] : self._bounds[event + 1]].tolist()
        return keys
