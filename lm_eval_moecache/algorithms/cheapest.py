"""A token's cheapest experts, by a cost of each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lm_eval_moecache.algorithms.choosing import Answer, Asked, Loop, sort_experts
from lm_eval_moecache.records.arrays import IntArray, each_token
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.memory import (
    DOUBLES,
    FLAGS,
    FLOATS,
    INTS,
    at,
    invoke,
    kind_of,
    numbers,
)


@dataclass
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


@dataclass
class Seen:
    """A token's logits, and those of all tokens that its row has routed in the layer so far."""

    layer: int = 0
    range: float = 0.0
    """The largest logit less the smallest."""
    average: float = 0.0
    tokens: float = 0.0
    """How many so far, those of the event included, and the sums of their ranges and means."""
    ranges: float = 0.0
    means: float = 0.0


RankCost = Callable[[Ranked, Seen], tuple[float, float]]
"""The lowest are taken: the second number decides between equal first ones, then the rank."""


@dataclass
class Ranking(Asked):
    """What `take_cheapest` reads and writes: addresses."""

    cost: int = 0
    expert: int = 0
    seen: int = 0
    answer: int = 0
    """The rule's function, and the records that it is asked with: `Ranked`, `Seen`, `Answer`."""
    experts: int = 0
    logits: int = 0
    """[tokens, top_k], the router's own, and [tokens, experts]."""
    scores: int = 0
    """[tokens, experts], or 0."""
    resident: int = 0
    """Flags [rows, experts]."""
    states: int = 0
    """[rows], of each row's numbers [layers, 3]: `Seen.tokens`, `ranges` and `means`."""
    chosen: int = 0
    """[tokens, top_k], written: the cheapest, in the order of their ranks."""
    ranked: int = 0
    sorted: int = 0
    best: int = 0
    """Scratch [experts], [experts], [top_k, 3]: a token's experts from best to worst, its logits
    sorted, and its cheapest ranks."""


RANKED, SEEN, ANSWER = kind_of(Ranked), kind_of(Seen), kind_of(Answer)


def rank_experts(given: Ranking, token: int) -> None:
    """Write a token's experts from best to worst, and its logits sorted."""
    num_experts, top_k = given.num_experts, given.top_k
    experts, logits = numbers(given.experts, INTS), numbers(given.logits, FLOATS)
    ranked, ordered = numbers(given.ranked, INTS), numbers(given.sorted, FLOATS)
    own, row, place = token * top_k, token * num_experts, top_k
    for expert in range(num_experts):
        ordered[expert] = 0.0
    for rank in range(top_k):
        ranked[rank] = experts[own + rank]
        ordered[experts[own + rank]] = 1.0  # a mark, for now
    for expert in range(num_experts):
        if ordered[expert] == 0.0:
            ranked[place] = expert
            place += 1
    sort_experts(given.ranked + 8 * top_k, num_experts - top_k, given.logits + 4 * row)
    is_sorted = True
    for rank in range(num_experts):
        ordered[rank] = logits[row + ranked[rank]]
        is_sorted = is_sorted and (rank == 0 or ordered[rank - 1] >= ordered[rank])
    # A router may select by more than its logits.
    for start in range(1, 0 if is_sorted else num_experts):
        value, place = ordered[start], start
        while place > 0 and ordered[place - 1] < value:
            ordered[place] = ordered[place - 1]
            place -= 1
        ordered[place] = value


def see_token(given: Ranking, seen: Seen) -> None:
    """Write the range and the mean of the logits of the token that has just been ranked."""
    ordered, total = numbers(given.sorted, FLOATS), 0.0
    for rank in range(given.num_experts):
        total += float(ordered[rank])
    # In the precision of logits.
    seen.range = float(np.float32(ordered[0] - ordered[given.num_experts - 1]))
    seen.average = total / given.num_experts


def take_cheapest(given: Ranking, start: int, stop: int) -> int:
    """Choose the experts of tokens that a row routes at once; return how many entries change."""
    seen = at(given.seen, 0, SEEN)
    state = numbers(numbers(given.states, INTS)[given.row] + 24 * given.layer, DOUBLES)
    seen.layer = given.layer
    for token in range(start, stop):
        rank_experts(given, token)
        see_token(given, seen)
        state[0] += 1
        state[1] += seen.range
        state[2] += seen.average
    seen.tokens = state[0]
    seen.ranges = state[1]
    seen.means = state[2]
    changes = 0
    for token in range(start, stop):
        if stop - start > 1:
            rank_experts(given, token)
            see_token(given, seen)
        changes += cheapest_of_token(given, token)
    return changes


def cheapest_of_token(given: Ranking, token: int) -> int:
    """Choose the experts of the token that has just been ranked; return how many change."""
    num_experts, top_k = given.num_experts, given.top_k
    expert, answer = at(given.expert, 0, RANKED), at(given.answer, 0, ANSWER)
    scores, flags = numbers(given.scores, FLOATS), numbers(given.resident, FLAGS)
    ranked, ordered = numbers(given.ranked, INTS), numbers(given.sorted, FLOATS)
    best, taken = numbers(given.best, DOUBLES), 0
    expert.before = 0.0
    for rank in range(num_experts):
        own = ranked[rank]
        expert.rank = rank
        expert.logit = float(ordered[rank])
        expert.resident = flags[given.row * num_experts + own]
        expert.score = float(scores[token * num_experts + own]) if given.scores else 0.0
        invoke(given.cost, given.expert, given.seen, given.answer)
        first, second = answer.first, answer.second
        expert.before += expert.score
        place = taken
        while place > 0 and (
            first < best[3 * place - 3]
            or (first == best[3 * place - 3] and second < best[3 * place - 2])
        ):
            place -= 1
        if place == top_k:
            continue
        taken = min(taken + 1, top_k)
        for number in range(3 * taken - 1, 3 * place + 2, -1):
            best[number] = best[number - 3]
        best[3 * place] = first
        best[3 * place + 1] = second
        best[3 * place + 2] = rank
    experts, chosen, changes = numbers(given.experts, INTS), numbers(given.chosen, INTS), 0
    for place in range(top_k):
        # In the order of their ranks; the router's own are the first of these.
        lowest = num_experts
        for other in range(top_k):
            if best[3 * other + 2] < lowest:
                lowest = int(best[3 * other + 2])
        for other in range(top_k):
            if best[3 * other + 2] == lowest:
                best[3 * other + 2] = num_experts
        changes += experts[token * top_k + place] != ranked[lowest]
        chosen[token * top_k + place] = ranked[lowest]
    return changes


class Cheapest(Loop):
    """`take_cheapest` by a rule's cost."""

    def __init__(self, cost: RankCost, geometry: Geometry) -> None:
        super().__init__(sys.modules[__name__], "take_cheapest", Ranking, geometry)
        self.ask(cost, expert=Ranked, seen=Seen)
        self.give(
            ranked=np.zeros(geometry.num_experts, np.int64),
            sorted=np.zeros(geometry.num_experts, np.float32),
            best=np.zeros(3 * geometry.top_k),
        )


def ranking(event: Event) -> IntArray:
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
