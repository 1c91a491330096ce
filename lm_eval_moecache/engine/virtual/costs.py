"""What the parts of a pass cost in virtual time, by the figures of a hardware profile."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lm_eval_moecache.algorithms.learned.predictor import PredictorCost
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.real_model import RealModel

# Kernels launched per layer and pass. Eager transformers launches 52 before the experts of an OLMoE
# layer and 16 in them (DECISIONS.md, section 6); engines fuse norms, casts and rotary embedding,
# and the device profiles model such an engine. A gate used as a predictor is a product, a cast
# and a softmax.
DENSE_KERNELS = 30
EXPERT_KERNELS = 15
GATE_KERNELS = 3


class Costs:
    """Seconds of each part of a pass: max(FLOP / peak, bytes / memory bandwidth) + overheads.

    A pass of n tokens through a part with W weights costs 2 W n FLOP and reads W once. Attention
    over the context and the KV cache are left out (`attention_s` has them, for
    `attention=context`): they are the same for every policy, and small against the weights at the
    tasks' context lengths.

    Experts stored at a low precision are read at that precision's bytes and multiplied at the
    compute dtype, as by kernels that dequantise in registers: FLOP follow the number of weights,
    and no dequantised copy goes through memory. Kernels are per format: an event whose experts have
    several levels launches them once per level.
    """

    def __init__(self, hardware: Hardware, geometry: Geometry) -> None:
        self._hardware = hardware
        flop_s_per_byte = 2 / geometry.element_bytes / hardware.peak_flops
        self._dense = tuple(
            (size * flop_s_per_byte, size / hardware.memory_bytes_per_s)
            for size in geometry.dense_bytes
        )
        compute_bytes = geometry.compute_bytes or [levels[0] for levels in geometry.expert_bytes]
        self.expert_parts_s = tuple(
            tuple((nbytes * flop_s_per_byte, size / hardware.memory_bytes_per_s) for size in levels)
            for nbytes, levels in zip(compute_bytes, geometry.expert_bytes, strict=True)
        )
        """[layer][level] An expert's seconds of arithmetic per token, and of reading it."""
        layer_s = DENSE_KERNELS * hardware.kernel_overhead_s + hardware.layer_overhead_s
        # A pass's work outside its layers is charged to the first layer's dense part.
        self._dense_overhead_s = [layer_s + hardware.pass_overhead_s]
        self._dense_overhead_s += [layer_s] * (len(self._dense) - 1)
        self._overhead_s = layer_s + hardware.pass_overhead_s / len(self._dense)
        self.expert_overhead_s = EXPERT_KERNELS * hardware.kernel_overhead_s
        self._gate_s = GATE_KERNELS * hardware.kernel_overhead_s

    @property
    def overhead_s(self) -> float:
        """Mean seconds of a layer's overheads, beyond its arithmetic and memory traffic."""
        return self._overhead_s + self.expert_overhead_s

    def dense_s(self, layer: int, num_tokens: int) -> float:
        """Return the seconds before a layer's experts (attention, norms, router ...)."""
        flop_s, read_s = self._dense[layer]
        flop_s *= num_tokens
        weights_s = flop_s if flop_s > read_s else read_s
        return weights_s + self._dense_overhead_s[layer]

    def gates_s(self, num_gates: int) -> float:
        """Return the seconds of applying `num_gates` more gates as predictors."""
        return num_gates * self._gate_s

    def network_s(self, cost: PredictorCost, num_tokens: int) -> float:
        """Return the seconds of a small network next to the model, for `num_tokens` tokens."""
        hardware = self._hardware
        flop_s = 2 * cost.num_weights * num_tokens / hardware.peak_flops
        read_s = cost.num_bytes / hardware.memory_bytes_per_s
        return max(flop_s, read_s) + cost.num_kernels * hardware.kernel_overhead_s

    def experts_s(
        self, layer: int, num_experts: int, num_assignments: int, level: int = 0
    ) -> float:
        """Return the seconds of some experts of a layer, for (token, expert) pairs."""
        if not num_experts:
            return 0.0
        flop_s, read_s = self.expert_parts_s[layer][level]
        return max(flop_s * num_assignments, read_s * num_experts) + self.expert_overhead_s


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
