"""Buddy: an absent expert is replaced by a resident one that is often co-activated with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Annotated, ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.learned.buddies import (
    BuddyProfile,
    activating_entropy,
    top_k_shares,
)
from lm_eval_moecache.algorithms.miss.base import Budget, Order, SubstitutingMiss
from lm_eval_moecache.algorithms.substitution import (
    Missing,
    Substitute,
    SubstituteCost,
    Substitution,
)
from lm_eval_moecache.records.arrays import BoolArray, IntArray, each_token
from lm_eval_moecache.records.artifact import BUDDIES, load_artifact
from lm_eval_moecache.records.event import DROPPED, Event
from lm_eval_moecache.records.memory import address_of
from lm_eval_moecache.records.ranges import Count, Experts, Positive, Range, Share, ZeroOrMore

Reuse = Annotated[float, Range(least=0, below=1)]


@dataclass(eq=False, kw_only=True)
class Buddy(SubstitutingMiss):
    """BuddyMoE section 3 and algorithm 1: three gates, then the best resident buddy on the list.

    1. Residency gate: nothing is replaced in an event whose share of absent experts reaches beta.
    2. Token gate: nothing is replaced for a token with TAE <= tau, or with a margin of gamma or
       more between its two largest renormalised probabilities. tau is a percentile of the profile's
       tokens of each layer (the paper's 10 to 20), or absolute. Experts dropped by routing do not
       count.
    3. A token's absent experts, heaviest first and at most rho of them (the paper does not say
       which; `order=lightest` spares the ones that matter most), take the resident expert with
       the largest Psi (equation 3) among the first H of B(i; alpha), never one of the token's own.

    An expert without a buddy is loaded or dropped; if a gate or the budget prevents its
    replacement, it is always loaded. Readings: the paper's tables call the CFT alpha "tau" (section
    5.1). rho counts per token and layer. Algorithm 1 replaces indices, so the substitute has the
    missing expert's weight; `weight=own` gives it its own. A buddy already given to the token is
    excluded (algorithm 1) or, with `reuse` > 0, has its Psi multiplied by that (section 3.1). The
    normalised logit of eta lies between 0 (the token's smallest) and 1. With `partitions` devices,
    each holding equally many consecutive experts, hop counts the devices between missing expert and
    substitute. An expert whose prefetch is under way is not "GPU-resident" (algorithm 1), so it is
    replaced like a missed one; `late=await` waits for it instead, and the gates and the budget then
    cover only missed experts. Cost: O(E) per absent expert of a token.

    Parameters: profile, file of `moecache profile buddies` (`tiny` has one); alpha (one number or
    one per layer) and k_max, by default the profile's; H, by default the whole list; rho, by
    default no budget; measure, what ranks buddies: counts, counts times weight, or similarity of
    outputs; tau_scale, of tau; temperature, of the probabilities in TAE; kappa, the reduction of
    Psi per hop; fallback, for an expert without a buddy; late, whether experts with a prefetch
    under way are replaced or awaited.
    """

    name: ClassVar[str] = "buddy"
    source: ClassVar[str] = "BuddyMoE sections 3.1 to 3.3 and algorithm 1"
    uses_logits: ClassVar[bool] = True
    artifact_kind: ClassVar[str | None] = BUDDIES

    profile: str | None = None
    measure: Literal["binary", "weighted", "similarity"] = "binary"
    alpha: Share | list[float] | None = None
    k_max: Count | None = None
    H: int | None = None
    rho: Budget | None = None
    order: Order = "heaviest"
    tau: float = 15.0
    tau_scale: Literal["percentile", "absolute"] = "percentile"
    temperature: Positive = 1.0
    gamma: Share = 1.0
    beta: Share = 1.0
    eta: ZeroOrMore = 0.0
    kappa: ZeroOrMore = 0.0
    partitions: Experts = 1
    reuse: Reuse = 0.0
    fallback: Literal["fetch", "drop"] = "fetch"
    weight: Literal["missing", "own"] = "missing"
    late: Literal["replace", "await"] = "replace"

    def __post_init__(self) -> None:
        super().__post_init__()
        num_experts, top_k = self.geometry.num_experts, self.geometry.top_k
        if top_k < 2:
            raise ValueError("a router with top_k=1 has no experts chosen together.")
        if (self.kappa > 0) != (self.partitions > 1):
            raise ValueError(
                f"miss.kappa={self.kappa} with miss.partitions={self.partitions}: the one has no "
                "effect without the other. Give kappa above 0 and 2 partitions or more, or neither."
            )
        if self.reuse > 0 and self.weight == "own":
            raise ValueError(
                f"miss.reuse={self.reuse} must be above 0 only with weight=missing: a buddy that "
                "is used twice has only one weight of its own."
            )
        self.artifact = load_artifact(BUDDIES, self.profile, self.geometry, "miss.profile")
        known = BuddyProfile(self.artifact)
        self.thresholds = known.thresholds(self.tau, self.tau_scale, self.temperature)
        self.q, self.is_buddy = known.buddies(self.measure, self.alpha, self.k_max, self.H)
        device = np.arange(num_experts) * self.partitions // num_experts
        self.q *= np.maximum(1 - self.kappa * np.abs(device[:, None] - device), 0.0)
        self.affinities = np.ascontiguousarray(np.where(self.is_buddy, self.q, -1.0), np.float64)

    def cost(self) -> SubstituteCost:
        eta = self.eta

        def cost(missing: Missing, other: Substitute) -> tuple[float, float]:
            # Psi, equation 3, the larger the better; below 0 is no buddy.
            psi = other.given * (1 + eta * other.standing)
            return (-psi if other.given >= 0 else inf), 0.0

        return cost

    def budget(self, event: Event) -> IntArray:
        return np.where(self.tolerates(event), super().budget(event), 0)

    @cached_property
    def loop(self) -> Substitution:
        loop = super().loop
        start, step = address_of(self.affinities), self.affinities[0].nbytes
        loop.record.tolerance = self.beta
        loop.give(tables=start + step * np.arange(len(self.affinities)))
        return loop

    def tolerates(self, event: Event) -> BoolArray:
        """Return a mask [tokens] of those that pass the entropy and margin gates."""
        live = event.experts != DROPPED
        own = event.logits[each_token(event.experts), event.experts]
        shares = top_k_shares(np.where(live, own, -np.inf), self.temperature)
        best = np.sort(shares, axis=-1)
        is_open = activating_entropy(shares) > self.thresholds[event.layer]
        return np.asarray(is_open & (best[:, -1] - best[:, -2] < self.gamma))
