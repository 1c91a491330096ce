"""Drafting before a verify pass: predictions, prefetches and their recording, under either clock.

`solve_cutoff` is SP-MoE's cutoff layer (section 3.2): how many layers draft-stage prefetch covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from lm_eval_moecache.algorithms.prefetch.base import DraftStagePrefetch
from lm_eval_moecache.engine.costs import Costs
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.geometry import Draft, Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.trace.recorder import DraftNotes


class DraftStage:
    """The draft's calls: `begin`, then for each layer of each forward pass of the draft `dense`,
    `predict` where `wants` is true, and `experts`. The verify pass that follows ends the stage.

    SP-MoE's pipelined runtime (section 3.3): the link loads a layer's predicted experts together
    (`io=batched`) or one by one while the draft goes on; with `trigger=vanilla` the draft waits for
    them after each layer. The engine's `advance` lets its link work on for the seconds of a part of
    the draft, by the hardware profile's roofline; the virtual clock advances by them, the wall
    clock runs by itself.
    """

    def __init__(
        self,
        draft: Draft,
        hardware: Hardware,
        engine: Any,
        prefetch: DraftStagePrefetch | None,
    ) -> None:
        """`engine` is the `engine.engine.Engine` whose time it is."""
        self.draft = draft
        self._hardware, self._engine, self._prefetch = hardware, engine, prefetch
        self._costs = Costs(hardware, draft.geometry)
        self._worked_s = 0.0
        """Seconds of all drafting so far."""
        self._pass_index = -1
        self.notes: DraftNotes | None = None
        """The trace recorder's notes of all calls to this stage; None where none are kept."""
        self.is_open = False
        self.start_s = 0.0
        self.stall_s = 0.0
        """Seconds for which the draft waited for the link (`trigger=vanilla`)."""
        self.solution: dict[str, Any] | None = None
        """The cutoff solver's inputs and answer."""

    def plan(self, target: Geometry, capacity_bytes: Sequence[int]) -> None:
        """Solve for a draft-stage prefetcher's cutoff layer, with the hardware profile's times."""
        prefetch, draft, hardware = self._prefetch, self.draft.geometry, self._hardware
        if prefetch is None:
            return
        costs, drafting_s = Costs(hardware, draft), 0.0
        for layer in range(draft.num_layers):
            drafting_s += costs.dense_s(layer, 1)
            drafting_s += costs.experts_s(layer, draft.top_k, draft.top_k, self.draft.level)
        critical = prefetch.num_critical
        latency_s = (1 if prefetch.batched else critical) * hardware.link_latency_s
        loads = [
            latency_s + critical * levels[0] / hardware.link_rate for levels in target.expert_bytes
        ]
        layer_s = drafting_s / draft.num_layers
        self.solve(target, capacity_bytes, layer_s, loads, hardware.memory_bytes)

    def solve(
        self,
        target: Geometry,
        capacity_bytes: Sequence[int],
        draft_layer_s: float,
        load_layer_s: Sequence[float],
        memory_bytes: float,
    ) -> None:
        """Solve for the cutoff layer with these times (see `solve_cutoff`)."""
        prefetch, draft = self._prefetch, self.draft
        if prefetch is None:
            return
        max_experts = min(target.num_experts, draft.tokens * prefetch.num_critical)
        inputs: dict[str, Any] = {
            "draft_layers": draft.geometry.num_layers,
            "draft_layer_s": draft_layer_s,
            "load_layer_s": load_layer_s,
            "prefetched_bytes": [max_experts * levels[0] for levels in target.expert_bytes],
            "capacity_bytes": [*capacity_bytes],
            "other_bytes": sum(target.dense_bytes) + draft.nbytes,
            "memory_bytes": memory_bytes,
        }
        by_time, by_memory = solve_cutoff(**inputs)
        configured, answer = prefetch.cutoff, min(by_time, by_memory)
        prefetch.plan(answer)
        self.solution = {
            **{"asked": configured, "used": prefetch.cutoff, "answer": answer},
            **{"by_time": by_time, "by_memory": by_memory, "critical": prefetch.num_critical},
            "draft_layers": inputs.pop("draft_layers"),
            "draft_layer_ms": inputs.pop("draft_layer_s") * 1000,
            "load_layer_ms": [load_s * 1000 for load_s in inputs.pop("load_layer_s")],
            **inputs,
        }

    def begin(self, pass_index: int) -> None:
        """Begin drafting for the pass with this index, still to come."""
        self.is_open = True
        self.start_s, self.stall_s = self._engine.now, 0.0
        self._pass_index = pass_index
        if self.notes is not None:
            self.notes.begin()

    def dense(self, layer: int, num_tokens: int) -> None:
        """Charge a draft layer up to its attention output, while the link works on."""
        if self.notes is not None:
            self.notes.dense(layer, num_tokens)
        self._work(self._costs.dense_s(layer, num_tokens))

    def wants(self, layer: int) -> bool:
        """Whether `predict` should be called for this layer of the target."""
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
        self._engine.advance(self._costs.gates_s(1))
        keys = self._engine.rules.propose_draft(layer, logits)
        self._engine.submit_draft(keys, self._pass_index, prefetch.batched)
        self._engine.advance(0.0)

    def experts(self, layer: int, num_experts: int, num_tokens: int) -> None:
        """Charge a draft layer's experts, `num_experts` distinct ones."""
        if self.notes is not None:
            self.notes.experts(num_experts)
        assignments = num_tokens * self.draft.geometry.top_k
        self._work(self._costs.experts_s(layer, num_experts, assignments, self.draft.level))
        if self._prefetch is not None and self._prefetch.synchronous:
            self.stall_s += self._engine.await_prefetches()

    def _covers(self, layer: int) -> bool:
        return self._prefetch is not None and layer < int(self._prefetch.cutoff)

    def _work(self, seconds: float) -> None:
        """Advance by the time that a part of the draft takes."""
        # By the difference of sums: the last digits of a time decide which transfers have arrived.
        before_s, self._worked_s = self._worked_s, self._worked_s + seconds
        self._engine.advance(self._worked_s - before_s)


def solve_cutoff(
    *,
    draft_layers: int,
    draft_layer_s: float,
    load_layer_s: Sequence[float],
    prefetched_bytes: Sequence[int],
    capacity_bytes: Sequence[int],
    other_bytes: int,
    memory_bytes: float,
) -> tuple[int, int]:
    """Return (by time, by memory) the largest L such that the layers before L can be prefetched.

    The cutoff is the smaller of the two. Section 3.2 without its formulas: maximise the depth such
    that the peak of the other memory plus the prefetched experts stays within the capacity, and all
    prefetches complete during drafting, "no matter whether compute time or I/O time is the
    bottleneck"; where a layer's loading is shorter than its computation, all layers are covered.
    Our reading: sum over l < L of max(compute, loading of l) <= the draft's layers x compute, per
    token (for more tokens both sides grow alike); and the experts of all drafted tokens in those
    layers fit into the cache, and with everything else into the device.

    Args:
        draft_layers: Layers of the draft.
        draft_layer_s: Compute of one of them for one token, on average.
        load_layer_s: Per MoE layer of the target, the time to load its critical experts.
        prefetched_bytes: Per MoE layer, the bytes of all experts that drafted tokens may ask for.
        capacity_bytes: Of the cache: one number, or one per layer with a cache of its own.
        other_bytes: Memory outside the cache: the target's other weights and the draft.
        memory_bytes: Of the device.
    """
    drafting_s = draft_layers * draft_layer_s
    # Sums of equal floats: without a margin, "shorter than the computation" could miss by a digit.
    margin_s = 1e-9 * drafting_s
    by_time = _longest([max(draft_layer_s, s) for s in load_layer_s], drafting_s + margin_s)
    by_memory = _longest(prefetched_bytes, memory_bytes - other_bytes)
    if len(capacity_bytes) == 1:
        return by_time, min(by_memory, _longest(prefetched_bytes, capacity_bytes[0]))
    fits = [n <= c for n, c in zip(prefetched_bytes, capacity_bytes, strict=True)]
    return by_time, min(by_memory, [*fits, False].index(False))


def _longest(costs: Sequence[float], budget: float) -> int:
    """Return how many of the first costs fit into a budget together."""
    return sum(total <= budget for total in accumulate(costs))
