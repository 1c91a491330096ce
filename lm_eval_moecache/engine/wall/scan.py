"""Scanning a text on the real link: decided token by token, then moved token by token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lm_eval_moecache.engine.decide import Plan
from lm_eval_moecache.engine.wall.clock import WallClock
from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.slots import PlacedCache
from lm_eval_moecache.engine.wall.traffic import transfer_of
from lm_eval_moecache.engine.wall.worker import Transfer
from lm_eval_moecache.records.event import Fetch
from lm_eval_moecache.records.ledger import PassRecord


@dataclass(frozen=True, slots=True)
class _Step:
    """What moves before a part of one token's experts, and where these lie then."""

    transfers: Sequence[Transfer]
    slots: Mapping[int, int]
    record: PassRecord


class ScanScript:
    """A layer's tokens: what each of them asks of the link, and where its experts lie then.

    The router decides for the whole text before any expert runs. Without prefetches nothing that a
    cache decides depends on time, so all tokens are decided first, and their bytes follow in that
    order, each token's awaited before the next one's may take their slots. An expert runs once, for
    all of its tokens, when it first is there: the same products as without a cache.
    """

    def __init__(self, link: WallLink) -> None:
        self._link = link
        self._steps: deque[_Step] = deque()

    def add(self, plan: Plan, cache: PlacedCache, record: PassRecord) -> None:
        """Decide one token's event to its end, waves included; what it moves is counted now."""
        event, demands = plan.event, list(plan.demands)
        remaining: Sequence[int] = event.keys
        while True:
            transfers, demands = self._take_in(cache, event.layer, demands, set(remaining))
            here = {key: cache.slots[key] for key in remaining if key in cache.slots}
            remaining = [key for key in remaining if key not in cache.slots]
            self._steps.append(_Step(transfers, here, record))
            if not demands:
                break
            assert transfers or here, "no room for one expert after its wave"
        cache.eviction.on_event(event)

    def play(self, clock: WallClock) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Carry everything out; yield what is there for the first time, as it comes."""
        link, done = self._link, set[int]()
        while self._steps:
            step = self._steps[0]
            start_s, busy_s = clock.now, link.busy_s
            self._move(step)
            fresh = {key: slot for key, slot in step.slots.items() if key not in done}
            done.update(fresh)
            self._steps.popleft()
            if fresh:
                yield fresh, False
            step.record.link_busy_s += link.busy_s - busy_s
            step.record.end_s += clock.now - start_s

    def catch_up(self) -> None:
        """Move what is left of a text that broke off: the cache says already that it is there."""
        while self._steps:
            self._move(self._steps.popleft())

    def _move(self, step: _Step) -> None:
        link = self._link
        if not step.transfers:
            return
        link.launched()
        for transfer in step.transfers:
            link.move(transfer)
        begun_s = time.perf_counter()
        link.wait_for({transfer.key for transfer in step.transfers}, len(step.transfers))
        step.record.stall_s += time.perf_counter() - begun_s

    def _take_in(
        self, cache: PlacedCache, layer: int, demands: list[Fetch], pinned: set[int]
    ) -> tuple[list[Transfer], list[Fetch]]:
        """Give demands their slots as far as they fit; return their transfers, and the rest."""
        transfers: list[Transfer] = []
        for done, (key, level) in enumerate(demands):
            if not cache.make_room(cache.size_of(key, level), pinned, layer, key):
                return transfers, demands[done:]
            cache.insert(key, level)
            transfers.append(transfer_of(cache, key, level))
            self._link.count(transfers[-1])
        return transfers, []


def share_rest(records: Sequence[PassRecord], clock: WallClock) -> None:
    """Share what a text took beside its tokens' own experts among these."""
    clock.synchronize()
    spent_s = sum(record.duration_s for record in records)
    rest_s = clock.now - records[0].start_s - spent_s
    for record in records:
        record.end_s += rest_s / len(records)
