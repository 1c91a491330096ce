"""The features of experts, layers and the moment by which evictions rank residents.

Records that the engine has in its tables (`engine.kernel.state`), where the rule's function is
called with them. Order numbers count loads, uses and hints (proposals of keys) as they happen:
smaller is older. A cache's turns are its events. A key is `layer * num_experts + expert`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Expert:
    """The features of one expert."""

    pinned: int = 0
    """Mark of the last search in which the expert was pinned."""
    last_use: int = 0
    """Order number of the last use or load, whichever is later."""
    uses: int = 0
    """Number of events that needed the expert, resident or not."""
    loaded: int = 0
    """Order number of the last load."""
    current: int = -2
    """The last pass in which it became current: by a load, a use, or its first hint there."""
    current_since: int = 0
    """Order number at which it last became current."""
    next_use: int = 0
    """Number of the next event that needs it (offline rules only)."""
    turn: int = 0
    """Its cache's turn at its last use or load."""
    accessed: int = 0
    """Its cache's accesses as of its last use or load."""
    hits: int = 0
    """Number of uses since its load, without the one that it was loaded for."""
    demanded: int = -2
    """The pass in which a demand last loaded it, until it is used."""
    cold_fill_rank: int = 0
    """Its place, from 1, among the loads before its cache's first eviction; 0 if loaded later."""
    served_tokens: int = 0
    """Number of tokens summed in `weight`."""
    weight: float = 0.0
    """Routing weights summed over these tokens; the sum's logarithm if there is a `growth`."""
    rate: float = 0.0
    """Share of its layer's recent tokens that needed it; only for rules that forecast, as are
    `predicted` and all of `Forecast`."""
    predicted: int = 0
    """Whether a prefetcher predicts that the layer's next turn needs it."""
    resident: int = 0
    fresh_weight: float = 0.0
    fresh_tokens: int = 0
    """What the running event's tokens add to `weight` and `served_tokens`."""
    ran_below_best_precision: int = 0
    """Whether the running event executed it below the best precision level."""
    hint_place: int = 0
    """Its place among the hints for the next pass, 0 for none."""
    place: int = 0
    """Its index among its layer's residents."""
    member: int = 0
    """Key of the layer's resident at this expert's index."""


@dataclass
class Layer:
    """The features of one layer."""

    index: int = 0
    held: int = 0
    """Number of residents."""
    cache: int = 0
    """Number of the layer's cache."""
    stale: int = 1
    """Whether `lowest` is stale."""
    lowest: int = -1
    """Key of the layer's first victim, or -1 for none; `first` and `second` are its rank."""
    first: float = 0.0
    second: float = 0.0
    slots: int = 0
    """Experts of the mean size that its cache has room for."""
    predicted: int = 0
    """Whether any expert is predicted for the layer's next turn."""


@dataclass
class Forecast:
    """The inputs of a key's forecast, and its duel with LRU.

    Where forecast and LRU choose different victims, the two keys are in a duel: whoever chose the
    key that is needed first loses. A key has one duel at a time; if one event needs both keys, the
    duel is a draw.
    """

    fast: float = 0.0
    middle: float = 0.0
    slow: float = 0.0
    """Decayed use rates."""
    fresh_fast: float = 0.0
    fresh_middle: float = 0.0
    fresh_slow: float = 0.0
    """Contribution of the running event's tokens."""
    asked: int = 0
    """The cache's turn, counted from 1, that last needed it."""
    rival: int = -1
    """Key of its opponent in a duel, or -1."""
    unwanted: int = 0
    """Whether it, not its rival, was the forecast's victim."""


@dataclass
class Now:
    """State shared by all experts, and the rule's settings."""

    num_layers: int = 0
    num_experts: int = 0
    pass_index: int = -1
    """The pass in progress."""
    layer: int = -1
    """The layer being served, while a victim is sought."""
    turns: int = 0
    """This and the next two are those of the cache in which a victim is sought."""
    accesses: int = 0
    cold_fills: int = 0
    served: int = -1
    """The layer that the pass last served, -1 for none."""
    order: int = 1
    """The next order number."""
    num_hints: int = 0
    """Number of residents that a prefetcher proposed for the next pass."""
    ages: int = 0
    moves: int = 0
    growth: float = 0.0
    """Logarithm of a pass' weight relative to the pass before."""
    forecasts: int = 0
    weighs: int = 0
    offline: int = 0
    only_best: int = 0
    """Whether uses below the best precision level do not count."""
    by_token: int = 0
    """Whether recency is that of the last token to need an expert, and not of the first."""
    parameter: float = 0.0
    """The rule's own."""
    keep: float = 0.0
    """Weight of a duel relative to the next one."""
    furthest: int = -1
    other: int = -1
    """Victims of forecast and LRU where they differ: a duel begins once one of them is evicted."""
    first: float = 0.0
    second: float = 0.0
    """The rank that was asked for last."""


Rank = Callable[[Expert, Layer, Now], tuple[float, float]]
"""(resident, its layer, now) -> rank, compared as a pair; the lowest leaves, ties go to the smaller
key.

Within one layer the order may change only through calls about its own residents, a new pass, and as
its class declares (`RankedEviction`: `ages`, `moves`).
"""
