"""The future of a replay: which events need which keys. Offline algorithms are given it."""

from __future__ import annotations

from array import array

import numpy as np

from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.trace.trace import Trace


class Future:
    """Every need of a trace, by key and by event.

    An event's number is pass * num_layers + layer. `times[start[key]:start[key + 1]]` are the
    numbers of the events that need a key, ascending, closed by `num_events`, which means never.
    """

    def __init__(self, trace: Trace) -> None:
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
        self.start: list[int] = [0, *(ends + np.arange(1, num_keys + 1)).tolist()]

    def keys_of(self, event: int) -> list[int]:
        """Return the keys that an event needs, in order of first need; none after the end."""
        if event >= self.num_events:
            return []
        keys: list[int] = self._keys[self._bounds[event] : self._bounds[event + 1]].tolist()
        return keys
