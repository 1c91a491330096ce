"""The host as a second server: experts computed where their weights are stored, under either clock.

Like the link it serves one at a time: one expert on all its cores. Experts it executes do not
become resident; the activations cross the link to the host and back.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lm_eval_moecache.engine import core
from lm_eval_moecache.engine.setting import check_host
from lm_eval_moecache.engine.virtual.costs import Costs
from lm_eval_moecache.records.event import DROPPED, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import Counters

if TYPE_CHECKING:
    from lm_eval_moecache.engine.wall.link import WallLink

ALWAYS, FIRST, BALANCED = RULES = ("always", "first", "balanced")
HOST = -1
"""In a wave, in place of a slot: the expert is executed on the host, where it is stored."""


class Work(NamedTuple):
    """One absent expert of an event, and the seconds that each way of serving it takes."""

    key: int
    load_s: float
    """Its transfer over a free link, latency included."""
    device_s: float
    """Its execution on the device once it has arrived."""
    host_s: float
    """Its execution on a free host."""


def share_out(
    rule: str,
    works: Sequence[Work],
    *,
    now: float,
    link_free: float,
    host_free: float,
    out_s: float,
    back_s: float,
) -> set[int]:
    """Choose which absent experts of an event are executed on the host; the others are loaded.

    `out_s` and `back_s` are the seconds that activations take to the host and back. The rules:

    - `always`: all of them (llama.cpp's expert offload, ktransformers).
    - `first`: each expert on its own goes where it would end first with everything idle: to the
      host and back, or over the link to the device (Fiddler, algorithm 1). Ties go to the link,
      because a loaded expert stays.
    - `balanced`: host and link at once. The host takes the cheapest expert left, the link the most
      expensive, whichever would end first (HybriMoE's intra-layer schedule, without its moving of
      resident experts to an idle host). Ties go to the link.
    """
    if rule == ALWAYS:
        return {work.key for work in works}
    if rule == FIRST:
        activations_s = out_s + back_s
        return {w.key for w in works if activations_s + w.host_s < w.load_s + w.device_s}
    device_s, link_s, host_s = now, max(now, link_free), max(now + out_s, host_free)
    queue = sorted(works, key=lambda work: (work.host_s, work.key))
    chosen: set[int] = set()
    low, high = 0, len(queue) - 1
    while low <= high:
        cheap, costly = queue[low], queue[high]
        arrives_s = link_s + costly.load_s
        by_link_s = max(arrives_s, device_s) + costly.device_s
        if host_s + cheap.host_s + back_s < by_link_s:
            chosen.add(cheap.key)
            host_s += cheap.host_s
            low += 1
        else:
            link_s, device_s = arrives_s, by_link_s
            high -= 1
    return chosen


def _tokens_by_expert(event: Event, num_experts: int) -> Sequence[int]:
    """Return the number of tokens that each expert of the event's layer serves [experts]."""
    if not len(event.experts):
        return [1] * num_experts
    executed = event.experts[event.experts != DROPPED]
    counts: list[int] = np.bincount(executed, minlength=num_experts).tolist()
    return counts


def _roofline(parts: tuple[float, float], tokens: int) -> float:
    """Return the seconds one expert takes for `tokens`, reading its weights once for all."""
    flop_s, read_s = parts
    return max(flop_s * tokens, read_s)


class HostStage:
    """The host's part of each event under the virtual clock.

    It begins before the event's loads, and ends after its last device kernel.
    """

    def __init__(self, rule: str, hardware: Hardware, geometry: Geometry, costs: Costs) -> None:
        check_host(hardware)
        assert hardware.host_flops and hardware.host_memory_bytes_per_s
        self._rule, self._costs, self._geometry = rule, costs, geometry
        self._latency_s = hardware.link_latency_s
        self._link_bytes_per_s, self._bytes_per_s = hardware.link_rate, hardware.lane_rate
        flops, bytes_per_s = hardware.host_flops, hardware.host_memory_bytes_per_s
        host = replace(hardware, peak_flops=flops, memory_bytes_per_s=bytes_per_s)
        self._host_costs = Costs(host, geometry)
        self.busy_until = 0.0
        self.is_open = False
        """Whether the host executes a part of the event in progress."""
        self._activation_bytes = 0

    def begin(
        self, state: core.State, event: Event, missing: Sequence[int], count: Counters
    ) -> tuple[Set[int], int, float]:
        """Give the host its share of an event's missing keys.

        Returns those keys, how many (token, expert) pairs they serve, and when the host begins.
        """
        geometry, layer, experts = self._geometry, event.layer, event.experts
        base, load_bytes = layer * geometry.num_experts, geometry.expert_bytes[layer][0]
        tokens_of = _tokens_by_expert(event, geometry.num_experts)
        load_s = self._latency_s + load_bytes / self._link_bytes_per_s
        on_device = self._costs.expert_parts_s[layer][0]
        on_host = self._host_costs.expert_parts_s[layer][0]
        works = [
            Work(key, load_s, _roofline(on_device, tokens), _roofline(on_host, tokens))
            for key, tokens in ((key, tokens_of[key - base]) for key in missing)
        ]
        crossing_s = self._latency_s + self._nbytes(event.num_tokens) / self._link_bytes_per_s
        run = state.run[0]
        chosen = share_out(
            self._rule,
            works,
            now=run.now,
            link_free=run.busy_until,
            host_free=self.busy_until,
            out_s=crossing_s,
            back_s=crossing_s,
        )
        if not chosen:
            return chosen, 0, 0.0
        num_tokens = 1
        if len(experts):
            is_chosen = np.isin(experts + base, list(chosen)) & (experts != DROPPED)
            num_tokens = int(is_chosen.any(axis=-1).sum())
        # The host begins once the activations have arrived, and goes in order of need.
        self._activation_bytes = self._nbytes(num_tokens)
        arrival_s = self._carry(state, run.now)
        seconds = sum(work.host_s for work in works if work.key in chosen)
        begun_s = max(arrival_s, self.busy_until)
        self.busy_until = begun_s + seconds
        self.is_open = True
        num_served = sum(int(tokens_of[key - base]) for key in chosen)
        count.host_s += seconds
        count.host_executed += num_served
        return chosen, num_served, begun_s

    def end(self, state: core.State, count: Counters) -> None:
        """Send the outputs back once the host is done; the compute waits for them."""
        arrival_s = self._carry(state, self.busy_until)
        count.host_wait_s += core.wait_until(state, arrival_s)
        self.is_open = False

    def _carry(self, state: core.State, now: float) -> float:
        """Move activations, which are not counted as a transfer of experts; return the arrival."""
        state.run[0].open_batch = -1
        seconds = self._activation_bytes / self._bytes_per_s + self._latency_s
        return core.occupy(state, now, seconds, self._activation_bytes, -1)

    def _nbytes(self, num_tokens: int) -> int:
        return int(num_tokens * self._geometry.hidden_size * self._geometry.element_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCosts:
    """Seconds measured before the first request (profiled offline by Fiddler, section 3.3).

    Executing one expert of the first layer takes `fixed + each * tokens`; other layers scale by
    expert bytes.
    """

    host_fixed_s: float
    host_each_s: float
    device_fixed_s: float
    device_each_s: float
    load_s: float
    """Loading one expert of the first layer over the real link."""
    way_s: float
    """Moving activations to the host, or back."""


class HostShare:
    """Divides an event's absent experts between the host and the real link, by measured times."""

    def __init__(self, rule: str, geometry: Geometry, link: WallLink) -> None:
        self._rule, self._geometry, self._link = rule, geometry, link
        self.costs: HostCosts | None = None
        """Set before the first event if `asks_for_costs`."""

    @property
    def asks_for_costs(self) -> bool:
        """Whether the rule needs measured times."""
        return self._rule != ALWAYS

    def choose(self, event: Event, fetches: Sequence[Fetch]) -> set[int]:
        """Return the keys of those fetches whose experts the host executes instead."""
        if not self.asks_for_costs:
            return {fetch.key for fetch in fetches}
        costs = self.costs
        assert costs is not None, "no times were measured"
        sizes, num_experts = self._geometry.expert_bytes, self._geometry.num_experts
        scale = sizes[event.layer][0] / sizes[0][0]
        tokens, base = _tokens_by_expert(event, num_experts), event.layer * num_experts
        works = [
            Work(
                fetch.key,
                load_s=costs.load_s * scale,
                device_s=scale * (costs.device_fixed_s + costs.device_each_s * num_tokens),
                host_s=scale * (costs.host_fixed_s + costs.host_each_s * num_tokens),
            )
            for fetch, num_tokens in ((fetch, tokens[fetch.key - base]) for fetch in fetches)
        ]
        return share_out(
            self._rule,
            works,
            now=0.0,
            link_free=len(self._link.demanded()) * costs.load_s * scale,
            host_free=0.0,
            out_s=costs.way_s,
            back_s=costs.way_s,
        )
