"""Experts to prefetch by predicted scores: each token's likeliest, or those above a quantile."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.choosing import Asked, Loop, sort_experts
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.memory import FLAGS, FLOATS, INTS, address_of, numbers

BINS = 4096
"""Of a history's histogram. Its last bin is for scores of exactly 1."""


@dataclass
class Proposing(Asked):
    """What `propose` reads and writes. All but numbers are addresses."""

    tokens: int = 1
    """Of the event."""
    first_layer: int = 0
    """Of the layers that it predicts, which follow each other; a number from `num_layers` on is of
    the next pass."""
    num_layers: int = 0
    scores: int = 0
    """[predictions, experts]: softmax, or logits where a token is alone and `count` decides."""
    count: int = 0
    """Experts for each token; 0: those above a bar."""
    bars: int = 0
    """[predictions], of scores; 0: the quantile of the row's history decides."""
    share: float = 0.0
    """Which quantile that is."""
    histories: int = 0
    """[rows], of histograms [layers, BINS + 1] and what is said of each [layers, 3]: how many
    scores there are, the bin of the quantile, and how many lie in bins before that."""
    keys: int = 0
    """[experts x layers ahead], written: what is proposed, in order."""
    mass: int = 0
    wanted: int = 0
    best: int = 0
    """Scratch [experts]: the summed scores of what is wanted, and whether it is; and experts."""


def propose(given: Proposing, start: int, stop: int) -> int:
    """Write the keys proposed by an event's predictions; return how many they are.

    The predictions `start` to `stop` are each token's in turn, one for each predicted layer. Of a
    layer the expert with the largest sum comes first, ties by key.
    """
    step, found = (stop - start) // given.tokens, 0
    wanted = numbers(given.wanted, FLAGS)
    for ahead in range(step):
        layer = (given.first_layer + ahead) % given.num_layers
        for expert in range(given.num_experts):
            wanted[expert] = 0
        bar = 0.0
        if given.histories:
            for row in range(start + ahead, stop, step):
                add_scores(given, layer, row)
            bar = quantile(given, layer)
        for row in range(start + ahead, stop, step):
            if given.count:
                want_likeliest(given, row)
            else:
                want_above(given, row, numbers(given.bars, FLOATS)[row] if given.bars else bar)
        found += write_wanted(given, layer, found)
    return found


def want(given: Proposing, row: int, expert: int) -> None:
    """Add a prediction's score of an expert to what is wanted."""
    mass, wanted = numbers(given.mass, FLOATS), numbers(given.wanted, FLAGS)
    score = numbers(given.scores, FLOATS)[row * given.num_experts + expert]
    mass[expert] = mass[expert] + score if wanted[expert] else score
    wanted[expert] = 1


def want_above(given: Proposing, row: int, bar: float) -> None:
    """Let a token want what scores above a bar."""
    scores, first = numbers(given.scores, FLOATS), row * given.num_experts
    for expert in range(given.num_experts):
        if scores[first + expert] > bar:
            want(given, row, expert)


def want_likeliest(given: Proposing, row: int) -> None:
    """Let a token want its `count` likeliest experts, ties by index."""
    scores, best, taken = numbers(given.scores, FLOATS), numbers(given.best, INTS), 0
    first = row * given.num_experts
    for expert in range(given.num_experts):
        score, place = scores[first + expert], taken
        while place > 0 and scores[first + best[place - 1]] < score:
            place -= 1
        if place < given.count:
            taken = min(taken + 1, given.count)
            for behind in range(taken - 1, place, -1):
                best[behind] = best[behind - 1]
            best[place] = expert
    for place in range(taken):
        want(given, row, best[place])


def write_wanted(given: Proposing, layer: int, found: int) -> int:
    """Write a layer's wanted keys behind those found, largest sum first; return how many."""
    keys, wanted = numbers(given.keys + 8 * found, INTS), numbers(given.wanted, FLAGS)
    count, base = 0, layer * given.num_experts
    for expert in range(given.num_experts):
        if wanted[expert]:
            keys[count] = expert
            count += 1
    sort_experts(given.keys + 8 * found, count, given.mass)
    for place in range(count):
        keys[place] += base
    return count


def add_scores(given: Proposing, layer: int, row: int) -> None:
    """Add a prediction's scores to the row's histogram of a layer."""
    histories, scores = numbers(given.histories, INTS), numbers(given.scores, FLOATS)
    counts = numbers(histories[2 * given.row] + 8 * layer * (BINS + 1), INTS)
    place = numbers(histories[2 * given.row + 1] + 24 * layer, INTS)
    first = row * given.num_experts
    for entry in range(first, first + given.num_experts):
        own = int(scores[entry] * BINS)
        counts[own] += 1
        place[2] += own < place[1]
    place[0] += given.num_experts


def quantile(given: Proposing, layer: int) -> float:
    """Move to the bin of the quantile of a layer's scores so far; return its lower edge.

    An event moves it only a little, so that stepping there is cheaper than summing the bins.
    """
    histories = numbers(given.histories, INTS)
    counts = numbers(histories[2 * given.row] + 8 * layer * (BINS + 1), INTS)
    place = numbers(histories[2 * given.row + 1] + 24 * layer, INTS)
    own, below, rank = place[1], place[2], given.share * place[0]
    while own < BINS - 1 and below + counts[own] < rank:
        below += counts[own]
        own += 1
    while own > 0 and below >= rank:
        own -= 1
        below -= counts[own]
    place[1] = own
    place[2] = below
    return own / BINS


class Likeliest(Loop):
    """`propose` by a number of experts, a bar, or a history."""

    def __init__(self, geometry: Geometry, **given: Any) -> None:
        num_layers, num_experts = geometry.num_layers, geometry.num_experts
        given |= {"num_layers": num_layers}
        super().__init__(sys.modules[__name__], "propose", Proposing, geometry, **given)
        self.keys: IntArray = np.zeros(num_layers * num_experts, np.int64)
        self.give(
            keys=self.keys,
            mass=np.zeros(num_experts, np.float32),
            wanted=np.zeros(num_experts, bool),
            best=np.zeros(num_experts, np.int64),
        )

    def of_event(self, layer: int, tokens: int) -> list[int]:
        """Return the keys for one layer, by its predictions of these tokens."""
        from lm_eval_moecache.records.machine_code import raise_kept  # imports numba

        self.record.row, self.record.first_layer, self.record.tokens = 0, layer, tokens
        count = self.function(address_of(self.record), 0, tokens)
        raise_kept()
        keys: list[int] = self.keys[:count].tolist()
        return keys
