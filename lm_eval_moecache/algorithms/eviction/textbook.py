"""The textbook rules of short lists: CLOCK, SIEVE, segmented LRU and 2Q."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from lm_eval_moecache.algorithms.eviction.base import GhostQueue, HitRule, SecondChance
from lm_eval_moecache.records.ranges import ProperShare, Range


class Clock(SecondChance):
    """Evicts the longest-resident expert that was not hit since the hand last passed it.

    Corbato 1968. One bit per resident, set by a hit; the hand clears it in passing, which gives
    that expert another round. Pinned experts are skipped and keep their bit and place. Cost: O(1)
    amortised per call, not counting pinned keys.
    """

    name: ClassVar[str] = "clock"
    source: ClassVar[str] = "Corbato 1968; as libCacheSim's Clock with a one-bit counter"

    def in_order(self) -> Iterable[int]:
        return self._hit

    def forget(self, key: int) -> None:
        chosen, passed = self._passed
        if key == chosen:
            for each in passed:
                del self._hit[each]
                self._hit[each] = False
        self._hit.pop(key, None)
        self._passed = (-1, [])


class Sieve(SecondChance):
    """Evicts the first expert that was not hit, the hand moving from old to new.

    Zhang et al., NSDI 2024. As CLOCK, but a spared expert keeps its place in the order of arrival:
    the hand goes on to newer experts, so that those loaded for one use leave soon. It restarts at
    the oldest after it has met the newest. Pinned experts are skipped and keep their bit.
    Cost: O(residents) per victim, else O(1).
    """

    name: ClassVar[str] = "sieve"
    source: ClassVar[str] = "Zhang et al., NSDI 2024; as libCacheSim's Sieve"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hand: int | None = None
        """Where the next search begins; None for the oldest."""

    def in_order(self) -> Iterable[int]:
        order = list(self._hit)
        start = 0 if self._hand is None else order.index(self._hand)
        return order[start:] + order[:start]

    def forget(self, key: int) -> None:
        chosen, passed = self._passed
        if key == chosen:
            for each in passed:
                self._hit[each] = False
        if key == chosen or key == self._hand:
            order = list(self._hit)
            after = order.index(key) + 1
            self._hand = order[after] if after < len(order) else None
        del self._hit[key]
        self._passed = (-1, [])


Segments = Annotated[int, Range(least=2, why=": one is lru")]


@dataclass(eq=False, kw_only=True)
class SLRU(HitRule):
    """Evicts from the lowest of several LRU segments; a hit moves an expert one segment up.

    Karedla et al. 1994 with two segments; libCacheSim's has four of equal size, the default here.
    An expert that overflows a segment falls into the one below. A new expert enters the lowest
    segment that has room (as in libCacheSim, so that a cold cache fills completely). Pinned experts
    are skipped. Cost: O(segments) per call, not counting pinned keys.

    Parameters: segments, at least 2 (4).
    """

    name: ClassVar[str] = "slru"
    source: ClassVar[str] = "Karedla et al. 1994; as libCacheSim's SLRU"

    segments: Segments = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._segments = [OrderedDict[int, None]() for _ in range(self.segments)]
        """Least recently used first in each; the last segment is the most protected."""

    def _size(self) -> int:
        return self.num_slots // len(self._segments)

    def admit(self, key: int) -> None:
        size = self._size()
        free = (segment for segment in self._segments if len(segment) < size)
        next(free, self._segments[0])[key] = None

    def hit(self, key: int) -> None:
        for number, segment in enumerate(self._segments):
            if key in segment:
                del segment[key]
                self._put(key, min(number + 1, len(self._segments) - 1))
                return

    def _put(self, key: int, number: int) -> None:
        """Insert a key as a segment's most recent; overflowing keys fall to lower segments."""
        self._segments[number][key] = None
        while number and len(self._segments[number]) > self._size():
            falling, _ = self._segments[number].popitem(last=False)
            number -= 1
            self._segments[number][falling] = None

    def forget(self, key: int) -> None:
        for segment in self._segments:
            segment.pop(key, None)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        keys = (key for segment in self._segments for key in segment if key not in pinned)
        return next(keys, None)


@dataclass(eq=False, kw_only=True)
class TwoQ(HitRule):
    """Evicts from a FIFO of first-time experts while that is above its share, else by LRU.

    Johnson and Shasha, VLDB 1994 (2Q full version). A new expert enters `A1in`, a FIFO that hits do
    not reorder; keys evicted from it enter the ghost list `A1out`, and the LRU list `Am` when
    loaded again. Pinned experts are skipped; if one list has no candidate, the other provides the
    victim. Cost: O(1) per call, not counting pinned keys.

    Parameters: in_share (0.25) and out_share (0.5), sizes of A1in and A1out as shares of the cache.
    """

    name: ClassVar[str] = "two_q"
    source: ClassVar[str] = "Johnson and Shasha, VLDB 1994; as libCacheSim's TwoQ"

    in_share: ProperShare = 0.25
    out_share: ProperShare = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._in: dict[int, None] = {}
        self._out = GhostQueue()
        self._main: dict[int, None] = {}

    def on_miss(self, key: int) -> None:
        self._out.recall(key)

    def admit(self, key: int) -> None:
        (self._main if self._out.admit(key) else self._in)[key] = None

    def hit(self, key: int) -> None:
        if key in self._main:
            del self._main[key]
            self._main[key] = None

    def forget(self, key: int) -> None:
        if key in self._main:
            del self._main[key]
            return
        del self._in[key]
        self._out.add(key, int(self.num_slots * self.out_share))

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        from_new = len(self._in) > int(self.num_slots * self.in_share) or not self._main
        first, second = (self._in, self._main) if from_new else (self._main, self._in)
        return next((key for keys in (first, second) for key in keys if key not in pinned), None)
