"""W-TinyLFU: experts leaving a small window must be hotter than the main cache's victim."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import HitRule
from lm_eval_moecache.records.ranges import Count, ProperShare


@dataclass(eq=False, kw_only=True)
class WTinyLFU(HitRule):
    """Evicts the colder of two: the window's oldest, and the victim of the main LRU segments.

    Einziger, Friedman and Manes, ACM ToS 2017. New experts enter a small LRU window. The expert
    pushed out of it competes with the main cache's victim: the one requested less often leaves,
    ties against the newcomer. The main cache is a segmented LRU, four fifths of it protected.
    Requests are counted exactly where the paper has a sketch, as keys are few, and halved every
    `period` requests per slot, so that old heat fades. A demanded expert cannot be refused: it is
    admitted to the window, and compared when it leaves. Pinned experts are skipped.
    Cost: O(1) per call, not counting pinned keys and the halving.

    Parameters: window_share of the cache (0.01, at least one slot); period, requests per slot (10).
    """

    name: ClassVar[str] = "w_tinylfu"
    source: ClassVar[str] = "Einziger, Friedman and Manes, ACM ToS 2017"

    window_share: ProperShare = 0.01
    period: Count = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._window = OrderedDict[int, None]()
        self._probation = OrderedDict[int, None]()
        self._protected = OrderedDict[int, None]()
        self._asked: Counter[int] = Counter()
        self._since_halving = 0

    def _count(self, key: int) -> None:
        self._asked[key] += 1
        self._since_halving += 1
        if self._since_halving >= self.period * self.num_slots:
            self._since_halving = 0
            halved = {each: count // 2 for each, count in self._asked.items() if count > 1}
            self._asked = Counter(halved)

    def _window_size(self) -> int:
        return max(1, int(self.num_slots * self.window_share))

    def admit(self, key: int) -> None:
        self._count(key)
        self._window[key] = None
        # No eviction is needed yet: the window's overflow moves to the main cache.
        while len(self._window) > self._window_size():
            self._probation[self._window.popitem(last=False)[0]] = None

    def hit(self, key: int) -> None:
        self._count(key)
        if key in self._window:
            self._window.move_to_end(key)
        elif key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._probation:
            del self._probation[key]
            self._protected[key] = None
            room = (self.num_slots - self._window_size()) * 4 // 5
            while len(self._protected) > max(0, room):
                self._probation[self._protected.popitem(last=False)[0]] = None

    def forget(self, key: int) -> None:
        for part in (self._window, self._probation, self._protected):
            part.pop(key, None)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        main = (self._probation, self._protected)
        theirs = next((key for part in main for key in part if key not in pinned), None)
        ours = None
        if theirs is None or len(self._window) >= self._window_size():
            ours = next((key for key in self._window if key not in pinned), None)
        if ours is None or theirs is None:
            return theirs if ours is None else ours
        return ours if self._asked[ours] <= self._asked[theirs] else theirs
