"""Belady's rule: the expert needed furthest in the future leaves first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lm_eval_moecache.algorithms.features import A_NEXT_USE, Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.trace.future import Future


def furthest_use(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    return float(-expert.next_use), 0.0


class Belady(RankedEviction):
    """Evicts, among what may be evicted, the expert whose next event is furthest away.

    Belady 1966. It knows the future, so only a replay can run it. Experts that the running event
    has executed count with their next need after this event. Ties (the same event, or never) go to
    the smaller key. If misses of prefill passes do not count, a need there is as good as never
    (`Future.ranks`).

    Requests are counted once per event and key. On demand, with experts of one size and every
    event within the cache, no eviction has fewer misses (then equal to loads). An event larger than
    the cache runs in waves whose last one stays resident, whatever the rule evicts: there a rule
    that breaks ties by luck can have fewer, and the bound is `engine.bound.fewest_misses`. Neither
    bounds time, nor anything under prefetching.
    Cost: O(layers + residents of a layer) per victim.
    """

    source: ClassVar[str] = "Belady 1966"
    is_offline: ClassVar[bool] = True
    moves: ClassVar[bool] = False
    rank = staticmethod(furthest_use)

    def prepare(self, future: Future) -> None:
        self._times, self._ranks = future.times, future.ranks
        self._cursor = future.start[:-1]
        self._pass = 0
        for key, first in enumerate(future.first_use.tolist()):
            self._log.extend((A_NEXT_USE, key, first))

    def on_pass(self, pass_index: int) -> None:
        super().on_pass(pass_index)
        self._pass = pass_index

    def on_executed(self, layer: int, keys: Sequence[int]) -> None:
        self._pass_by(keys, self._pass * self.geometry.num_layers + layer)

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        self._pass_by(event.keys, event.pass_index * self.geometry.num_layers + event.layer)

    def _pass_by(self, keys: Sequence[int], now: int) -> None:
        """Advance these keys to their first needs after event `now`."""
        times, cursors = self._times, self._cursor
        for key in keys:
            while times[cursors[key]] <= now:
                cursors[key] += 1
            self._log.extend((A_NEXT_USE, key, self._ranks[cursors[key]]))
