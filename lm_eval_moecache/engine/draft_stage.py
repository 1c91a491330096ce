"""The drafting before a verify pass: what is predicted, noted and solved, in either kind of time.

The last part is SP-MoE's cutoff layer (section 3.2): how many layers draft-stage prefetch covers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval_moecache.algorithms.prefetch.base import DraftStagePrefetch
from lm_eval_moecache.engine.cache import Clock
from lm_eval_moecache.engine.decide import Prefetches
from lm_eval_moecache.engine.virtual.link import Traffic as VirtualTraffic
from lm_eval_moecache.engine.virtual.link import VirtualClock, VirtualLink
from lm_eval_moecache.engine.wall.link import Traffic as WallTraffic
from lm_eval_moecache.engine.wall.link import WallClock, WallLink
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.geometry import Draft, Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.trace.recorder import DraftNotes


class DraftStage(ABC):
    """Told of drafting: `begin`, then for each layer of each forward of the draft `dense`,
    `predict` where `wants` says so, `experts`; the verify pass that follows ends it.
    """

    def __init__(
        self,
        draft: Draft,
        clock: Clock,
        prefetches: Prefetches,
        prefetch: DraftStagePrefetch | None,
    ) -> None:
        self.draft = draft
        self._clock = clock
        self._prefetches = prefetches
        self._prefetch = prefetch
        self._pass_index = -1
        self.notes: DraftNotes | None = None
        """Where all that this stage is told is taken down, if anywhere."""
        self.is_open = False
        self.start_s = 0.0
        self.stall_s = 0.0
        """Time in which the draft waited for the link (`trigger=vanilla`)."""
        self.solution: dict[str, Any] | None = None
        """The cutoff solver's inputs and answer."""

    def solve(
        self,
        target: Geometry,
        capacity_bytes: Sequence[int],
        draft_layer_s: float,
        load_layer_s: Sequence[float],
        memory_bytes: float,
    ) -> None:
        """Solve for the cutoff layer, where the prefetcher has one."""
        prefetch, draft = self._prefetch, self.draft
        if prefetch is None:
            return
        most = min(target.num_experts, draft.tokens * prefetch.critical)
        given = Overlap(
            draft_layers=draft.geometry.num_layers,
            draft_layer_s=draft_layer_s,
            load_layer_s=tuple(load_layer_s),
            prefetched_bytes=tuple(most * levels[0] for levels in target.expert_bytes),
            capacity_bytes=tuple(capacity_bytes),
            other_bytes=sum(target.dense_bytes) + draft.nbytes,
            memory_bytes=memory_bytes,
        )
        asked, answer = prefetch.cutoff, solve_cutoff(given)
        prefetch.plan(answer.cutoff)
        self.solution = {
            "asked": asked,
            "used": prefetch.cutoff,
            "answer": answer.cutoff,
            "by_time": answer.by_time,
            "by_memory": answer.by_memory,
            "critical": prefetch.critical,
            "draft_layers": given.draft_layers,
            "draft_layer_ms": given.draft_layer_s * 1000,
            "load_layer_ms": [load_s * 1000 for load_s in given.load_layer_s],
            "prefetched_bytes": list(given.prefetched_bytes),
            "capacity_bytes": list(given.capacity_bytes),
            "other_bytes": given.other_bytes,
            "memory_bytes": given.memory_bytes,
        }

    def begin(self, pass_index: int) -> None:
        """Begin drafting for the pass that will have this index."""
        self.is_open = True
        self.start_s, self.stall_s = self._clock.now, 0.0
        self._pass_index = pass_index
        if self.notes is not None:
            self.notes.begin()

    def end(self) -> None:
        self.is_open = False

    def dense(self, layer: int, num_tokens: int) -> None:
        """Note a draft layer up to its attention output, while the link works on."""
        if self.notes is not None:
            self.notes.dense(layer, num_tokens)
        self._compute_dense(layer, num_tokens)

    def wants(self, layer: int) -> bool:
        """Whether the scores of a layer of the target are asked for."""
        is_noted = self.notes is not None and self.notes.ranked > 0
        return is_noted or self._covers(layer)

    def predict(self, layer: int, logits: FloatArray) -> None:
        """Take the [1, experts] logits of the target's gate on a draft layer's output."""
        if self.notes is not None:
            self.notes.predict(logits)
        if not self._covers(layer):
            return
        prefetch = self._prefetch
        assert prefetch is not None, "nobody asked for a prediction"
        self._compute_gate()
        keys = prefetch.propose_draft(layer, logits)
        self._prefetches.submit_draft(keys, self._pass_index, self._clock.now, prefetch.batched)

    def experts(self, layer: int, num_experts: int, num_tokens: int) -> None:
        """Note the experts of a draft layer: `num_experts` different ones."""
        if self.notes is not None:
            self.notes.experts(num_experts)
        self._compute_experts(layer, num_experts, num_tokens)

    def _covers(self, layer: int) -> bool:
        return self._prefetch is not None and layer < int(self._prefetch.cutoff)

    @abstractmethod
    def _compute_dense(self, layer: int, num_tokens: int) -> None:
        """Let the time of a draft layer's dense part pass."""

    @abstractmethod
    def _compute_gate(self) -> None:
        """Let the time of one of the target's gates pass."""

    @abstractmethod
    def _compute_experts(self, layer: int, num_experts: int, num_tokens: int) -> None:
        """Let the time of a draft layer's experts pass, and of the wait for what was asked for."""


class VirtualDraftStage(DraftStage):
    """Accounts for drafting by the hardware profile."""

    _clock: VirtualClock

    def __init__(
        self,
        draft: Draft,
        hardware: Hardware,
        link: VirtualLink,
        clock: VirtualClock,
        traffic: VirtualTraffic,
        prefetches: Prefetches,
        prefetch: DraftStagePrefetch | None,
    ) -> None:
        super().__init__(draft, clock, prefetches, prefetch)
        # Times the draft by the same roofline; what it says moves the run's clock.
        self._costs = VirtualClock(hardware, draft.geometry)
        self._hardware, self._link, self._traffic = hardware, link, traffic

    def plan(self, target: Geometry, capacity_bytes: Sequence[int]) -> None:
        """Solve for the cutoff layer, where the prefetcher has one."""
        prefetch, draft = self._prefetch, self.draft
        if prefetch is None:
            return
        costs, hardware = VirtualClock(self._hardware, draft.geometry), self._hardware
        for layer in range(draft.geometry.num_layers):
            costs.dense(layer, 1)
            costs.experts(layer, draft.geometry.top_k, draft.geometry.top_k, draft.level)
        loads = load_times(target, hardware, prefetch.critical, prefetch.batched)
        layer_s = costs.now / draft.geometry.num_layers
        self.solve(target, capacity_bytes, layer_s, loads, hardware.memory_bytes)

    def _compute_dense(self, layer: int, num_tokens: int) -> None:
        before_s = self._costs.now
        self._costs.dense(layer, num_tokens)
        self._advance(self._costs.now - before_s)

    def _compute_gate(self) -> None:
        self._advance(self._clock.gates(1))

    def _compute_experts(self, layer: int, num_experts: int, num_tokens: int) -> None:
        before_s = self._costs.now
        assignments = num_tokens * self.draft.geometry.top_k
        self._costs.experts(layer, num_experts, assignments, self.draft.level)
        self._advance(self._costs.now - before_s)
        if self._prefetch is not None and self._prefetch.synchronous and self._link.active:
            self._traffic.drain(math.inf, frozenset(), 0)
            self.stall_s += self._clock.wait_until(self._link.busy_until)

    def _advance(self, seconds: float) -> None:
        self._clock.wait_until(self._clock.now + seconds)
        if self._link.active:
            self._traffic.drain(self._clock.now, frozenset(), 0)


class WallDraftStage(DraftStage):
    """Gives what is predicted to the worker, and lets it go on whenever the draft reports.

    SP-MoE's pipelined runtime (section 3.3): the worker takes the experts that a layer asked for
    together (`io=batched`: all of them are issued at once) or one by one, while the draft goes on;
    with `trigger=vanilla` the draft waits after each layer until they are there.
    """

    def __init__(
        self,
        draft: Draft,
        link: WallLink,
        clock: WallClock,
        traffic: WallTraffic,
        prefetches: Prefetches,
        prefetch: DraftStagePrefetch | None,
    ) -> None:
        super().__init__(draft, clock, prefetches, prefetch)
        self._link, self._traffic = link, traffic

    def predict(self, layer: int, logits: FloatArray) -> None:
        super().predict(layer, logits)
        self._go_on()

    def _compute_dense(self, layer: int, num_tokens: int) -> None:
        self._go_on()

    def _compute_gate(self) -> None:
        self._go_on()

    def _compute_experts(self, layer: int, num_experts: int, num_tokens: int) -> None:
        self._go_on()
        if self._prefetch is None or not self._prefetch.synchronous:
            return
        start_s = self._clock.now
        # What finds no room is left to its event, which demands it.
        while issued := self._link.issued():
            self._traffic.settle(self._link.wait_for(issued))
            self._go_on()
        self.stall_s += self._clock.now - start_s

    def _go_on(self) -> None:
        if self._link.active:
            self._link.launched()
            self._traffic.drain(frozenset(), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What the solver is asked: seconds and bytes of drafting, loading and memory."""

    draft_layers: int
    draft_layer_s: float
    """Compute of one layer of the draft for one token, on average."""
    load_layer_s: tuple[float, ...]
    """Per MoE layer of the target, the time to load its critical experts."""
    prefetched_bytes: tuple[int, ...]
    """Per MoE layer, the bytes of all experts that the drafted tokens may ask for."""
    capacity_bytes: tuple[int, ...]
    """Bytes of the expert cache: one number, or one for each layer with a cache of its own."""
    other_bytes: int
    """Memory that is not the cache: the target's other weights and the draft."""
    memory_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutoff:
    """The largest cutoff by each constraint; the answer satisfies both."""

    by_time: int
    by_memory: int
    cutoff: int


def solve_cutoff(given: Overlap) -> Cutoff:
    """Return the largest L for which prefetching the layers before L is hidden and fits.

    The text of section 3.2 without its formulas reads: maximise the depth such that the peak of
    the other memory plus the prefetched experts stays within the capacity, and all prefetches
    complete during drafting, "no matter whether compute time or I/O time is the bottleneck"; where
    a layer's loading is shorter than its computation, all layers are covered. Our reading:
    sum over l < L of max(compute, loading of l) <= the draft's layers x compute, per token (for
    more tokens both sides grow alike); and the experts of all drafted tokens in those layers fit
    into the cache, and with everything else into the device.
    """
    drafting_s = given.draft_layers * given.draft_layer_s
    # Sums of equal floats: without a margin, "shorter than the computation" could miss by a digit.
    margin_s = 1e-9 * drafting_s
    by_time = _longest(
        [max(given.draft_layer_s, load_s) for load_s in given.load_layer_s], drafting_s + margin_s
    )
    needs = given.prefetched_bytes
    by_memory = _longest(needs, given.memory_bytes - given.other_bytes)
    if len(given.capacity_bytes) == 1:
        by_memory = min(by_memory, _longest(needs, given.capacity_bytes[0]))
    else:
        fits = [n <= c for n, c in zip(needs, given.capacity_bytes, strict=True)]
        by_memory = min(by_memory, fits.index(False) if False in fits else len(fits))
    return Cutoff(by_time=by_time, by_memory=by_memory, cutoff=min(by_time, by_memory))


def _longest(costs: Sequence[float], budget: float) -> int:
    """Return how many of the first costs fit into a budget together."""
    total = 0.0
    for count, cost in enumerate(costs):
        total += cost
        if total > budget:
            return count
    return len(costs)


def load_times(
    geometry: Geometry, hardware: Hardware, critical: int, batched: bool
) -> tuple[float, ...]:
    """Return, per layer, the seconds to load `critical` experts: one latency for a batch."""
    latencies = 1 if batched else critical
    return tuple(
        latencies * hardware.link_latency_s + critical * levels[0] / hardware.link_rate
        for levels in geometry.expert_bytes
    )
