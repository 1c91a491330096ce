"""Which absent experts the host executes, by times that were measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lm_eval_moecache.engine.virtual.host import ALWAYS, Work, share_out
from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.records.event import DROPPED, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry

HOST = -1
"""Stands in a wave for a slot: the expert is executed on the host, where it is stored."""


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
    """Divides an event's absent experts between the host and the link, by the policy's rule."""

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
        sizes = self._geometry.expert_bytes
        scale = sizes[event.layer][0] / sizes[0][0]
        tokens = self._tokens_of(event)
        base = event.layer * self._geometry.num_experts
        works = [
            Work(
                key=key,
                load_s=costs.load_s * scale,
                device_s=scale * (costs.device_fixed_s + costs.device_each_s * tokens[key - base]),
                host_s=scale * (costs.host_fixed_s + costs.host_each_s * tokens[key - base]),
            )
            for key, _ in fetches
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

    def _tokens_of(self, event: Event) -> Sequence[int]:
        """Return how many tokens each expert of the layer serves."""
        num_experts = self._geometry.num_experts
        if not len(event.experts):
            return [1] * num_experts
        live = event.experts[event.experts != DROPPED]
        counts: list[int] = np.bincount(live, minlength=num_experts).tolist()
        return counts
