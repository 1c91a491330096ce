"""Virtual time: a clock and a link driven by the figures of a hardware profile."""

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
# and the device profiles model such an engine. A gate used as a predictor is a product, a cast
# and a softmax.
DENSE_KERNELS = 30
EXPERT_KERNELS = 15
GATE_KERNELS = 3


class VirtualClock:
    """Discrete time: each step takes max(FLOP / peak, bytes / memory bandwidth) + overheads.

    A pass of n tokens through a part with W weights costs 2 W n FLOP and reads W once. Attention
    over the context and the KV cache are left out unless `attention_s` is set for a pass
    (`attention=context`): they are the same for every policy, and small beside the weights at the
    tasks' context lengths.

    Experts stored at a low precision are read at that precision's bytes and multiplied at the
    compute dtype, as by kernels that dequantise in registers: FLOP follow the number of weights,
    and no dequantised copy goes through memory. Kernels are per format: an event whose experts have
    several levels launches them once per level.
    """

    def __init__(self, hardware: Hardware, geometry: Geometry) -> None:
        self.now = 0.0
        self.attention_s = 0.0
        """Seconds of each layer's attention to the context, in the pass in progress."""
        self._hardware = hardware
        flop_s_per_byte = 2 / geometry.element_bytes / hardware.peak_flops
        self._dense = tuple(
            (size * flop_s_per_byte, size / hardware.memory_bytes_per_s)
            for size in geometry.dense_bytes
        )
        compute_bytes = geometry.compute_bytes or [levels[0] for levels in geometry.expert_bytes]
        self._expert = tuple(
            tuple((nbytes * flop_s_per_byte, size / hardware.memory_bytes_per_s) for size in levels)
            for nbytes, levels in zip(compute_bytes, geometry.expert_bytes, strict=True)
        )
        layer_s = DENSE_KERNELS * hardware.kernel_overhead_s + hardware.layer_overhead_s
        # A pass's work outside its layers is charged to the first layer's dense part.
        self._dense_overhead_s = [layer_s + hardware.pass_overhead_s]
        self._dense_overhead_s += [layer_s] * (len(self._dense) - 1)
        self._overhead_s = layer_s + hardware.pass_overhead_s / len(self._dense)
        self.wait_overhead_s = hardware.wait_overhead_s
        self._load_overhead_s_per_byte = hardware.load_overhead_s_per_byte
        self.expert_overhead_s = EXPERT_KERNELS * hardware.kernel_overhead_s
        self._gate_s = GATE_KERNELS * hardware.kernel_overhead_s

    @property
    def overhead_s(self) -> float:
        """Mean seconds of a layer's overheads, beyond its arithmetic and memory traffic."""
        return self._overhead_s + self.expert_overhead_s

    def synchronize(self) -> None:
        """Do nothing: every step was charged when it was taken."""
        return

    def wait_until(self, time_s: float) -> float:
        """Stall the compute until `time_s`; return the seconds of the stall."""
        stall_s = time_s - self.now
        if stall_s <= 0:
            return 0.0
        self.now = time_s
        return stall_s

    def load(self, nbytes: int) -> None:
        """Charge the compute's overhead of loading these bytes."""
        self.now += self._load_overhead_s_per_byte * nbytes

    def await_link(self, time_s: float) -> float:
        """Wait for a transfer that arrives at `time_s`; return the seconds of the stall.

        Any wait also costs the profile's `wait_overhead_s`, which does not count as a stall.
        """
        stall_s = self.wait_until(time_s)
        if stall_s:
            self.now += self.wait_overhead_s
        return stall_s

    def dense(self, layer: int, num_tokens: int) -> None:
        """Charge the dense part before a layer's experts (attention, norms, router ...)."""
        self.now += self.dense_s(layer, num_tokens)

    def dense_s(self, layer: int, num_tokens: int) -> float:
        """Return the seconds of that dense part, attention to the context included."""
        flop_s, read_s = self._dense[layer]
        flop_s *= num_tokens
        weights_s = flop_s if flop_s > read_s else read_s
        return weights_s + self._dense_overhead_s[layer] + self.attention_s

    def gates(self, num_gates: int) -> float:
        """Return the seconds of applying `num_gates` more gates as predictors."""
        return num_gates * self._gate_s

    def network(self, cost: PredictorCost, num_tokens: int) -> float:
        """Return the seconds of a small network beside the model, for `num_tokens` tokens."""
        hardware = self._hardware
        flop_s = 2 * cost.num_weights * num_tokens / hardware.peak_flops
        read_s = cost.num_bytes / hardware.memory_bytes_per_s
        return max(flop_s, read_s) + cost.num_kernels * hardware.kernel_overhead_s

    def expert_parts_s(self, layer: int) -> tuple[float, float]:
        """Return an expert's seconds of arithmetic per token, and of reading it (best level)."""
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
        """Charge `num_experts` experts of a layer for `num_assignments` (token, expert) pairs.

        Experts whose event has its kernels `launched` already pay no launch overhead; `share` is
        the part of their weights that is executed (one projection of several).
        """
        if not num_experts:
            return
        flop_s, read_s = self._expert[layer][level]
        flop_s *= num_assignments
        read_s *= num_experts
        overhead_s = 0.0 if launched else self.expert_overhead_s
        # A single addition: the last digits of a time decide which transfers have arrived.
        self.now += share * (flop_s if flop_s > read_s else read_s) + overhead_s


def attention_s(model: RealModel, hardware: Hardware, phase: str, positions: IntArray) -> float:
    """Return the mean seconds of one layer's attention to the context in a pass.

    `positions` are those of the pass's tokens in their sequences [tokens]. Each token attends to
    itself and the tokens before it, within the layer's window; each sequence's KV cache, and any
    state of linear attention, is read once. A decode pass has one token of each sequence; in other
    passes the tokens of a sequence are consecutive.
    """
    lengths = positions + 1
    multiply_adds = 0.0
    for cache in model.caches:
        attended = lengths if cache.window is None else np.minimum(lengths, cache.window)
        multiply_adds += cache.num_layers * cache.multiply_adds * float(attended.sum())
    last = np.append(np.diff(positions) != 1, True)
    ends = lengths if phase == DECODE else lengths[last]
    nbytes = sum(model.kv_bytes(end) for end in ends.tolist())
    read_s = nbytes / hardware.memory_bytes_per_s
    return max(2 * multiply_adds / hardware.peak_flops, read_s) / model.num_layers


class VirtualLink(Link):
    """One transfer at a time; each takes latency + bytes / bandwidth seconds.

    With `fifo` everything moves in order of issue: prefetches are neither overtaken by demands nor
    withdrawn when their event is over. This is CommitMoE's premise of transfers that "cannot be
    canceled once initiated".

    Where the profile has several lanes, or experts are read by projections, an event's demands move
    as one `batch` over the lanes. Prefetches go one at a time, at the rate of one request.
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
        """Batch of the last transfer; the next one joins it if nothing comes between."""

    @property
    def active(self) -> bool:
        return self.inflight is not None or bool(self._queued)

    def without_pending(self, keys: Sequence[int]) -> list[int]:
        queued, inflight = self._queued, self.inflight
        return [key for key in keys if key not in queued and key != inflight]

    def batch(self, sizes: Sequence[int], now: float) -> list[list[float]]:
        """Move an event's demands over the lanes, starting at `now` or once the link is free.

        Where experts are read by projections, the first projection of every expert goes first.
        Returns, for each expert, the arrival times of its reads.
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
        """Return the seconds of a single transfer over a free link, latency included."""
        return self._latency_s + nbytes / self._bytes_per_s

    def transfer(self, nbytes: int, now: float, joins: bool = False) -> float:
        """Move `nbytes` once the link is free, not before `now`; return the arrival time.

        A transfer that `joins` the previous one in a batch pays no latency of its own.
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
        """Move activations: as `transfer`, but not counted as a transfer of experts."""
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
        """Begin a queued prefetch; no other may be in flight."""
        assert self.inflight is None, f"key {self.inflight} is still in flight"
        batch = self.withdraw(key)[2]
        joins = batch is not None and batch == self._open_batch and now <= self.busy_until
        self.transfer(nbytes, now, joins)
        self._open_batch = batch
        self.inflight = key

    def land(self) -> int:
        """Take the prefetch in flight, which has arrived, off the link; return its key."""
        assert self.inflight is not None, "nothing is in flight"
        key, self.inflight = self.inflight, None
        return key


def read_shares(reads: int) -> tuple[float, ...]:
    """Return the share of an expert's weights that each of its reads brings, in order.

    An expert has three projections of equal size: gate, up, down. With two reads, as in engines
    that keep gate and up in one tensor, the first brings two of the three.
    """
    return (2 / 3, 1 / 3) if reads == 2 else (1 / reads,) * reads


@lru_cache(maxsize=4096)
def arrivals(
    sizes: tuple[float, ...], *, lanes: int, lane_rate: float, link_rate: float, latency_s: float
) -> tuple[float, ...]:
    """Return each request's arrival time, in seconds from the start of the first.

    Requests are served in order, up to `lanes` at once. Each waits its latency, then moves at
    `lane_rate` or at its share of `link_rate`, whichever is lower (bytes/s). Cost: O(requests x
    lanes).
    """
    times = [0.0] * len(sizes)
    waiting: dict[int, float] = {}
    """Request in a lane -> seconds until it begins to move."""
    moving: dict[int, float] = {}
    """Request in a lane -> bytes left."""
    now, begun = 0.0, 0
    while begun < len(sizes) or waiting or moving:
        while begun < len(sizes) and len(waiting) + len(moving) < lanes:
            waiting[begun] = latency_s
            begun += 1
        rate = min(lane_rate, link_rate / max(len(moving), 1))
        steps = [(wait_s, request) for request, wait_s in waiting.items()]
        steps += [(nbytes / rate, request) for request, nbytes in moving.items()]
        step_s, first = min(steps)
        now += step_s
        waiting = {request: wait_s - step_s for request, wait_s in waiting.items()}
        moving = {request: nbytes - rate * step_s for request, nbytes in moving.items()}
        if first in waiting:
            del waiting[first]
            moving[first] = float(sizes[first])
        else:
            del moving[first]
            times[first] = now
    return tuple(times)
