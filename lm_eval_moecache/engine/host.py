"""The host as a second server: experts computed where their weights lie, in either kind of time.

It is busy and idle as the link is, with one expert at a time on all its cores. What it works on
does not become resident; the activations cross the link on their way there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm_eval_moecache.engine.setting import check_host
from lm_eval_moecache.engine.virtual.link import VirtualClock, VirtualLink
from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.records.event import DROPPED, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import PassRecord

ALWAYS, FIRST, BALANCED = RULES = ("always", "first", "balanced")
HOST = -1
"""Stands in a wave for a slot: the expert is executed on the host, where it is stored."""


class Work(NamedTuple):
    """One absent expert of an event, and how long each way to serve it takes (seconds)."""

    key: int
    load_s: float
    """Its transfer over a free link, latency included."""
    device_s: float
    """Its share of the device's work once it is there."""
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

    `out_s` and `back_s` are what the activations take to the host and back. The rules:

    - `always`: all of them (llama.cpp's expert offload, ktransformers).
    - `first`: each for itself, whichever would end first with everything free: activations, host
      and back, or transfer and device (Fiddler, algorithm 1). Equal times go to the link, because
      a loaded expert stays.
    - `balanced`: both at once. The host takes from the cheap end, the link from the dear one, and
      whoever would end its next one first takes it (HybriMoE's intra-layer schedule, without its
      moving of resident experts to an idle host). Equal times go to the link.
    """
    if rule == ALWAYS:
        return {work.key for work in works}
    if rule == FIRST:
        ahead = out_s + back_s
        return {w.key for w in works if ahead + w.host_s < w.load_s + w.device_s}
    device_s, link_s, host_s = now, max(now, link_free), max(now + out_s, host_free)
    queue = sorted(works, key=lambda work: (work.host_s, work.key))
    chosen: set[int] = set()
    low, high = 0, len(queue) - 1
    while low <= high:
        cheap, dear = queue[low], queue[high]
        arrives_s = link_s + dear.load_s
        by_link_s = max(arrives_s, device_s) + dear.device_s
        if host_s + cheap.host_s + back_s < by_link_s:
            chosen.add(cheap.key)
            host_s += cheap.host_s
            low += 1
        else:
            link_s, device_s = arrives_s, by_link_s
            high -= 1
    return chosen


def _tokens_by_expert(event: Event, num_experts: int) -> Sequence[int]:
    """Return how many tokens each expert of the event's layer serves."""
    if not len(event.experts):
        return [1] * num_experts
    live = event.experts[event.experts != DROPPED]
    counts: list[int] = np.bincount(live, minlength=num_experts).tolist()
    return counts


def _roofline(parts: tuple[float, float], tokens: int) -> float:
    """Return what an expert takes for so many tokens, whose weights are read once for all."""
    flop_s, read_s = parts
    return max(flop_s * tokens, read_s)


class HostStage:
    """The host's part of each event in virtual time.

    It begins before the event's loads, and ends after its last device kernel.
    """

    def __init__(
        self,
        rule: str,
        hardware: Hardware,
        geometry: Geometry,
        link: VirtualLink,
        clock: VirtualClock,
    ) -> None:
        check_host(hardware)
        assert hardware.host_flops and hardware.host_memory_bytes_per_s
        self._rule, self._link, self._clock = rule, link, clock
        self._geometry = geometry
        self._latency_s = hardware.link_latency_s
        self._link_bytes_per_s = hardware.link_rate
        flop_s_per_byte = 2 / geometry.element_bytes / hardware.host_flops
        computed = geometry.compute_bytes or [levels[0] for levels in geometry.expert_bytes]
        self._expert = tuple(
            (whole * flop_s_per_byte, levels[0] / hardware.host_memory_bytes_per_s)
            for whole, levels in zip(computed, geometry.expert_bytes, strict=True)
        )
        self.busy_until = 0.0
        self.is_open = False
        """Whether the event in progress has a part on the host."""
        self._activation_bytes = 0

    def begin(
        self, event: Event, fetches: Sequence[Fetch], record: PassRecord
    ) -> tuple[Event, Sequence[Fetch]]:
        """Give the host its share; return the event as the device executes it, and its loads."""
        geometry, layer, experts = self._geometry, event.layer, event.experts
        base, load_bytes = layer * geometry.num_experts, geometry.expert_bytes[layer][0]
        tokens_of = _tokens_by_expert(event, geometry.num_experts)
        load_s = self._latency_s + load_bytes / self._link_bytes_per_s
        on_device, on_host = self._clock.expert_parts_s(layer), self._expert[layer]
        works = [
            Work(key, load_s, _roofline(on_device, tokens), _roofline(on_host, tokens))
            for key, tokens in ((key, tokens_of[key - base]) for key, _ in fetches)
        ]
        most_s = self._latency_s + self._nbytes(event.num_tokens) / self._link_bytes_per_s
        chosen = share_out(
            self._rule,
            works,
            now=self._clock.now,
            link_free=self._link.busy_until,
            host_free=self.busy_until,
            out_s=most_s,
            back_s=most_s,
        )
        if not chosen:
            return event, fetches
        num_tokens = 1
        if len(experts):
            own = np.isin(experts + base, list(chosen)) & (experts != DROPPED)
            num_tokens = int(own.any(axis=-1).sum())
            experts = np.where(own, DROPPED, experts)
        # The activations are sent, and the host begins on their arrival, in order of need.
        self._activation_bytes = self._nbytes(num_tokens)
        arrival_s = self._link.carry(self._activation_bytes, self._clock.now)
        seconds = sum(work.host_s for work in works if work.key in chosen)
        self.busy_until = max(arrival_s, self.busy_until) + seconds
        self.is_open = True
        record.host_s += seconds
        record.host_executed += sum(int(tokens_of[key - base]) for key in chosen)
        keys = [key for key in event.keys if key not in chosen]
        left = [fetch for fetch in fetches if fetch.key not in chosen]
        return event._replace(keys=keys, experts=experts), left

    def end(self, record: PassRecord) -> None:
        """Bring the outputs back once the host is done, and let the compute wait for them."""
        arrival_s = self._link.carry(self._activation_bytes, self.busy_until)
        record.host_wait_s += self._clock.wait_until(arrival_s)
        self.is_open = False

    def _nbytes(self, num_tokens: int) -> int:
        return int(num_tokens * self._geometry.hidden_size * self._geometry.element_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCosts:
    """Seconds, measured before the first request (what Fiddler profiles offline, section 3.3).

    Executing one expert of the first layer takes `fixed + each * tokens`; other layers' go by
    their bytes.
    """

    host_fixed_s: float
    host_each_s: float
    device_fixed_s: float
    device_each_s: float
    load_s: float
    """Loading it over the real link."""
    way_s: float
    """Bringing activations to the host, or back."""


class HostShare:
    """Divides an event's absent experts between host and real link, by times that were measured."""

    def __init__(self, rule: str, geometry: Geometry, link: WallLink) -> None:
        self._rule, self._geometry, self._link = rule, geometry, link
        self.costs: HostCosts | None = None
        """Given before the first event, unless the rule asks for no times."""

    @property
    def asks_for_costs(self) -> bool:
        return self._rule != ALWAYS

    def choose(self, event: Event, fetches: Sequence[Fetch]) -> set[int]:
        """Return the keys, of those to be loaded, that the host executes instead."""
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
                device_s=scale * (costs.device_fixed_s + costs.device_each_s * own),
                host_s=scale * (costs.host_fixed_s + costs.host_each_s * own),
            )
            for fetch, own in ((fetch, tokens[fetch.key - base]) for fetch in fetches)
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
