"""The drafting before a verify pass, as both clocks see it: what is predicted, noted and solved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lm_eval_moecache.algorithms.prefetch.base import DraftStagePrefetch
from lm_eval_moecache.engine.clock import Clock
from lm_eval_moecache.engine.cutoff import Cutoff, Overlap, solve_cutoff
from lm_eval_moecache.engine.prefetches import Prefetches
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.draft import Draft
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.drafting import DraftNotes


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
