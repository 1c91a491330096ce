"""The miss axis: absent experts in, what to load and what to execute out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray, softmax
from lm_eval_moecache.records.artifact import Artifact
from lm_eval_moecache.records.event import DROPPED, Event, Fetch
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.selection import Selection


@dataclass(frozen=True, slots=True)
class Resolution:
    """What to do about the absent experts of one event.

    `fetch` lists what is loaded, in the order it is asked of the link; `selection` replaces the
    experts to execute, and is None where all of them are executed as asked.
    """

    fetch: Sequence[Fetch]
    selection: Selection | None = None


class MissAlgorithm(ABC):
    """Decides for each absent expert whether it is loaded (and how well), replaced or dropped.

    `Event.experts` are always there, heaviest first; what routing has dropped is DROPPED in them.
    In an event of several tokens each token is judged alone, by what was resident when the event
    began: an expert may be loaded for one token and replaced for another.
    """

    source: ClassVar[str]
    """The paper and section it implements."""
    draws: ClassVar[bool] = False
    """Whether its choices depend on the seed."""
    is_lossless: ClassVar[bool] = False
    """Whether every absent expert is loaded at full precision, so that results cannot change."""
    uses_logits: ClassVar[bool] = False
    """Whether `Event.weights` and `Event.logits` are needed."""
    uses_weights: ClassVar[bool] = False
    """Whether `Event.weights` are needed and logits are not: such rules replay traces without."""
    cached_first: ClassVar[bool] = False
    """Whether the resident experts of an event are executed while the absent ones are loaded."""
    uses_host: ClassVar[bool] = False
    """Whether it executes absent experts on the host, of which the hardware profile must know."""
    host_rule: str = ""
    """How absent experts are divided between the host, which executes them, and the link, which
    loads them: `always`, `first` or `balanced` (see `miss=host`); empty where all are loaded."""
    uploads: int = 0
    """How many of an event's absent experts, executed on the host, are loaded behind it."""
    uses_ladder: ClassVar[bool] = False
    """Whether it loads at lower levels of the store's precision, of which there must be some."""
    upgrade: bool = False
    """Whether it is asked also where nothing is absent, to better residents of a lower level."""
    awaits_late: bool = False
    """Whether what a prefetch has under way is waited for, and nothing decided about it."""
    artifact_kind: ClassVar[str | None] = None
    """The kind of artifact (`buddies`, `predictor`) that its parameter `profile` names, if any."""
    artifact: Artifact | None = None
    """The artifact it was built with: the wrapped model checks that it is the model's own."""
    pairs_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Axis -> the only algorithms there that go with this one; `pairs_because` says why."""
    pairs_because: ClassVar[str] = ""

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        self.geometry = geometry
        self.seed = seed
        if self.uses_ladder and len(geometry.precision) < 2:
            raise ValueError(
                f"miss={type(self).__module__.rpartition('.')[2]!r} loads at lower precisions, but "
                f"precision={geometry.precision[0]!r} is the only one stored. Allowed with it: "
                "several, best first, as precision=int8:int4:int2."
            )

    @abstractmethod
    def resolve(
        self, event: Event, absent: Sequence[int], resident: Mapping[int, int]
    ) -> Resolution | None:
        """Say what becomes of the `absent` keys (in order of need), or None to load them all.

        Every absent key is either in `fetch` or no longer in the selection. Keys that a prefetch
        has under way are absent, too, unless `awaits_late`: then the engine waits for those that
        are still in the selection, and they are neither here nor resident. `resident` holds the
        keys that are resident now, and their levels: one that is fetched at a better level is
        loaded again. A selection returned has DROPPED where the event has it.
        """

    def prefetch_levels(self, event: Event, layer: int, keys: Sequence[int]) -> Sequence[int]:
        """Choose the level of each key of a layer that is to be prefetched, most wanted first."""
        return [0] * len(keys)


Cost = Callable[[IntArray, IntArray], npt.NDArray[np.floating[Any]]]
"""(tokens [n], the expert each of them misses [n]) -> what each substitute costs [n, experts]."""
Order = Literal["heaviest", "lightest"]


def level_fetches(
    event: Event,
    keys: Sequence[int],
    levels: IntArray,
    live: BoolArray,
    geometry: Geometry,
    resident: Mapping[int, int],
) -> list[Fetch]:
    """Return the fetches of these keys that some token needs and that are not resident well enough.

    `levels` are what each [tokens, top_k] entry asks for, `live` whether it is executed. An expert
    comes once, at the best level that a token asks for.
    """
    never = len(geometry.precision)
    best = np.full(geometry.num_experts, never)
    np.minimum.at(best, event.experts[live], levels[live])
    base = event.layer * geometry.num_experts
    wanted = [(key, int(best[key - base])) for key in keys]
    return [Fetch(key, level) for key, level in wanted if level < resident.get(key, never)]


def weight_shares(event: Event) -> FloatArray:
    """Return each expert's share of its token's weight, [tokens, top_k]; 0 where dropped.

    Of the router's weights as they are, renormalised by the family or not: a token's sum to 1.
    """
    weights = np.where(event.experts != DROPPED, event.weights, 0)
    total = np.maximum(weights.sum(axis=-1, keepdims=True), 1e-20)
    return np.asarray(weights / total, dtype=np.float32)


def keep_one(keep: BoolArray, shares: FloatArray) -> None:
    """Keep the heaviest expert of each token that would have none, [tokens, top_k]."""
    nothing_left = ~(keep & (shares > 0)).any(axis=-1)
    keep[nothing_left, shares[nothing_left].argmax(axis=-1)] = True


def weight_before(weights: FloatArray, live: BoolArray) -> FloatArray:
    """Return the share of a token's weight that its heavier experts have, [tokens, top_k].

    HOBBIT's unimportance of an expert: 0 for the heaviest. What is not `live` weighs nothing.
    """
    weights = np.where(live, weights, 0)
    total = np.maximum(weights.sum(axis=-1, keepdims=True), 1e-20)
    return np.asarray((weights.cumsum(axis=-1) - weights) / total, dtype=np.float32)


def expected_choice(logits: FloatArray, top_k: int) -> tuple[IntArray, FloatArray]:
    """Return the experts [tokens, top_k] that a predicted gate would choose, and their scores."""
    experts = np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]
    return experts, np.take_along_axis(softmax(logits), experts, axis=-1)


def prefetch_at(
    keys: Sequence[int], experts: IntArray, levels: IntArray, geometry: Geometry
) -> list[int]:
    """Return the level of each key: the best that an expected [tokens, top_k] entry asks for.

    What no token is expected to choose comes at the lowest.
    """
    best = np.full(geometry.num_experts, len(geometry.precision) - 1)
    np.minimum.at(best, experts, levels)
    return [int(best[key % geometry.num_experts]) for key in keys]


def absent_entries(experts: IntArray, is_resident: BoolArray) -> BoolArray:
    """Mark the [tokens, top_k] entries whose expert is absent; `is_resident` is [experts]."""
    return np.asarray((experts != DROPPED) & ~is_resident[experts])


def still_needed(
    event: Event, absent: Sequence[int], experts: IntArray, keep: BoolArray | None, num_experts: int
) -> list[Fetch]:
    """Return full-precision fetches of the absent keys that some token still executes."""
    live = experts != DROPPED if keep is None else (experts != DROPPED) & keep
    wanted = np.zeros(num_experts, dtype=bool)
    wanted[experts[live]] = True
    base = event.layer * num_experts
    return [Fetch(key) for key in absent if wanted[key - base]]


def substitute(
    experts: IntArray,
    missing: BoolArray,
    is_resident: BoolArray,
    cost: Cost,
    budget: IntArray,
    reuse: float = 0.0,
    order: Order = "heaviest",
) -> tuple[IntArray, BoolArray]:
    """Replace absent experts by resident ones: BuddyMoE algorithm 1 for any order of preference.

    A token's `missing` experts [tokens, top_k] choose in turn, the heaviest (or lightest) first and
    until `budget` [tokens] of them are replaced, the cheapest resident expert that the token has
    not; infinity forbids, ties go to the smaller index. A substitute chosen before costs `reuse`
    times as much (costs are negative where that is above 0), or is out. Returns [tokens, top_k]
    experts and where one was sought.
    """
    chosen: IntArray = experts.copy()
    free = np.broadcast_to(is_resident, (len(experts), len(is_resident))).copy()
    rows, columns = (experts != DROPPED).nonzero()
    free[rows, experts[rows, columns]] = False
    factor, left = np.ones(free.shape), budget.copy()
    sought = np.zeros_like(missing)
    columns_in_turn = range(experts.shape[1])
    for column in columns_in_turn if order == "heaviest" else reversed(columns_in_turn):
        tokens = (missing[:, column] & (left > 0)).nonzero()[0]
        sought[tokens, column] = True
        prices = cost(tokens, experts[tokens, column]) * factor[tokens]
        prices = np.where(free[tokens], prices, np.inf)
        best = prices.argmin(axis=-1)
        found = np.isfinite(prices[np.arange(len(tokens)), best])
        tokens, best = tokens[found], best[found]
        chosen[tokens, column] = best
        left[tokens] -= 1
        if reuse:
            factor[tokens, best] *= reuse
        else:
            free[tokens, best] = False
    return chosen, sought


def check_budget(rho: int | None, top_k: int) -> int:
    """Return how many experts of a token may be replaced in a layer: rho, or all without one."""
    if rho is not None and not 1 <= rho < top_k:
        raise ValueError(
            f"miss.rho={rho} must be at least 1 and below the router's top_k={top_k}: give a "
            "smaller one, or leave it out to have no budget."
        )
    return top_k if rho is None else rho


def resolve_substitution(
    event: Event,
    absent: Sequence[int],
    is_resident: BoolArray,
    cost: Cost,
    *,
    fallback: Literal["fetch", "drop"],
    weight: Literal["own", "missing"],
    budget: IntArray | None = None,
    reuse: float = 0.0,
    order: Order = "heaviest",
) -> Resolution | None:
    """Replace what can be, fetch or drop what finds nobody, and fetch what was not sought for.

    `weight` says whose weight a substitute has; `budget` [tokens] (no limit where not given),
    `reuse` and `order` are those of `substitute`.
    """
    if budget is None:
        budget = np.full(len(event.experts), event.experts.shape[1])
    gone = np.zeros_like(is_resident)
    gone[[key % len(gone) for key in absent]] = True
    missing = absent_entries(event.experts, ~gone)
    chosen, sought = substitute(event.experts, missing, is_resident, cost, budget, reuse, order)
    lost = sought & (chosen == event.experts)
    keep = ~lost if fallback == "drop" and lost.any() else None
    if keep is None and np.array_equal(chosen, event.experts):
        return None
    weigh_as = event.experts if weight == "missing" else None
    selection = Selection(chosen, keep, weigh_as=weigh_as)
    return Resolution(still_needed(event, absent, chosen, keep, len(is_resident)), selection)
