"""What carries plans out, whichever clock it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from lm_eval_moecache.engine.cache import Clock, ExpertCache, Link
from lm_eval_moecache.engine.decide import Plan, Prefetches, Rules, decide
from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.event import PREFILL, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord


class Executor(ABC):
    """Serves events: `enter`, then `run`, then the `waves`, for each layer of each pass.

    `caches[layer]` is the pool of that layer: one object for all, or one each. It asks the cache,
    the link and the algorithms; none of them calls back.
    """

    clock: Clock
    link: Link
    pools: Sequence[ExpertCache]
    """The caches, each once."""
    is_virtual: ClassVar[bool] = False
    """Whether an event takes no time of the machine's, but for its bookkeeping."""
    slots: Sequence[Mapping[int, int]] = ()
    """Layer -> (key -> slot) of what is resident or arriving; empty where nothing has a slot."""

    def __init__(
        self, geometry: Geometry, rules: Rules, pools: Sequence[ExpertCache], link: Link
    ) -> None:
        self.pools = pools
        self.link = link
        self.rules = rules
        self.caches = [*pools] if len(pools) > 1 else [*pools] * geometry.num_layers
        self.prefetches = Prefetches(geometry, self.caches, link, self.rules)
        self.record = PassRecord(-1, PREFILL, 0, 0.0)
        """The pass in progress."""
        self.draft_stage: DraftStage | None = None
        self.on_event: Callable[[Event], None] | None = None
        """Shown each event after its routing and before anything moves."""

    def begin_pass(self, record: PassRecord) -> None:
        self.record = record
        self.rules.routing.on_pass(record.index)
        self.rules.prefetch.on_pass(record.index)

    def attend(self, positions: IntArray) -> None:
        """Note where the tokens of the pass that begins stand in their sequences."""
        return

    def foresee(self, event: Event) -> None:
        """Prefetch by what is foreseen of the pass that begins: an event of layer `PASS_START`."""
        self.prefetches.submit(event, self.clock.now)

    @abstractmethod
    def enter(self, layer: int, num_tokens: int) -> None:
        """Note that the layer's router has decided, at this moment."""

    @abstractmethod
    def run(self, event: Event) -> Plan:
        """Decide an event and let its transfers begin; `enter` comes before."""

    @abstractmethod
    def waves(self) -> Iterator[tuple[Mapping[int, int], bool]]:
        """Yield the keys that the event of the last `run` has still to execute, as they come.

        Each with its slot, where its weights are and stay until the next wave is asked for. The
        flag says whether they are all of the event's. All waves have to be taken.
        """

    @abstractmethod
    def settle(self) -> None:
        """Empty the link: forget what waits for it, let what moves on it land."""

    def recover(self) -> None:
        """Bring a pass that broke off to an end, if there was one, before another begins."""
        return

    def begin_scan(self) -> None:
        """Note that the events to come are those of one layer, token by token."""
        return

    def end_scan(self, records: Sequence[PassRecord]) -> None:
        """Note that all layers of these tokens have been executed."""
        return

    def fill(self) -> None:
        """Bring what the caches say is resident there, uncounted: they have been warmed."""
        return

    @abstractmethod
    def time_load(self, count: int) -> float:
        """Return the seconds that loading so many experts of the first layer one by one takes.

        Measured where the clock is the machine's, before the first pass; caches stay as they are.
        """

    def close(self) -> None:
        """End what runs beside the caller. Safe to call twice."""
        return

    def _look_up(self, event: Event, cache: ExpertCache) -> Plan:
        """Decide an event and write to the ledger what was found, before anything moves."""
        plan = decide(event, self.rules, cache, self.link)
        record = self.record
        record.requests += len(plan.looked_up.keys)
        record.token_requests += event.num_tokens * self.rules.top_k
        if plan.absent or plan.selection is not None:
            plan.write_to(record)
        if self.rules.prefetches:
            if cache.unused_prefetches:
                record.prefetch_hits += cache.use_prefetched(plan.looked_up.keys)
            self.prefetches.judge(plan.looked_up, record)
        if self.on_event is not None:
            self.on_event(plan.looked_up)
        return plan
