"""Rules that rank residents by one function of their features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.eviction.base import RankedEviction
from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.records.ranges import Count, ProperShare, ZeroOrMore


class FIFO(RankedEviction):
    """Evicts the expert that has been resident longest, used or not.

    A prefetched expert counts from its arrival.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "fifo"
    source: ClassVar[str] = "the textbook baseline; SpecMD section 4.2 uses its order in a queue"
    recency: ClassVar[Literal["", "use", "loading"]] = "loading"
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(expert.loaded), 0.0


class LRU(RankedEviction):
    """Evicts the expert whose last use lies furthest back.

    The experts of one event are equally recent; the one needed first, in a decode step the one with
    the heaviest routing weight, leaves first. A prefetched expert counts as used on arrival;
    predicting a resident expert is not a use: SP-MoE section 4.4, where an expert found in the
    cache is put last again, is read as happening on its use.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "lru"
    source: ClassVar[str] = "Eliseev & Mazur 2023 (Mixtral offloading); SpecMD appendix B"
    recency: ClassVar[Literal["", "use", "loading"]] = "use"
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(expert.last_use), 0.0


class TailLRU(RankedEviction):
    """Evicts the least recently used expert, where recency is that of the last token to need it.

    BigMoeOnEdge#22: every use by a prompt's token promotes, while `lru` counts only the first, so
    that the experts of the prompt's last tokens are the most recent when decoding begins. In events
    of one token it is `lru`.
    Cost: O(layers + residents of a layer) per victim, O(tokens x k) per event.
    """

    name: ClassVar[str] = "tail_lru"
    source: ClassVar[str] = "BigMoeOnEdge#22 (keep the prompt tail's experts hot)"
    recency: ClassVar[Literal["", "use", "loading"]] = "use"
    moves: ClassVar[bool] = False
    by_token: ClassVar[bool] = True

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(expert.last_use), 0.0


@dataclass(eq=False, kw_only=True)
class HeatLRU(RankedEviction):
    """Evicts the least recently used of the experts used at most `protect_above` times.

    Uses count while the expert is resident and restart when it is loaded again, as in the source;
    the use that caused the load does not count. If every resident is hotter, plain LRU decides.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.

    Parameters: protect_above, the most uses of an unprotected expert (4).
    """

    name: ClassVar[str] = "heat_lru"
    source: ClassVar[str] = "TheTom/llama-cpp-turboquant#300 (heat-protected eviction)"
    moves: ClassVar[bool] = False

    protect_above: Count = 4

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return (1.0 if expert.hits > now.parameter else 0.0), float(expert.last_use)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameter = float(self.protect_above)


@dataclass(eq=False, kw_only=True)
class PinnedLRU(RankedEviction):
    """Keeps a share of the experts that first filled the cache, and the most recently used others.

    With `warm=` the kept experts are the hottest of the profile, as in engines that pin hot experts
    and cache the others. Without it they are the last of those that first filled the cache. Kept
    experts leave only where all other residents are pinned by the running event.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.

    Parameters: share of the cache that is kept, above 0 and below 1 (0.5).
    """

    name: ClassVar[str] = "pinned_lru"
    source: ClassVar[str] = "engines' half-pinned caches (thecodacus/llama.cpp#5, imp#2061)"
    moves: ClassVar[bool] = False

    share: ProperShare = 0.5

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        # The last of the cold fills are kept, because `warm` loads the hottest last.
        if expert.cold_fill_rank > max(0, now.cold_fills - int(home.slots * now.parameter)):
            return 1.0, float(expert.cold_fill_rank)
        return 0.0, float(expert.last_use)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameter = self.share


class Static(RankedEviction):
    """Keeps the experts that first filled the cache; those loaded later make room for each other.

    With `warm=` these are a profile's most used experts: the static placement of engines that pin
    the hot experts and stream the rest. Without it they are those that came first. Of the others
    the one loaded first leaves; where all are pinned, the first one placed, which `warm` makes the
    coldest. Cost: O(layers + residents of a layer) per victim.
    """

    name: ClassVar[str] = "static"
    source: ClassVar[str] = "engines' static placement (thecodacus/llama.cpp#5, imp#2061)"
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return (1.0 if expert.cold_fill_rank else 0.0), float(expert.loaded)


class LFU(RankedEviction):
    """Evicts the expert with the lowest access count over the entire inference history.

    SpecMD appendix B. An access is an event that needs the expert, however many tokens it serves;
    the count survives eviction, and a prefetch is not an access. Ties go to the smaller key: the
    paper gives no second criterion.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "lfu"
    source: ClassVar[str] = "SpecMD appendix B; MoE-Infinity's cache (CommitMoE section 5.1)"
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(expert.uses), 0.0


class LHU(RankedEviction):
    """Evicts the expert used least often at high precision.

    SpecMD appendix B after HOBBIT: it "tracks high-precision expert usage frequency", as misses of
    such experts "incur significantly higher latency", and "must be combined with fetch cascade
    precision policies". A use is an event that executes the expert at the best level, however many
    tokens it serves; the count survives eviction, and uses at lower levels do not count. Ties go
    to the smaller key.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "lhu"
    source: ClassVar[str] = "SpecMD appendix B (LHU); HOBBIT (Tang et al. 2024)"
    pairs_with: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "miss": ("fetch_lowest", "fetch_priority", "drop_cascade", "cascade")
    }
    pairs_because: ClassVar[str] = (
        "it counts uses at high precision only, and this loads nothing at a lower one"
    )
    moves: ClassVar[bool] = False
    only_best: ClassVar[bool] = True

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(expert.uses), 0.0


class LFRU(RankedEviction):
    """Evicts the expert with the fewest uses per event since its last one: count / age.

    Engines' proposals use the name for a cache between LRU and LFU (a vLLM pull request;
    llama.cpp#21609), without a formula; this is our reading. `count` is the number of events that
    needed the expert, over the whole run, plus one for being loaded; `age` the number of events
    since its last use or, if unused, its load. Old favourites fade, which under LFU they never do.
    Ties go to the longest unused.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "lfru"
    source: ClassVar[str] = "LFRU of engines' proposals (vLLM, llama.cpp#21609); our reading"
    ages: ClassVar[bool] = True
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return (expert.uses + 1) / (now.turns + 1 - expert.turn), float(expert.last_use)


class LFRUColibri(RankedEviction):
    """Evicts the expert with the smallest 256 x uses + max(0, 255 - age).

    colibri's `tier_lfru_score` (c/tier.h, c/bench_tier/policy_replay.py): uses are counted over the
    whole run, age is the number of expert accesses, over all layers, since the last use, and ties
    go to the longest resident. So recency only separates equal counts, up to an age of 255; `lfru`
    is our own reading of the name. A prefetched expert ages from its load.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "lfru_colibri"
    source: ClassVar[str] = "colibri c/tier.h and c/bench_tier/policy_replay.py (LFRU)"
    ages: ClassVar[bool] = True
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        # As in the source, the age includes the access that needs the room.
        age = now.accesses + 1 - expert.accessed
        return float(256 * expert.uses + max(0, 255 - age)), float(expert.loaded)


def lowest_sum(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    return (expert.weight if expert.served_tokens else -math.inf), 0.0


def lowest_mean(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    tokens = expert.served_tokens
    return (expert.weight / tokens if tokens else -math.inf), 0.0


@dataclass(eq=False, kw_only=True)
class Score(RankedEviction):
    """Evicts the expert with the lowest accumulated gate score.

    SpecMD appendix B after Zhu et al. 2025: "a running history of gate scores for each expert".
    Each use adds the routing weights of the tokens served; the history survives eviction. Readings
    of it differ: `history=sum` ("accumulated", section 2), `mean` per token served, or `decayed`, a
    sum in which each pass counts `decay` times the next one. An expert never used has the lowest
    score; ties go to the smaller key.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.

    Parameters: decay, per pass, between 0 and 1, only for `decayed` (default 0.9 there).
    """

    name: ClassVar[str] = "score"
    source: ClassVar[str] = "SpecMD appendix B (score-based); Zhu et al. 2025"
    uses_weights: ClassVar[bool] = True
    moves: ClassVar[bool] = False

    history: Literal["sum", "mean", "decayed"] = "sum"
    decay: ProperShare | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.only_with("decay", history="decayed")
        self.rank = lowest_mean if self.history == "mean" else lowest_sum
        if self.history == "decayed":
            self.growth = -math.log(0.9 if self.decay is None else self.decay)


class ShallowFirst(RankedEviction):
    """Favours shallow layers: evicts an expert of the deepest layer that has residents.

    Fate (Fang et al. 2025), which according to BuddyMoE section 6 "uses cross-layer gate signals
    to prefetch next-layer experts and a shallow-favoring cache". The degree is not specified: read
    as strict; within a layer the longest unused expert leaves first.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "shallow_first"
    source: ClassVar[str] = "Fang et al. 2025 (Fate), as in BuddyMoE section 6"
    compares_layers: ClassVar[bool] = True
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(-home.index), float(expert.last_use)


def furthest_either_way(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    # Of two layers equally far, the earlier one goes first.
    ahead = home.index - now.layer
    return float((ahead > 0) - 2 * abs(ahead)), float(expert.last_use)


def furthest_ahead(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    return float(-((home.index - now.layer) % now.num_layers)), float(expert.last_use)


@dataclass(eq=False, kw_only=True)
class FLD(RankedEviction):
    """Evicts an expert of the layer furthest from the one being served.

    SpecMD appendix B after HOBBIT: "the distance between each cached expert's layer and the
    current inference layer, evicting experts from the farthest layers first". Read as the
    absolute difference (`distance=absolute`), earlier layers first among equals. As near layers
    are kept because they "are more likely to be needed soon", `forward` counts how many layers
    ahead the expert's next turn is, wrapping around at the end of the pass: the layer just served
    is then the furthest. Within a layer the longest-unused expert goes first; the paper leaves this
    open.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "fld"
    source: ClassVar[str] = "SpecMD appendix B (FLD); HOBBIT (Tang et al. 2024)"
    compares_layers: ClassVar[bool] = True

    distance: Literal["absolute", "forward"] = "absolute"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank = furthest_either_way if self.distance == "absolute" else furthest_ahead


class LayeredLRU(RankedEviction):
    """Keeps one LRU list per layer in a common pool; the longest list loses its oldest expert.

    Engines with one LRU list per layer (`n/layer` here) keep one layer's experts from evicting
    another's, but cannot lend a layer more room. As the eviction of a common pool it gives each
    layer an equal share once the pool is full, whatever the order of accesses: unlike LRU it does
    not lose everything below a cycle. Among equally long lists, that of the layer whose next turn
    is furthest loses. The rule is our reading of "layer-wise LRU"; no paper states a formula.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "layered_lru"
    source: ClassVar[str] = "layer-wise LRU lists, as in llama.cpp#27861 and mixtral-offloading"
    compares_layers: ClassVar[bool] = True

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        away = (home.index - now.layer - 1) % now.num_layers
        return -float(home.held * now.num_layers + away), float(expert.last_use)


def uses_by_nearness(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    # Multiplied by the number of layers, to compare integers: a quotient could tie by rounding.
    ahead = (home.index - now.layer) % now.num_layers
    return float(expert.uses * (now.num_layers - ahead)), 0.0


def uses_by_shallowness(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    return float(expert.uses * (now.num_layers - home.index)), 0.0


@dataclass(eq=False, kw_only=True)
class FrequencyLayer(RankedEviction):
    """Evicts the expert with the lowest product of activation frequency and nearness of its layer.

    EdgeMoE (Yi et al. 2023), which according to BuddyMoE section 6 improves upon LRU and LFU by
    "a heuristic that considers both activation frequency and layer index". The formula is our
    reading: count x (1 - d / layers), where d is how many layers ahead the expert's next turn is,
    wrapping around at the end of the pass (`layer=forward`), or its layer index (`layer=index`,
    which favours shallow layers). Counts are events over the whole run; experts never used leave
    first; ties go to the smaller key.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "frequency_layer"
    source: ClassVar[str] = "Yi et al. 2023 (EdgeMoE), as in BuddyMoE section 6"
    compares_layers: ClassVar[bool] = True

    layer: Literal["forward", "index"] = "forward"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank = uses_by_nearness if self.layer == "forward" else uses_by_shallowness


def protecting(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    """Stale before current, left layers before coming ones; then the key not wanted for longest."""
    cycle = 2 * now.num_layers
    turn = home.index if home.index <= now.layer else cycle - home.index
    age = expert.loaded if now.parameter else expert.current_since
    return float(turn + cycle * (expert.current == now.pass_index)), float(age)


def by_layer(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    is_current = expert.current == now.pass_index
    age = expert.loaded if now.parameter else expert.current_since
    return float(home.index + now.num_layers * is_current), float(age)


@dataclass(eq=False, kw_only=True)
class LeastStale(RankedEviction):
    """Evicts stale experts before current ones; stale ones left of the running layer go first.

    SpecMD section 4.2: an expert is *current* once the pass in progress used it or a prefetch
    selected it, and *stale* if its last use lies in an earlier pass; it is *left* if its layer has
    already been reached. An expert prefetched for the next pass stays current in it.
    Public readings differ in whether stale experts of coming layers leave like the others
    ("within each queue, FIFO ordering based on layer position"). `protect=coming` follows figure 3
    and appendix A.3 ("protecting experts needed for upcoming layers"): stale experts on the left
    go, the first layer first; those of coming layers only when no others are stale, the furthest
    layer first. Current experts follow in the same order. `protect=none` takes all stale experts
    in layer order, so the layers after the running one lose theirs just before their turn.

    The order within a layer is open, too: `order=last_use` takes the longest unused expert,
    `order=fifo` the first loaded.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    name: ClassVar[str] = "least_stale"
    source: ClassVar[str] = "SpecMD section 4.2, figure 3, appendix A.3"

    protect: Literal["coming", "none"] = "coming"
    order: Literal["last_use", "fifo"] = "last_use"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank = protecting if self.protect == "coming" else by_layer
        self.parameter = float(self.order == "fifo")


_PRIOR = 0.02
"""Hazard of an expert that was never needed: no wait is forecast beyond fifty turns."""


@dataclass(eq=False, kw_only=True)
class Hazard(RankedEviction):
    """Evicts the expert with the longest expected wait, and falls back to LRU while that is wrong.

    An expert's hazard p is the probability that its layer's next turn needs it: the mean of three
    decayed use rates (0.6, 0.9, 0.98 per turn), a prefill counting token by token. Its wait is
    1 / (p + 0.02) turns plus `nearness` x the share of a cycle until its layer's turn. An expert
    predicted for its layer's next turn has no such wait; the layer's others then wait one turn
    longer. No weights, no training, no parameters of the model.

    Each eviction on which LRU disagrees is a duel, lost by the rule whose victim is needed first.
    While LRU leads the last duels (an exponential window of `memory`) by more than 5, LRU chooses.

    Parameters: nearness, turns that a whole cycle counts as (default 2); memory, duels (200).
    Cost: O(experts of a layer) per event, O(layers + residents of a layer) per victim;
    `results/real_routing` has the microseconds.
    """

    name: ClassVar[str] = "hazard"
    source: ClassVar[str] = "ours; the decayed rates after ds4#636, the bound in moe-cache-eval"
    forecasts: ClassVar[bool] = True

    nearness: ZeroOrMore = 2.0
    memory: Count = 200

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        wait = 1 / (expert.rate + _PRIOR) + home.predicted
        if expert.predicted:
            wait = 0.0
        turns = (home.index - now.layer - 1) % now.num_layers + 1
        return -(wait + now.parameter * turns / now.num_layers), 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameter, self.keep = float(self.nearness), 1 - 1 / self.memory


class Belady(RankedEviction):
    """Evicts, among what may be evicted, the expert whose next event is furthest away.

    Belady 1966. It knows the future, so only a replay can run it. Experts that the running event
    has executed count with their next need after this event. Ties (the same event, or never) go to
    the smaller key. If misses of prefill passes do not count, a need there is as good as never
    (`Future.ranks`).

    Requests are counted once per event and key. On demand, with experts of one size and every
    event within the cache, no eviction has fewer misses (then equal to loads). An event larger than
    the cache runs in waves whose last one stays resident, whatever the rule evicts: there a rule
    that breaks ties by luck can have fewer, and the bound is `engine.bound.fewest_misses`. Neither
    bounds time, nor anything under prefetching.
    Cost: O(layers + residents of a layer) per victim.
    """

    name: ClassVar[str] = "belady"
    source: ClassVar[str] = "Belady 1966"
    is_offline: ClassVar[bool] = True
    moves: ClassVar[bool] = False

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        return float(-expert.next_use), 0.0
