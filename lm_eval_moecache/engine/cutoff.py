"""SP-MoE's cutoff layer: how many layers draft-stage prefetch can cover (section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware


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
