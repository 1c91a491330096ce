"""The virtual clock: a roofline of the hardware profile says how long each step takes."""

from __future__ import annotations

import numpy as np

from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.emulation import RealModel
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware

# Kernels launched per layer and pass. Eager transformers launches 52 before the experts of an OLMoE
# layer and 16 in them (benchmarks/kernels.py); engines fuse norms, casts and rotary embedding, and
# the device profiles stand for such an engine. A gate used as a predictor is a product, a cast and
# a softmax.
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

    def network(self, num_weights: int, nbytes: int, num_kernels: int, num_tokens: int) -> float:
        """Return the seconds that a small network beside the model takes for a pass's tokens."""
        hardware = self._hardware
        flop_s = 2 * num_weights * num_tokens / hardware.peak_flops
        read_s = nbytes / hardware.memory_bytes_per_s
        return max(flop_s, read_s) + num_kernels * hardware.kernel_overhead_s

    def expert_s(self, layer: int, num_assignments: int) -> float:
        """Return what one expert of a layer adds to its event, kernels apart (best level)."""
        flop_s, read_s = self._expert[layer][0]
        return max(flop_s * num_assignments, read_s)

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
