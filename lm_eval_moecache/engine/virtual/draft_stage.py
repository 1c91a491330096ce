"""Drafting in virtual time: the draft's compute, and the link that works meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lm_eval_moecache.algorithms.prefetch.base import DraftStagePrefetch
from lm_eval_moecache.engine.cutoff import load_times
from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.prefetches import Prefetches
from lm_eval_moecache.engine.virtual.clock import VirtualClock
from lm_eval_moecache.engine.virtual.link import VirtualLink
from lm_eval_moecache.engine.virtual.traffic import Traffic
from lm_eval_moecache.records.draft import Draft
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware


class VirtualDraftStage(DraftStage):
    """Accounts for drafting by the hardware profile."""

    _clock: VirtualClock

    def __init__(
        self,
        draft: Draft,
        hardware: Hardware,
        link: VirtualLink,
        clock: VirtualClock,
        traffic: Traffic,
        prefetches: Prefetches,
        prefetch: DraftStagePrefetch | None,
    ) -> None:
        super().__init__(draft, clock, prefetches, prefetch)
        # Times the draft by the same roofline; what it says moves the run's clock.
        self._costs = VirtualClock(hardware, draft.geometry)
        self._hardware = hardware
        self._link = link
        self._traffic = traffic

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
