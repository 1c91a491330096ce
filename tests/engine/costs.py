"""How long each step takes on a hardware profile: the oracle's arithmetic, without any state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.algorithms.learned.predictor import PredictorCost
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware

DENSE_KERNELS, EXPERT_KERNELS, GATE_KERNELS = 30, 15, 3


class Costs:
    """Seconds of a model's parts: max(FLOP / peak, bytes / bandwidth), and kernels' launches."""

    def __init__(self, hardware: Hardware, geometry: Geometry) -> None:
        self.hw, self.g = hardware, geometry
        self.weights = geometry.compute_bytes or [sizes[0] for sizes in geometry.expert_bytes]
        self.launch_s = EXPERT_KERNELS * hardware.kernel_overhead_s
        self.gate_s = GATE_KERNELS * hardware.kernel_overhead_s

    def roofline_s(self, flops: float, nbytes: float, tokens: int, read_s: float) -> float:
        return max(nbytes * (2 / self.g.element_bytes / flops) * tokens, read_s)

    def dense_s(self, layer: int, tokens: int) -> float:
        """A layer up to its experts; a pass's work outside its layers is the first layer's."""
        hw, nbytes = self.hw, self.g.dense_bytes[layer]
        fixed_s = DENSE_KERNELS * hw.kernel_overhead_s + hw.layer_overhead_s
        fixed_s += 0.0 if layer else hw.pass_overhead_s
        read_s = nbytes / hw.memory_bytes_per_s
        return self.roofline_s(hw.peak_flops, nbytes, tokens, read_s) + fixed_s

    def experts_s(self, layer: int, count: int, served: int, level: int = 0) -> float:
        """`count` experts for `served` (token, expert) pairs, without launches."""
        read_s = self.g.expert_bytes[layer][level] / self.hw.memory_bytes_per_s * count
        return self.roofline_s(self.hw.peak_flops, self.weights[layer], served, read_s)

    def gates_s(self, event: Event) -> float:
        """The next layers' gates, applied as predictors."""
        return len(event.predicted) * self.gate_s

    def network_s(self, cost: PredictorCost, tokens: int) -> float:
        """A small network next to the model."""
        flop_s = 2 * cost.num_weights * tokens / self.hw.peak_flops
        roofline_s = max(flop_s, cost.num_bytes / self.hw.memory_bytes_per_s)
        return roofline_s + cost.num_kernels * self.hw.kernel_overhead_s

    def attention_s(self, model: Any, phase: str, positions: Sequence[int]) -> float:
        """A layer's attention of tokens at these positions, and its reading of the KV cache."""
        flops, nbytes = 0.0, 0
        for kind in model.caches:
            attended = sum(min(at + 1, kind.window or math.inf) for at in positions)
            flops += 2 * kind.num_layers * kind.multiply_adds * attended
        for at, after in zip(positions, [*positions[1:], -1], strict=True):
            if phase == DECODE or after != at + 1:
                nbytes += model.kv_bytes(at + 1)
        seconds = max(flops / self.hw.peak_flops, nbytes / self.hw.memory_bytes_per_s)
        return float(seconds / model.num_layers)

    def lanes(self, reads: Sequence[float]) -> list[float]:
        """When each request ends: in order over the lanes, a latency each, then an equal share."""
        left = dict(enumerate(reads))
        waits = dict.fromkeys(left, self.hw.link_latency_s)
        ends, now = [0.0] * len(reads), 0.0
        while left:
            served = list(left)[: self.hw.link_lanes]
            moving = [i for i in served if i not in waits]
            rate = min(self.hw.lane_rate, self.hw.link_rate / max(1, len(moving)))
            step, first = min((waits[i] if i in waits else left[i] / rate, i) for i in served)
            now += step
            for i in served:
                if i in waits:
                    waits[i] -= step
                else:
                    left[i] -= rate * step
            if first in waits:
                del waits[first]
            else:
                del left[first]
                ends[first] = now
        return ends

    def activations(self, tokens: int) -> int:
        """Bytes of an expert's input, or output."""
        return int(tokens * self.g.hidden_size * self.g.element_bytes)

    def host_share(
        self,
        rule: str,
        event: Event,
        tokens: Mapping[int, int],
        now: float,
        link: float,
        host: float,
    ) -> tuple[set[int], float]:
        """Divide an event's absent experts; return the host's, and the seconds it takes for them.

        `tokens` are those that each expert serves, `link` and `host` the times they are free.
        """
        hw, size = self.hw, self.g.expert_bytes[event.layer][0]
        load_s = hw.link_latency_s + size / hw.link_rate
        cross_s = hw.link_latency_s + self.activations(len(event.experts)) / hw.link_rate
        nbytes, read_s = self.weights[event.layer], size / hw.host_memory_bytes_per_s
        on_host = {k: self.roofline_s(hw.host_flops, nbytes, n, read_s) for k, n in tokens.items()}
        on_device = {key: self.experts_s(event.layer, 1, n) for key, n in tokens.items()}
        chosen = set(tokens)
        if rule == "first":
            both_s = cross_s + cross_s
            chosen = {k for k in tokens if both_s + on_host[k] < load_s + on_device[k]}
        elif rule == "balanced":  # the host's cheapest or the link's dearest, whichever ends first
            chosen, left = set(), sorted(tokens, key=lambda key: (on_host[key], key))
            link, device, host = max(now, link), now, max(now + cross_s, host)
            while left:
                by_link = max(link + load_s, device) + on_device[left[-1]]
                if host + on_host[left[0]] + cross_s < by_link:
                    host += on_host[left[0]]
                    chosen.add(left.pop(0))
                else:
                    link, device = link + load_s, by_link
                    left.pop()
        return chosen, sum(seconds for key, seconds in on_host.items() if key in chosen)
