"""What the parts of a pass cost in virtual time, by the figures of a hardware profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lm_eval_moecache.algorithms.learned.predictor import PredictorCost
from lm_eval_moecache.engine.setting import check_host
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
        self._hardware, self._geometry = hardware, geometry
        flop_s_per_byte = 2 / geometry.element_bytes / hardware.peak_flops
        compute_bytes = geometry.compute_bytes or [levels[0] for levels in geometry.expert_bytes]
        self.expert_parts_s = tuple(
            tuple((nbytes * flop_s_per_byte, size / hardware.memory_bytes_per_s) for size in levels)
            for nbytes, levels in zip(compute_bytes, geometry.expert_bytes, strict=True)
        )
        """[layer][level] An expert's seconds of arithmetic per token, and of reading it."""
        layer_s = DENSE_KERNELS * hardware.kernel_overhead_s + hardware.layer_overhead_s
        # A pass's work outside its layers is charged to the first layer's dense part.
        pass_s = hardware.pass_overhead_s
        self.dense_parts_s = tuple(
            (
                size * flop_s_per_byte,
                size / hardware.memory_bytes_per_s,
                layer_s if layer else layer_s + pass_s,
            )
            for layer, size in enumerate(geometry.dense_bytes)
        )
        """[layer] Seconds before its experts: of arithmetic per token, of reading, of launches."""
        self.expert_overhead_s = EXPERT_KERNELS * hardware.kernel_overhead_s
        self.overhead_s = layer_s + pass_s / len(geometry.dense_bytes) + self.expert_overhead_s
        """Mean seconds of a layer's overheads, beyond its arithmetic and memory traffic."""

    def on_host(self) -> Costs:
        """Return the same costs on the profile's host; ValueError if it has no figures of one."""
        hardware = self._hardware
        check_host(hardware)
        assert hardware.host_flops and hardware.host_memory_bytes_per_s
        flops, bytes_per_s = hardware.host_flops, hardware.host_memory_bytes_per_s
        host = replace(hardware, peak_flops=flops, memory_bytes_per_s=bytes_per_s)
        return Costs(host, self._geometry)

    def dense_s(self, layer: int, num_tokens: int) -> float:
        """Return the seconds before a layer's experts (attention, norms, router ...)."""
        flop_s, read_s, overhead_s = self.dense_parts_s[layer]
        return max(flop_s * num_tokens, read_s) + overhead_s

    def gates_s(self, num_gates: int) -> float:
        """Return the seconds of applying `num_gates` more gates as predictors."""
        return num_gates * (GATE_KERNELS * self._hardware.kernel_overhead_s)

    def network_s(self, cost: PredictorCost, num_tokens: int) -> float:
        """Return the seconds of a small network next to the model, for `num_tokens` tokens."""
        flop, read_s, overhead_s = self.network_parts(cost)
        return max(flop * num_tokens / self._hardware.peak_flops, read_s) + overhead_s

    def network_parts(self, cost: PredictorCost) -> tuple[float, float, float]:
        """Return what it takes: FLOP a token, seconds of reading, of launches."""
        hardware = self._hardware
        read_s = cost.num_bytes / hardware.memory_bytes_per_s
        return 2.0 * cost.num_weights, read_s, cost.num_kernels * hardware.kernel_overhead_s

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
