"""Virtual time: a clock and a link by the hardware profile's figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lm_eval_moecache.engine.cache import Link
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.emulation import RealModel
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.predictor import PredictorCost

# Kernels launched per layer and pass. Eager transformers launches 52 before the experts of an OLMoE
# layer and 16 in them (DECISIONS.md, section 6); engines fuse norms, casts and rotary embedding,
# and the device profiles stand for such an engine. A gate used as a predictor is a product, a cast
# and a softmax.
DENSE_KERNELS = 30
EXPERT_KERNELS = 15
GATE_KERNELS = 3


class VirtualClock:
    """Discrete time: each step takes max(FLOP / peak, bytes / memory bandwidth) + overheads.

    A pass over n tokens of a part with W weights costs 2 W n FLOP and reads W once. Attention
    over the context and the KV cache are left out unless somebody sets `attention_s` for a pass
    (`attention=context`): they are the same for every policy, and small beside the weights at the
    lengths the tasks have.

    Experts stored at a low precision are read at that precision's bytes and multiplied at the
    compute dtype, as kernels do that dequantise in registers: FLOP follow the number of weights,
    and no decoded copy goes through memory. Kernels are per format: an event whose experts have
    several levels launches them once for each.
    """

    def __init__(self, hardware: Hardware, geometry: Geometry) -> None:
        self.now = 0.0
        self.attention_s = 0.0
        """Of the pass in progress: what each layer's attention to the context takes."""
        self._hardware = hardware
        flop_s_per_byte = 2 / geometry.element_bytes / hardware.peak_flops
        self._dense = tuple(
            (size * flop_s_per_byte, size / hardware.memory_bytes_per_s)
            for size in geometry.dense_bytes
        )
        computed = geometry.compute_bytes or [levels[0] for levels in geometry.expert_bytes]
        self._expert = tuple(
            tuple((whole * flop_s_per_byte, size / hardware.memory_bytes_per_s) for size in levels)
            for whole, levels in zip(computed, geometry.expert_bytes, strict=True)
        )
        layer_s = DENSE_KERNELS * hardware.kernel_overhead_s + hardware.layer_overhead_s
        # What a pass does outside its layers is counted to the first one's dense part.
        self._dense_overhead_s = [layer_s + hardware.pass_overhead_s]
        self._dense_overhead_s += [layer_s] * (len(self._dense) - 1)
        self._overhead_s = layer_s + hardware.pass_overhead_s / len(self._dense)
        self.wait_overhead_s = hardware.wait_overhead_s
        self._load_overhead_s_per_byte = hardware.load_overhead_s_per_byte
        self.expert_overhead_s = EXPERT_KERNELS * hardware.kernel_overhead_s
        self._gate_s = GATE_KERNELS * hardware.kernel_overhead_s

    @property
    def overhead_s(self) -> float:
        """Seconds that a layer takes beside its arithmetic and its memory traffic, on average."""
        return self._overhead_s + self.expert_overhead_s

    def synchronize(self) -> None:
        """Every step has been accounted for when it was taken: there is nothing to wait for."""
        return

    def wait_until(self, time_s: float) -> float:
        """Let the compute stand still until `time_s`; return the seconds stood still."""
        stall_s = time_s - self.now
        if stall_s <= 0:
            return 0.0
        self.now = time_s
        return stall_s

    def load(self, nbytes: int) -> None:
        """Account for what the compute does about bytes that are to be loaded."""
        self.now += self._load_overhead_s_per_byte * nbytes

    def await_link(self, time_s: float) -> float:
        """Wait for what the link brings at `time_s`; return the seconds waited for it.

        To have waited at all costs the profile's `wait_overhead_s` more, which is no waiting.
        """
        stall_s = self.wait_until(time_s)
        if stall_s:
            self.now += self.wait_overhead_s
        return stall_s

    def dense(self, layer: int, num_tokens: int) -> None:
        """Account for the dense part before a layer's experts (attention, norms, router ...)."""
        self.now += self.dense_s(layer, num_tokens)

    def dense_s(self, layer: int, num_tokens: int) -> float:
        flop_s, read_s = self._dense[layer]
        flop_s *= num_tokens
        weights_s = flop_s if flop_s > read_s else read_s
        return weights_s + self._dense_overhead_s[layer] + self.attention_s

    def gates(self, num_gates: int) -> float:
        """Return the seconds that applying `num_gates` further gates as predictors takes."""
        return num_gates * self._gate_s

    def network(self, cost: PredictorCost, num_tokens: int) -> float:
        """Return the seconds that a small network beside the model takes for a pass's tokens."""
        hardware = self._hardware
        flop_s = 2 * cost.num_weights * num_tokens / hardware.peak_flops
        read_s = cost.num_bytes / hardware.memory_bytes_per_s
        return max(flop_s, read_s) + cost.num_kernels * hardware.kernel_overhead_s

    def expert_parts_s(self, layer: int) -> tuple[float, float]:
        """Return what an expert's arithmetic takes for a token, and reading it (best level)."""
        return self._expert[layer][0]

    def experts(
        self,
        layer: int,
        num_experts: int,
        num_assignments: int,
        level: int = 0,
        launched: bool = False,
        share: float = 1.0,
    ) -> None:
        """Account for `num_experts` experts of a layer serving `num_assignments` token slots.

        Those that follow others of their event in kernels `launched` already launch none; `share`
        is the part of the experts' weights (one projection of several).
        """
        if not num_experts:
            return
        flop_s, read_s = self._expert[layer][level]
        flop_s *= num_assignments
        read_s *= num_experts
        overhead_s = 0.0 if launched else self.expert_overhead_s
        # One addition: the last digits of a time decide what has arrived.
        self.now += share * (flop_s if flop_s > read_s else read_s) + overhead_s


def attention_s(model: RealModel, hardware: Hardware, phase: str, positions: IntArray) -> float:
    """Return the seconds a layer's attention to the context takes in a pass, on average.

    `positions` are those of the pass's tokens in their sequences. Each token attends to what is
    before it and itself, as far back as a layer's window goes; each sequence's KV cache is read
    once, and a state of linear attention with it. A decode pass has one token of each sequence;
    in others a sequence's tokens follow each other.
    """
    seen = positions + 1
    multiply_adds = 0.0
    for cache in model.caches:
        looked_at = seen if cache.window is None else np.minimum(seen, cache.window)
        multiply_adds += cache.num_layers * cache.multiply_adds * float(looked_at.sum())
    last = np.append(np.diff(positions) != 1, True)
    ends = seen if phase == DECODE else seen[last]
    nbytes = sum(model.kv_bytes(end) for end in ends.tolist())
    read_s = nbytes / hardware.memory_bytes_per_s
    return max(2 * multiply_adds / hardware.peak_flops, read_s) / model.num_layers


class VirtualLink(Link):
    """One transfer at a time; each takes latency + bytes / bandwidth seconds.

    With `fifo` everything moves in the order in which it was asked for: prefetches are neither
    overtaken by demands nor withdrawn when their event is over. That is CommitMoE's premise, of
    transfers that "cannot be canceled once initiated".

    Where the profile has lanes, or experts are read by their projections, an event's demands move
    as one `batch` over them. Prefetches go one at a time, at what one request gets.
    """

    def __init__(self, hardware: Hardware, fifo: bool = False, reads_per_expert: int = 1) -> None:
        super().__init__()
        self.fifo = fifo
        self._lanes, self._lane_rate = hardware.link_lanes, hardware.lane_rate
        self._shares = read_shares(reads_per_expert)
        self._latency_s = hardware.link_latency_s
        self._bytes_per_s = hardware.lane_rate
        self._link_rate = hardware.link_rate
        self.busy_until = 0.0
        self.inflight: int | None = None
        """Key of the prefetch in flight, which lands at `busy_until`."""
        self._open_batch: int | None = None
        """Batch of the last transfer, which the next one joins if nothing comes between."""

    @property
    def active(self) -> bool:
        return self.inflight is not None or bool(self._queued)

    def without_pending(self, keys: Sequence[int]) -> list[int]:
        queued, inflight = self._queued, self.inflight
        return [key for key in keys if key not in queued and key != inflight]

    def batch(self, sizes: Sequence[int], now: float) -> list[list[float]]:
        """Move an event's demands over the lanes, not before `now`.

        Read by projections, the first ones of all experts go first. Returns for each expert when
        each of its reads lands.
        """
        start = now if now > self.busy_until else self.busy_until
        count = len(sizes)
        times = arrivals(
            tuple([size * share for share in self._shares for size in sizes]),
            lanes=self._lanes,
            lane_rate=self._lane_rate,
            link_rate=self._link_rate,
            latency_s=self._latency_s,
        )
        self._open_batch = None
        self.busy_until = start + max(times)
        self.busy_s += self.busy_until - start
        self.bytes_moved += sum(sizes)
        self.transfers += count
        return [[start + at_s for at_s in times[i::count]] for i in range(count)]

    def duration_s(self, nbytes: int) -> float:
        """Return how long a transfer of its own takes on a free link."""
        return self._latency_s + nbytes / self._bytes_per_s

    def transfer(self, nbytes: int, now: float, joins: bool = False) -> float:
        """Move `nbytes` as soon as the link is free, not before `now`; return when they land.

        A transfer that `joins` the one before it, in one batch, pays no latency of its own.
        """
        start = now if now > self.busy_until else self.busy_until
        duration = nbytes / self._bytes_per_s
        if not joins:
            duration += self._latency_s
            self._open_batch = None
        self.busy_until = start + duration
        self.busy_s += duration
        self.bytes_moved += nbytes
        self.transfers += 1
        return self.busy_until

    def submit(
        self, keys: Sequence[int], due: int, now: float, batch: int | None = None
    ) -> Sequence[int]:
        return super().submit(keys, 0 if self.fifo else due, now, batch)

    def cancel_due(self, due: int) -> int:
        return 0 if self.fifo else super().cancel_due(due)

    def carry(self, nbytes: int, now: float) -> float:
        """Move activations, which are no expert: as `transfer`, and not counted among those."""
        self.transfers -= 1
        return self.transfer(nbytes, now)

    def peek(self) -> tuple[int, float] | None:
        """Return (key, earliest start) of the next queued prefetch, or None."""
        key = self.head()
        if key is None:
            return None
        submitted = self._queued[key][1]
        return key, submitted if submitted > self.busy_until else self.busy_until

    def postpone(self, key: int, until: float) -> None:
        """Keep a queued prefetch from starting before `until`."""
        due, _, batch = self._queued[key]
        self._queued[key] = (due, until, batch)

    def start(self, key: int, nbytes: int, now: float) -> None:
        """Begin a queued prefetch; the link must be free of another one in flight."""
        assert self.inflight is None, f"key {self.inflight} is still in flight"
        batch = self.withdraw(key)[2]
        joins = batch is not None and batch == self._open_batch and now <= self.busy_until
        self.transfer(nbytes, now, joins)
        self._open_batch = batch
        self.inflight = key

    def land(self) -> int:
        """Take the arrived prefetch off the link and return its key."""
        assert self.inflight is not None, "nothing is in flight"
        key, self.inflight = self.inflight, None
        return key


def read_shares(reads: int) -> tuple[float, ...]:
    """Return which part of an expert each of its reads brings, in their order.

    An expert is three projections of as many weights each: gate, up, down. Read by two, as engines
    do that keep gate and up in one tensor, the first read brings two of the three.
    """
    return (2 / 3, 1 / 3) if reads == 2 else (1 / reads,) * reads


@lru_cache(maxsize=4096)
def arrivals(
    sizes: tuple[float, ...], *, lanes: int, lane_rate: float, link_rate: float, latency_s: float
) -> tuple[float, ...]:
    """Return when each request has arrived, in seconds from the first one's start.

    Requests are served in their order, as many at once as there are `lanes`. Each waits its
    latency and then moves at `lane_rate`, or at its share of `link_rate` where too many move
    (bytes/s). Cost: O(requests x lanes).
    """
    times = [0.0] * len(sizes)
    waiting: dict[int, float] = {}
    """Request in a lane -> seconds until it moves."""
    moving: dict[int, float] = {}
    """Request in a lane -> bytes that are left."""
    now, begun = 0.0, 0
    while begun < len(sizes) or waiting or moving:
        while begun < len(sizes) and len(waiting) + len(moving) < lanes:
            waiting[begun] = latency_s
            begun += 1
        rate = min(lane_rate, link_rate / max(len(moving), 1))
        steps = [(wait_s, request) for request, wait_s in waiting.items()]
        steps += [(left / rate, request) for request, left in moving.items()]
        step_s, first = min(steps)
        now += step_s
        waiting = {request: wait_s - step_s for request, wait_s in waiting.items()}
        moving = {request: left - rate * step_s for request, left in moving.items()}
        if first in waiting:
            del waiting[first]
            moving[first] = float(sizes[first])
        else:
            del moving[first]
            times[first] = now
    return tuple(times)
