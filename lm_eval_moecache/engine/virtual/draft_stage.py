"""The drafting before a verify pass: the draft's compute, and the link that works meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lm_eval_moecache.algorithms.prefetch.base import DraftStagePrefetch
from lm_eval_moecache.engine.cutoff import Cutoff, Overlap, load_times, solve_cutoff
from lm_eval_moecache.engine.prefetches import Prefetches
from lm_eval_moecache.engine.virtual.clock import VirtualClock
from lm_eval_moecache.engine.virtual.link import VirtualLink
from lm_eval_moecache.engine.virtual.traffic import Traffic
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.draft import Draft
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.trace.drafting import DraftNotes


class DraftStage:
    """Accounts for drafting: `begin`, then for each layer of each forward of the draft `dense`,
    `predict` where `wants` says so, `experts`; the verify pass that follows ends it.
    """

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
        self._draft = draft
        # Times the draft by the same roofline; what it says moves the run's clock.
        self._costs = VirtualClock(hardware, draft.geometry)
        self._hardware = hardware
        self._link = link
        self._clock = clock
        self._traffic = traffic
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

    def plan(self, target: Geometry, capacity_bytes: Sequence[int]) -> None:
        """Solve for the cutoff layer, where the prefetcher has one."""
        prefetch, draft = self._prefetch, self._draft
        if prefetch is None:
            return
        costs = VirtualClock(self._hardware, draft.geometry)
        for layer in range(draft.geometry.num_layers):
            costs.dense(layer, 1)
            costs.experts(layer, draft.geometry.top_k, draft.geometry.top_k, draft.level)
        most = min(target.num_experts, draft.tokens * prefetch.critical)
        given = Overlap(
            draft_layers=draft.geometry.num_layers,
            draft_layer_s=costs.now / draft.geometry.num_layers,
            load_layer_s=load_times(target, self._hardware, prefetch.critical, prefetch.batched),
            prefetched_bytes=tuple(most * levels[0] for levels in target.expert_bytes),
            capacity_bytes=tuple(capacity_bytes),
            other_bytes=sum(target.dense_bytes) + draft.nbytes,
            memory_bytes=self._hardware.memory_bytes,
        )
        asked, answer = prefetch.cutoff, solve_cutoff(given)
        prefetch.plan(answer.cutoff)
        self.solution = _told(asked, given, answer, prefetch)

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
        """Account for a draft layer up to its attention output, while the link works on."""
        if self.notes is not None:
            self.notes.dense(layer, num_tokens)
        before_s = self._costs.now
        self._costs.dense(layer, num_tokens)
        self._advance(self._costs.now - before_s)

    def wants(self, layer: int) -> bool:
        """Whether the scores of a layer of the target are asked for."""
        is_noted = self.notes is not None and self.notes.ranked > 0
        return is_noted or self._covers(layer)

    def _covers(self, layer: int) -> bool:
        return self._prefetch is not None and layer < int(self._prefetch.cutoff)

    def predict(self, layer: int, logits: FloatArray) -> None:
        """Take the [1, experts] logits of the target's gate on a draft layer's output."""
        if self.notes is not None:
            self.notes.predict(logits)
        if not self._covers(layer):
            return
        prefetch = self._prefetch
        assert prefetch is not None, "nobody asked for a prediction"
        self._advance(self._clock.gates(1))
        keys = prefetch.propose_draft(layer, logits)
        self._prefetches.submit_draft(keys, self._pass_index, self._clock.now, prefetch.batched)

    def experts(self, layer: int, num_experts: int, num_tokens: int) -> None:
        """Account for the experts of a draft layer: `num_experts` different ones."""
        if self.notes is not None:
            self.notes.experts(num_experts)
        before_s = self._costs.now
        assignments = num_tokens * self._draft.geometry.top_k
        self._costs.experts(layer, num_experts, assignments, self._draft.level)
        self._advance(self._costs.now - before_s)
        if self._prefetch is not None and self._prefetch.synchronous and self._link.active:
            self._traffic.drain(math.inf, frozenset(), 0)
            self.stall_s += self._clock.wait_until(self._link.busy_until)

    def _advance(self, seconds: float) -> None:
        self._clock.wait_until(self._clock.now + seconds)
        if self._link.active:
            self._traffic.drain(self._clock.now, frozenset(), 0)


def _told(
    asked: int | str, given: Overlap, answer: Cutoff, prefetch: DraftStagePrefetch
) -> dict[str, Any]:
    """Spell the solver's inputs and answer out for the results."""
    return {
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
