"""Hysteresis: only a clearly hotter expert replaces a hot one."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import StatefulEviction
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.ranges import Count


@dataclass(eq=False, kw_only=True)
class Hysteresis(StatefulEviction):
    """Keeps the experts that first filled the cache until another is hotter by a quarter plus four.

    colibri's `tier_pick_swap`: heat counts uses, resident or not, and is halved periodically; a hot
    expert of heat h is replaced by one with heat above h + h/4 + 4, which prevents thrashing. The
    source swaps in the background and streams the others through; here a loaded expert is
    transient, and leaves first unless its uses make it hot. Hot experts leave only if there is no
    transient one, coldest first; ties go to the smaller key.
    Cost: O(residents) where a transient expert is used or a hot one leaves, else O(1).

    Parameters: half_life, passes between halvings (64; the source leaves it to its caller).
    """

    name: ClassVar[str] = "hysteresis"
    source: ClassVar[str] = "colibri c/tier.h (tier_pick_swap, tier_decay)"

    half_life: Count = 64

    def __post_init__(self) -> None:
        self._passes = 0
        self._heat = [0] * (self.geometry.num_layers * self.geometry.num_experts)
        self._hot: set[int] = set()
        self._passing: dict[int, None] = {}
        """The longest there first."""
        self._is_full = False

    def on_pass(self, pass_index: int) -> None:
        self._passes += 1
        if self._passes % self.half_life == 0:
            self._heat = [heat >> 1 for heat in self._heat]

    def on_insert(self, key: int, prefetched: bool) -> None:
        if self._is_full:
            self._passing[key] = None
        else:
            self._hot.add(key)

    def on_event(self, event: Event) -> None:
        for key in event.keys:
            self._heat[key] += 1
            if key in self._passing and self._hot:
                coldest = min(self._hot, key=self._by_heat)
                heat = self._heat[coldest]
                if self._heat[key] > heat + heat // 4 + 4:
                    self._hot.remove(coldest)
                    self._hot.add(key)
                    del self._passing[key]
                    self._passing[coldest] = None

    def on_evict(self, key: int) -> None:
        self._hot.discard(key)
        self._passing.pop(key, None)
        self._is_full = bool(self._hot or self._passing)  # an emptied cache fills anew

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        passing = next((key for key in self._passing if key not in pinned), None)
        if passing is not None:
            return passing
        return min((k for k in self._hot if k not in pinned), key=self._by_heat, default=None)

    def _by_heat(self, key: int) -> tuple[int, int]:
        return self._heat[key], key
