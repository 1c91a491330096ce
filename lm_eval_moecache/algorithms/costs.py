"""Choices by the cost of experts: loops that numba compiles, over costs that rules state.

A rule states what an expert costs a token as a function of two records. The loops run in plain
Python until compiling pays, and in machine code from then on; where numba cannot compile a rule's
function, they stay in plain Python. Either chooses the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from lm_eval_moecache.records.arrays import (
    BoolArray,
    DoubleArray,
    FloatArray,
    IntArray,
    each_token,
)
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.jit import (
    Array,
    NotCompilable,
    Table,
    Upgrade,
    as_records,
    compiled,
    compiled_function,
    read_by,
    uncalled,
)
from lm_eval_moecache.records.tokens import Tokens

NO_SCORES: FloatArray = np.zeros((0, 0), np.float32)
NO_TABLE: DoubleArray = np.zeros((0, 0))
NOT_ABSENT, ABSENT, SOUGHT = 0, 1, 2


@dataclass(slots=True)
class Ranked:
    """An expert as a routing rule sees it for a token."""

    rank: int = 0
    """From the router's first, 0."""
    resident: int = 0
    logit: float = 0.0
    """The logit of this rank: the token's largest, second largest and so on."""
    score: float = 0.0
    """Its softmax score, and the sum of those of better ranks; 0 without `uses_scores`."""
    before: float = 0.0


@dataclass(slots=True)
class Seen:
    """A token's logits, and those of all tokens that its row has routed in the layer so far."""

    layer: int = 0
    range: float = 0.0
    """The largest logit less the smallest."""
    mean: float = 0.0
    tokens: float = 0.0
    """How many so far, those of the event included, and the sums of their ranges and means."""
    ranges: float = 0.0
    means: float = 0.0


@dataclass(slots=True)
class Missing:
    """An absent expert of a token."""

    score: float = 0.0
    """Its softmax score; 0 without `uses_scores`."""
    share: float = 0.0
    """Its share of the token's weight; 0 without `uses_shares`."""


@dataclass(slots=True)
class Substitute:
    """A resident expert that may take an absent one's place."""

    score: float = 0.0
    """As that of `Missing`."""
    standing: float = 0.0
    """Its logit, from 0 for the token's smallest to 1; 0 without `uses_logits`."""
    given: float = 0.0
    """What the rule's table has for the pair; 0 without one."""


RankCost = Callable[[Ranked, Seen], tuple[float, float]]
"""The lowest are taken: the second number decides between equal first ones, then the rank."""
SubstituteCost = Callable[[Missing, Substitute], tuple[float, float]]
"""The lowest is taken: the second number decides between equal first ones, then the index; an
infinite first one forbids. Negative where `reuse` is above 0."""


class Routed(NamedTuple):
    """What `take_cheapest` reads and writes."""

    layer: int
    experts: Array
    """[tokens, top_k], the router's own."""
    logits: Array
    """[tokens, experts]"""
    scores: Array
    """[tokens, experts] or without rows."""
    resident: Array
    """[rows, experts]"""
    state: Array
    """[rows, 3]: `Seen.tokens`, `ranges` and `means`."""
    chosen: Array
    """[tokens, top_k], written: the cheapest, in the order of their ranks."""
    ranked: Array
    """[tokens, experts], written unless `is_ranked`: from best to worst (see `ranking`)."""
    sorted: Array
    """[tokens, experts], the same: each token's logits, largest first."""
    is_ranked: int
    best: Array
    """Scratch [top_k, 3]."""


class Choice(NamedTuple):
    """What each expert costs, and the records of which it is a function, one of each kind."""

    cost: RankCost
    expert: Table
    seen: Table


def take_cheapest(given: Routed, cost: RankCost, one: Table, context: Table) -> bool:
    """Choose each token's experts; return whether any are not the router's.

    `one` and `context` have a record each.
    """
    rows, num_tokens, is_changed = len(given.state), len(given.chosen), False
    per_row, choice = num_tokens // rows, Choice(cost, one, context)
    for row in range(rows):
        first = row * per_row
        is_changed |= take_for_row(given, choice, given.state[row], row, first, first + per_row)
    return is_changed


def take_for_row(
    given: Routed, choice: Choice, state: Array, row: int, start: int, stop: int
) -> bool:
    """Choose the experts of tokens that a row routes at once, as `take_cheapest` does.

    `state` is what the row keeps (see `Routed.state`).
    """
    num_experts, top_k, best = given.logits.shape[1], given.chosen.shape[1], given.best
    cost, expert, seen = choice.cost, choice.expert[0], choice.seen[0]
    has_scores, is_changed = len(given.scores) > 0, False
    seen.layer = given.layer
    for token in range(start, stop):
        if not given.is_ranked:
            rank_experts(given, token)
        state[0] += 1
        state[1] += spread(given, token)
        state[2] += mean(given, token)
    seen.tokens, seen.ranges, seen.means = state[0], state[1], state[2]
    for token in range(start, stop):
        seen.range, seen.mean = spread(given, token), mean(given, token)
        expert.before, taken = 0.0, 0
        for rank in range(num_experts):
            own = given.ranked[token, rank]
            expert.rank, expert.logit = rank, float(given.sorted[token, rank])
            expert.resident = 1 if given.resident[row, own] else 0
            expert.score = float(given.scores[token, own]) if has_scores else 0.0
            first, second = cost(expert, seen)
            expert.before += expert.score
            place = taken
            while place > 0 and (
                first < best[place - 1, 0]
                or (first == best[place - 1, 0] and second < best[place - 1, 1])
            ):
                place -= 1
            if place == top_k:
                continue
            taken = min(taken + 1, top_k)
            for behind in range(taken - 1, place, -1):
                best[behind, 0], best[behind, 1] = best[behind - 1, 0], best[behind - 1, 1]
                best[behind, 2] = best[behind - 1, 2]
            best[place, 0], best[place, 1], best[place, 2] = first, second, rank
        for place in range(top_k):
            lower = 0
            for other in range(top_k):
                lower += best[other, 2] < best[place, 2]
            given.chosen[token, lower] = given.ranked[token, int(best[place, 2])]
        for place in range(top_k):
            is_changed |= given.chosen[token, place] != given.experts[token, place]
    return is_changed


def rank_experts(given: Routed, token: int) -> None:
    """Write a token's experts from best to worst, and its logits sorted."""
    (_, num_experts), top_k = given.logits.shape, given.experts.shape[1]
    place = top_k
    for expert in range(num_experts):
        given.sorted[token, expert] = 0.0
    for rank in range(top_k):
        own = given.experts[token, rank]
        given.ranked[token, rank] = own
        given.sorted[token, own] = 1.0  # a mark, for now
    for expert in range(num_experts):
        if given.sorted[token, expert] == 0.0:
            given.ranked[token, place] = expert
            place += 1
    # Shell's sort, of the others by logit and index.
    gap = num_experts
    while gap > 1:
        gap = max(5 * gap // 11, 1)
        for start in range(top_k + gap, num_experts):
            own, place = given.ranked[token, start], start
            logit = given.logits[token, own]
            while place - gap >= top_k:
                other = given.ranked[token, place - gap]
                above = given.logits[token, other]
                if above > logit or (above == logit and other < own):
                    break
                given.ranked[token, place] = other
                place -= gap
            given.ranked[token, place] = own
    is_sorted = True
    for rank in range(num_experts):
        given.sorted[token, rank] = given.logits[token, given.ranked[token, rank]]
        is_sorted &= rank == 0 or given.sorted[token, rank - 1] >= given.sorted[token, rank]
    # A router may select by more than its logits.
    for start in range(1, 0 if is_sorted else num_experts):
        value, place = given.sorted[token, start], start
        while place > 0 and given.sorted[token, place - 1] < value:
            given.sorted[token, place] = given.sorted[token, place - 1]
            place -= 1
        given.sorted[token, place] = value


def spread(given: Routed, token: int) -> float:
    """Return a token's largest logit less its smallest, in the precision of logits."""
    return float(given.sorted[token, 0] - given.sorted[token, given.logits.shape[1] - 1])


def mean(given: Routed, token: int) -> float:
    """Return the mean of a token's logits."""
    total, num_experts = 0.0, given.logits.shape[1]
    for rank in range(num_experts):
        total += float(given.sorted[token, rank])
    return float(total / num_experts)


class Lacking(NamedTuple):
    """What `take_substitutes` reads and writes."""

    experts: Array
    """[tokens, top_k], below 0 where dropped."""
    logits: Array
    """[tokens, experts], or without rows, as the next two."""
    scores: Array
    shares: Array
    """[tokens, top_k]"""
    resident: Array
    """[rows, experts]"""
    table: Array
    """[any, experts], or without rows."""
    places: Array
    """[tokens, top_k]: the row of the table for each expert."""
    left: Array
    """[tokens]: replacements that each may make; counted down."""
    state: Array
    """[tokens, top_k]: `NOT_ABSENT` or `ABSENT`; becomes `SOUGHT` where a substitute was."""
    chosen: Array
    """[tokens, top_k], the same as `experts` at first; substitutes are written."""
    factors: Array
    """Scratch [experts]."""
    reuse: float
    forwards: int
    """Whether the heaviest of a token's absent experts is served first."""


def take_substitutes(given: Lacking, cost: SubstituteCost, one: Table, other: Table) -> None:
    """Replace each token's absent experts in turn; `one` and `other` have a record each."""
    (num_tokens, top_k), num_experts = given.experts.shape, given.resident.shape[1]
    per_row, factors = num_tokens // len(given.resident), given.factors
    missing, candidate = one[0], other[0]
    has_scores, has_logits = len(given.scores) > 0, len(given.logits) > 0
    has_shares, has_table = len(given.shares) > 0, len(given.table) > 0
    for token in range(num_tokens):
        row, is_ready, low, span = token // per_row, False, 0.0, 0.0
        for turn in range(top_k):
            column = turn if given.forwards else top_k - 1 - turn
            if given.state[token, column] != ABSENT or given.left[token] <= 0:
                continue
            if not is_ready:
                # A factor of 0 marks what may not be taken.
                is_ready = True
                for expert in range(num_experts):
                    factors[expert] = 1.0 if given.resident[row, expert] else 0.0
                for place in range(top_k):
                    if given.experts[token, place] >= 0:
                        factors[given.experts[token, place]] = 0.0
                if has_logits:
                    low = high = float(given.logits[token, 0])
                    for expert in range(num_experts):
                        low = min(low, float(given.logits[token, expert]))
                        high = max(high, float(given.logits[token, expert]))
                    span = max(high - low, 1e-9)
            given.state[token, column] = SOUGHT
            own, best, best_a, best_b = given.experts[token, column], -1, np.inf, np.inf
            missing.score = float(given.scores[token, own]) if has_scores else 0.0
            missing.share = float(given.shares[token, column]) if has_shares else 0.0
            for expert in range(num_experts):
                factor = factors[expert]
                if factor == 0.0:
                    continue
                if has_scores:
                    candidate.score = float(given.scores[token, expert])
                if has_logits:
                    candidate.standing = (float(given.logits[token, expert]) - low) / span
                if has_table:
                    candidate.given = float(given.table[given.places[token, column], expert])
                first, second = cost(missing, candidate)
                first *= factor
                if first < best_a or (best >= 0 and first == best_a and second < best_b):
                    best, best_a, best_b = expert, first, second
            if best >= 0:
                given.chosen[token, column] = best
                given.left[token] -= 1
                factors[best] *= given.reuse


@cache
def nothing_routed() -> tuple[Routed, Choice]:
    """Return what machine code that may route is handed where it does not."""
    scores, state, chosen = NO_SCORES, NO_TABLE, np.zeros((0, 0), np.int64)
    flags = np.zeros((0, 0), np.uint8)
    given = 0, chosen, scores, scores, flags, state, chosen, chosen, scores, 0, state
    records = [as_records([kind()]) for kind in (Ranked, Seen)]
    return Routed(*given), Choice(uncalled(Ranked, Seen), *records)


def checked(cost: Callable[..., Any]) -> Callable[..., Any]:
    """Return a cost that refuses what it returns unless that is two numbers, the first not NaN.

    For plain Python, in which a rule begins: machine code does not look.
    """

    def stated(one: Any, other: Any) -> Any:
        given = cost(one, other)
        if not isinstance(given, tuple) or len(given) != 2 or given[0] != given[0]:
            raise ValueError(f"the cost is {given!r}; expected: a tuple of two numbers, not NaN")
        return given

    return stated


class _Loop:
    """One of the loops, in plain Python or in machine code."""

    def __init__(self, function: Callable[..., Any], *kinds: Any) -> None:
        self._function, self._kinds = function, kinds
        modules = (sys.modules[__name__],)
        self.upgrade = Upgrade(modules, function.__name__, load=10_000, make=200_000)
        """Counts experts looked at, of which plain Python serves one in some 8 us."""
        self._records: list[Table] = []
        self._compiled: dict[Any, Sequence[Any] | None] = {}
        """By what a cost consists of."""
        self._found: WeakKeyDictionary[Any, Sequence[Any] | None] = WeakKeyDictionary()
        """The same by the cost itself: a tenth of the time."""

    def __call__(self, given: Any, cost: Callable[..., Any], work: int) -> Any:
        """Run the loop over what is `given`, which makes it look at `work` experts or fewer."""
        found = self.compiled(cost) if self.upgrade.is_due(done=work) else None
        if found is None:
            if isinstance(given, Routed):
                # numpy ranks in a tenth of the time of plain Python.
                given.ranked[:], given.sorted[:] = ranking(given), -np.sort(-given.logits)
                given = given._replace(is_ranked=1)
            return self._function(given, checked(cost), *([kind()] for kind in self._kinds))
        return compiled(self.upgrade.modules, self.upgrade.entry)(given, *found)

    def compiled(self, cost: Callable[..., Any]) -> Sequence[Any] | None:
        """Return a cost in machine code and its records; None where numba cannot compile it.

        A rule made again has the code that it had before.
        """
        if cost in self._found:
            return self._found[cost]
        try:
            key = cost.__code__, read_by(cost)
        except NotCompilable:
            return self._found.setdefault(cost, None)
        if key not in self._compiled:
            try:
                pointer = compiled_function(cost, *self._kinds)
                self._records = self._records or [as_records([kind()]) for kind in self._kinds]
                self._compiled[key] = (pointer, *self._records)
            except NotCompilable:
                self._compiled[key] = None
        return self._found.setdefault(cost, self._compiled[key])


CHEAPEST = _Loop(take_cheapest, Ranked, Seen)
SUBSTITUTES = _Loop(take_substitutes, Missing, Substitute)


def ranking(event: Event | Tokens | Routed) -> IntArray:
    """Return every token's experts [tokens, experts] from best to worst: the papers' vector r.

    The router's own choice comes first, in its order, then the others by descending logit, ties to
    the smaller index. For most routers this is the order of the logits; if the router selects by
    more than its logits (a correction bias, groups), its decision stands.
    """
    cost, top_k = np.negative(event.logits), event.experts.shape[-1]
    cost[each_token(event.experts), event.experts] = -np.inf
    ranked = cost.argsort(axis=-1, kind="stable")
    ranked[:, :top_k] = event.experts
    return ranked


def choose_once(rule: Any) -> None:
    """Let a rule over rows choose for a token, so that its machine code is loaded or made."""
    for loop in (CHEAPEST, SUBSTITUTES):
        loop.upgrade.is_due(ahead=loop.upgrade.make)
    num_experts, top_k = rule.geometry.num_experts, rule.geometry.top_k
    experts, none = np.arange(top_k)[None], np.zeros((1, num_experts), dtype=bool)
    scores, state = np.ones((1, num_experts), np.float32), np.zeros((1, rule.state_size))
    rule.choose(Tokens(0, DECODE, (0,), experts, scores[:, :top_k], scores, none, none, state))


def cheapest(tokens: Tokens, cost: RankCost, scores: FloatArray) -> IntArray | None:
    """Return each token's top_k cheapest experts, best rank first, or None for the router's own.

    Ranks are those of `ranking`. Adds the tokens to the rows' state (see `Seen`).
    """
    resident = np.ascontiguousarray(tokens.resident[:: tokens.by_row[1]])
    given = routed(tokens, scores, resident)
    return given.chosen if CHEAPEST(given, cost, tokens.logits.size) else None


def routed(tokens: Tokens, scores: FloatArray, resident: Array) -> Routed:
    """Return what `take_cheapest` reads and writes for these tokens."""
    logits = np.ascontiguousarray(tokens.logits)
    return Routed(
        layer=tokens.layer,
        experts=np.ascontiguousarray(tokens.experts),
        logits=logits,
        scores=scores,
        resident=resident,
        state=tokens.state,
        chosen=np.empty(tokens.experts.shape, np.int64),
        ranked=np.empty(logits.shape, np.int64),
        sorted=np.empty_like(logits),
        is_ranked=0,
        best=np.empty((tokens.experts.shape[1], 3)),
    )


def substitutes(
    tokens: Tokens,
    cost: SubstituteCost,
    budget: IntArray,
    *,
    scores: FloatArray,
    shares: FloatArray,
    table: tuple[DoubleArray, IntArray],
    reuse: float,
    heaviest_first: bool,
) -> tuple[IntArray, BoolArray]:
    """Replace absent experts by resident ones: BuddyMoE algorithm 1 for any order of preference.

    Each of a token's absent experts in turn, heaviest first or last, is replaced by the cheapest
    resident expert that the token does not have yet, until `budget` [tokens] replacements are
    made. The cost of a substitute used before is multiplied by `reuse`; with `reuse` 0 it is
    excluded. Returns the experts [tokens, top_k] and a mask of the entries for which a substitute
    was sought.
    """
    num_experts, missing = tokens.resident.shape[1], tokens.is_missing
    given = Lacking(
        experts=np.ascontiguousarray(tokens.experts),
        logits=np.ascontiguousarray(tokens.logits),
        scores=scores,
        shares=shares,
        resident=np.ascontiguousarray(tokens.resident[:: tokens.by_row[1]]),
        table=table[0],
        places=np.ascontiguousarray(table[1]),
        left=budget.copy(),
        state=missing.astype(np.int64),
        chosen=tokens.experts.copy(),
        factors=np.empty(num_experts),
        reuse=reuse,
        forwards=int(heaviest_first),
    )
    SUBSTITUTES(given, cost, int(np.count_nonzero(missing)) * num_experts)
    return given.chosen, given.state == SOUGHT
