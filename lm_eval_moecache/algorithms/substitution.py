"""Resident experts in place of a token's absent ones, by a cost of each pair."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lm_eval_moecache.algorithms.choosing import Answer, Asked, Loop
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

ABSENT, SOUGHT = 1, 2
"""Of an entry: its expert is absent, and a substitute has been sought for it."""


@dataclass
class Missing:
    """An absent expert of a token."""

    score: float = 0.0
    """Its softmax score; 0 without `uses_scores`."""
    share: float = 0.0
    """Its share of the token's weight; 0 without `uses_shares`."""


@dataclass
class Substitute:
    """A resident expert that may take an absent one's place."""

    score: float = 0.0
    """As that of `Missing`."""
    standing: float = 0.0
    """Its logit, from 0 for the token's smallest to 1; 0 without `uses_logits`."""
    given: float = 0.0
    """What the rule's table has for the pair; 0 without one."""


SubstituteCost = Callable[[Missing, Substitute], tuple[float, float]]
"""The lowest is taken: the second number decides between equal first ones, then the index; an
infinite first one forbids. Negative where `reuse` is above 0."""


@dataclass
class Replacing(Asked):
    """What `take_substitutes` reads and writes. All but numbers and flags are addresses."""

    cost: int = 0
    missing: int = 0
    substitute: int = 0
    answer: int = 0
    """The rule's function, and the records that it is asked with."""
    experts: int = 0
    """[tokens, top_k], below 0 where dropped."""
    logits: int = 0
    scores: int = 0
    shares: int = 0
    """[tokens, experts] twice and [tokens, top_k], or 0."""
    resident: int = 0
    absent: int = 0
    """Flags [rows, experts]."""
    tables: int = 0
    """[layers], of tables [experts, experts] of `Substitute.given`; 0: none."""
    draws: int = 0
    """[tokens, top_k, experts]: a table for the entries instead; 0: none."""
    budget: int = 0
    """[tokens]: replacements that each may make."""
    chosen: int = 0
    states: int = 0
    """[tokens, top_k], written: what is executed, and `ABSENT` or `SOUGHT` where that holds."""
    factors: int = 0
    """Scratch [experts]."""
    reuse: float = 0.0
    """Factor of the cost of a substitute used before; 0 excludes it."""
    tolerance: float = 2.0
    """Nothing is replaced where this share of a row's experts is absent."""
    forwards: int = 1
    """Whether the heaviest of a token's absent experts is served first."""
    drops: int = 0
    """Whether what finds no substitute is dropped."""


MISSING, SUBSTITUTE, ANSWER = kind_of(Missing), kind_of(Substitute), kind_of(Answer)


def take_substitutes(given: Replacing, start: int, stop: int) -> int:
    """Replace absent experts of a row's tokens in turn; return how many entries change."""
    top_k, first = given.top_k, given.row * given.num_experts
    experts, absent = numbers(given.experts, INTS), numbers(given.absent, FLAGS)
    chosen, states = numbers(given.chosen, INTS), numbers(given.states, INTS)
    lacking = needed = 0
    factors = numbers(given.factors, DOUBLES)
    for expert in range(given.num_experts):
        factors[expert] = 0.0
    for entry in range(start * top_k, stop * top_k):
        chosen[entry] = experts[entry]
        states[entry] = 0
        if experts[entry] >= 0:
            states[entry] = ABSENT if absent[first + experts[entry]] else 0
            if factors[experts[entry]] == 0.0:
                needed += 1
                lacking += absent[first + experts[entry]]
            factors[experts[entry]] = 1.0
    changes = 0
    if lacking < given.tolerance * needed:
        for token in range(start, stop):
            changes += substitutes_of_token(given, token)
    return changes


def substitutes_of_token(given: Replacing, token: int) -> int:
    """Replace a token's absent experts in turn; return how many entries change."""
    top_k, num_experts, own = given.top_k, given.num_experts, token * given.top_k
    experts, states = numbers(given.experts, INTS), numbers(given.states, INTS)
    chosen, factors = numbers(given.chosen, INTS), numbers(given.factors, DOUBLES)
    resident, logits = numbers(given.resident, FLAGS), numbers(given.logits, FLOATS)
    scores, shares = numbers(given.scores, FLOATS), numbers(given.shares, FLOATS)
    missing, other = at(given.missing, 0, MISSING), at(given.substitute, 0, SUBSTITUTE)
    table, pair = numbers(given.draws, DOUBLES), 0
    if given.tables:
        table = numbers(numbers(given.tables, INTS)[given.layer], DOUBLES)
    answer, left = at(given.answer, 0, ANSWER), numbers(given.budget, INTS)[token]
    row, is_ready, low, span, changes = token * num_experts, False, 0.0, 1.0, 0
    for turn in range(top_k):
        entry = own + (turn if given.forwards else top_k - 1 - turn)
        if states[entry] != ABSENT or left <= 0:
            continue
        if not is_ready:
            # A factor of 0 marks what may not be taken.
            is_ready = True
            for expert in range(num_experts):
                factors[expert] = 1.0 if resident[given.row * num_experts + expert] else 0.0
            for place in range(own, own + top_k):
                if experts[place] >= 0:
                    factors[experts[place]] = 0.0
            if given.logits:
                low = high = float(logits[row])
                for expert in range(num_experts):
                    low = min(low, float(logits[row + expert]))
                    high = max(high, float(logits[row + expert]))
                span = max(high - low, 1e-9)
        states[entry] = SOUGHT
        best, best_a, best_b = -1, math.inf, math.inf
        pair = num_experts * (experts[entry] if given.tables else entry)
        missing.score = float(scores[row + experts[entry]]) if given.scores else 0.0
        missing.share = float(shares[entry]) if given.shares else 0.0
        for expert in range(num_experts):
            if factors[expert] == 0.0:
                continue
            if given.scores:
                other.score = float(scores[row + expert])
            if given.logits:
                other.standing = (float(logits[row + expert]) - low) / span
            if given.tables or given.draws:
                other.given = table[pair + expert]
            invoke(given.cost, given.missing, given.substitute, given.answer)
            first, second = answer.first * factors[expert], answer.second
            if first < best_a or (best >= 0 and first == best_a and second < best_b):
                best, best_a, best_b = expert, first, second
        if best >= 0:
            chosen[entry] = best
            left -= 1
            factors[best] *= given.reuse
            changes += 1
        elif given.drops:
            chosen[entry] = -1
            changes += 1
    return changes


class Substitution(Loop):
    """`take_substitutes` by a rule's cost.

    BuddyMoE algorithm 1 for any order of preference: each of a token's absent experts in turn is
    replaced by the cheapest resident expert that the token does not have yet, until its budget is
    spent.
    """

    def __init__(self, cost: SubstituteCost, geometry: Geometry) -> None:
        super().__init__(sys.modules[__name__], "take_substitutes", Replacing, geometry)
        self.ask(cost, missing=Missing, substitute=Substitute)
        self.give(factors=np.zeros(geometry.num_experts))
