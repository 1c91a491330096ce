"""Prefetchers by hand and against slow versions: expert maps, importance, score and oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.eviction.importance import Importance
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.prefetch import score
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm, by_mass
from lm_eval_moecache.algorithms.prefetch.gates import NextGate
from lm_eval_moecache.algorithms.prefetch.score import Score
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.records.arrays import FloatArray, softmax
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing.streams import StreamFuture, make_event, make_geometry, run
from tests.engine.traces import geometry_of

LAYERS, EXPERTS, TOP_K = 4, 8, 2
GEOMETRY = geometry_of((10,) * LAYERS, EXPERTS, TOP_K)


event = partial(make_event, GEOMETRY)


class SlowMaps:
    """Keeps every map as a matrix, computes every cosine anew and evicts nothing."""

    def __init__(self, distance: int) -> None:
        self.distance, self.past = distance, list[np.ndarray]()

    def propose(self, now: np.ndarray, layer: int) -> list[int]:
        if not self.past:
            return []
        rows = now[: layer + 1].ravel()
        cosines = [
            float(rows @ (p := old[: layer + 1].ravel()) / np.linalg.norm(rows) / np.linalg.norm(p))
            for old in self.past
        ]
        best = int(np.argmax(cosines))
        target = (layer + self.distance) % LAYERS
        row, proposal, mass = self.past[best][target], list[int](), 0.0
        for expert in sorted(range(EXPERTS), key=lambda e: (-round(row[e], 9), e)):
            if len(proposal) >= TOP_K and mass >= 1 - cosines[best]:
                break
            proposal.append(target * EXPERTS + expert)
            mass += row[expert]
        return proposal


@pytest.mark.parametrize("distance", [1, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_expert_maps_propose_what_the_slow_search_does(distance: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fast = find_algorithm("prefetch", "expert_map")(GEOMETRY, distance=distance)
    slow = SlowMaps(distance)
    proposals = 0
    for index in range(25):
        fast.on_pass(index)
        now = np.zeros((LAYERS, EXPERTS))
        for layer in range(LAYERS):
            spread = 3.0 if layer % 2 == 0 else 0.3
            logits = (rng.normal(size=(1 + index % 3, EXPERTS)) * spread).astype(np.float32)
            now[layer] = softmax(logits).astype(np.float64).mean(axis=0)
            proposal = fast.propose(event(index, layer, logits))
            assert list(proposal) == slow.propose(now, layer)
            proposals += len(proposal)
        slow.past.append(now)
    assert proposals > 24 * LAYERS * TOP_K, "no poor match ever fetched more than top_k"


def test_a_full_store_gives_up_the_map_most_like_the_newcomer() -> None:
    prefetch = find_algorithm("prefetch", "expert_map")(GEOMETRY, maps=2, distance=1)

    def ask(index: int, layer: int, favourite: int) -> int | None:
        logits = np.full((1, EXPERTS), -9, dtype=np.float32)
        logits[0, favourite] = 9
        return next(iter(prefetch.propose(event(index, layer, logits))), None)

    for index, favourite in enumerate((0, 1, 1)):  # the third replaces the second, not the first
        prefetch.on_pass(index)
        for layer in range(LAYERS):
            ask(index, layer, favourite)
    prefetch.on_pass(3)
    assert ask(3, 0, 0) == EXPERTS + 0


def test_importance_is_the_decayed_sum_of_gate_scores() -> None:
    prefetch = find_algorithm("prefetch", "importance")(GEOMETRY, experts=1, decay=0.5)
    strong = np.log(np.array([[0.93, *[0.01] * 7]], dtype=np.float32))
    weak = np.log(np.array([[0.16, 0.78, *[0.01] * 6]], dtype=np.float32))
    # Expert 0 has 0.93 after one turn, then 0.465 + 0.16 = 0.625 against 0.005 + 0.78 = 0.785.
    assert list(prefetch.propose(event(0, 2, strong))) == [2 * EXPERTS]
    assert list(prefetch.propose(event(1, 2, weak))) == [2 * EXPERTS + 1]
    # Without decay it is 1.09 against 0.79.
    undecayed = find_algorithm("prefetch", "importance")(GEOMETRY, experts=1, decay=1.0)
    undecayed.propose(event(0, 2, strong))
    assert list(undecayed.propose(event(1, 2, weak))) == [2 * EXPERTS]


# --- importance as an eviction ---


SMALL = make_geometry(num_layers=2, num_experts=4, top_k=1)


def scored(index: int, layer: int, scores: list[float]) -> Event:
    return make_event(SMALL, index, layer, np.log([scores]))


def test_the_least_important_leaves_and_layers_compare() -> None:
    rule = Importance(SMALL, decay=0.5)
    for key in (0, 1, 2, 4, 5):
        rule.on_insert(key, key == 2)
    rule.on_event(scored(0, 0, [0.5, 0.3, 0.1, 0.1]))
    rule.on_event(scored(0, 1, [0.6, 0.2, 0.1, 0.1]))
    # 0.1, 0.2, 0.3, 0.5, 0.6: keys 2, 5, 1, 0, 4.
    assert [rule.victim(set(), 0), rule.victim({2}, 0), rule.victim({2, 5}, 0)] == [2, 5, 1]
    rule.on_event(scored(1, 0, [0.1, 0.1, 0.7, 0.1]))
    # Layer 0: 0.35, 0.25, 0.75; layer 1 is unchanged.
    assert [rule.victim(set(), 0), rule.victim({5}, 0), rule.victim({5, 1}, 0)] == [5, 1, 0]


def test_an_expert_is_as_important_when_it_comes_back() -> None:
    rule = Importance(SMALL)
    rule.on_event(scored(0, 0, [0.1, 0.2, 0.3, 0.4]))
    for key in (3, 1, 2):
        rule.on_insert(key, True)
    assert rule.victim(set(), 1) == 1


def test_what_swapmoe_prefetches_stays() -> None:
    """LFU evicts prefetched experts before their turn, as they have no uses yet."""
    geometry = make_geometry(num_layers=3, num_experts=16, top_k=2)

    def hits(eviction: str) -> int:
        policy = load_policy("swapmoe", {"eviction": eviction})
        served = run(policy, geometry, "40%", num_requests=2, num_decodes=20).engine
        return sum(p.prefetch_hits for p in served.ledger.passes)

    assert hits("importance") > hits("lfu")


# --- the running percentile of score, against sorting all scores so far ---


TWO_LAYERS = geometry_of((1, 1), 16, 2)


def single(logits: FloatArray) -> Event:
    return Event(0, 0, DECODE, len(logits), [0, 1], predicted={1: logits})


def proposed(algorithm: Score, logits: FloatArray) -> set[int]:
    return {key - 16 for key in algorithm.propose(single(logits))}


@pytest.mark.parametrize("percentile", [0.0, 33.0, 80.0, 99.5, 100.0])
@pytest.mark.parametrize("spread", [0.1, 2.0, 40.0])
def test_the_bar_is_the_bin_of_the_percentile_of_all_scores(
    percentile: float, spread: float
) -> None:
    rng = np.random.default_rng(7)
    algorithm = Score(TWO_LAYERS, percentile=percentile)
    bins: list[float] = []
    for step in range(200):
        # The spread changes every 50 steps, so that the percentile moves far, up and down.
        scale = spread if step // 50 % 2 else 0.5
        logits = rng.normal(0, scale, (1 + 3 * (step % 5 == 0), 16)).astype(np.float32)
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        bins = sorted([*bins, *np.minimum(np.floor(scores * 4096), 4095).ravel().tolist()])
        rank = int(np.ceil(percentile / 100 * len(bins)))
        bar = 0 if rank == 0 else bins[rank - 1] / 4096
        assert proposed(algorithm, logits) == set(np.flatnonzero((scores > bar).any(0)).tolist())


def test_where_most_scores_are_below_a_bin_all_experts_are_proposed() -> None:
    logits = np.arange(16, 0, -1, dtype=np.float32)[None] * 3
    assert proposed(Score(TWO_LAYERS), logits) == set(range(16))
    assert len(proposed(Score(TWO_LAYERS, scope="token"), logits)) == 3


def set_form(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let many events be taken in machine code from the first one on, or never."""
    if compiles:
        monkeypatch.setattr(pytest.importorskip("numba").config, "DISABLE_JIT", False)
    monkeypatch.setattr(score.UPGRADE, "is_due", lambda done=0: compiles)


@pytest.mark.parametrize("percentile", [0.0, 33.0, 80.0, 99.5, 100.0])
@pytest.mark.parametrize("compiles", [False, True])
def test_many_steps_at_once_move_the_bar_as_single_ones_do(
    percentile: float, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_form(compiles, monkeypatch)
    rng = np.random.default_rng(8)
    at_once, alone = (Score(TWO_LAYERS, percentile=percentile) for _ in range(2))
    for size in (1, 2, 30, 7, 60, 5):
        # A chunk of another spread moves the percentile beyond the bins searched first.
        logits = rng.normal(0, rng.choice([0.1, 1, 40]), (size, 16)).astype(np.float32)
        proposals = at_once.propose_arrays([1] * size, logits)
        assert proposals is not None
        keys, counts = proposals
        rows = np.split(keys, counts.cumsum()[:-1])
        one_by_one = [alone.propose(single(row[None])) for row in logits]
        assert [row.tolist() for row in rows] == one_by_one


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("make", [Score, partial(Score, scope="token"), NextGate])
def test_rows_propose_together_what_each_proposes_alone(
    make: Callable[[Geometry], PrefetchAlgorithm], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_form(compiles, monkeypatch)
    rng = np.random.default_rng(9)
    together, alone = ([make(TWO_LAYERS) for _ in range(3)] for _ in range(2))
    for _ in range(5):
        # Other spreads, so that the rows' own histories differ.
        logits = rng.normal(0, [[[1]], [[5]], [[40]]], (3, 2, 16)).astype(np.float32)
        keys, counts = together[0].propose_rows(together, [0, 1], logits)
        told = [rule.propose_arrays([0, 1], own) for rule, own in zip(alone, logits, strict=True)]
        assert keys.tolist() == [key for own in told if own is not None for key in own[0]]
        assert counts.tolist() == [count for own in told if own is not None for count in own[1]]


# --- oracle: a predictor of stated quality has that quality ---


WIDE = make_geometry(num_layers=4, num_experts=32, top_k=4)
NUM_PASSES = 150


RNG = np.random.default_rng(0)
EVENTS = [
    Event(p, layer, DECODE, 1, (32 * layer + RNG.permutation(32)[:4]).tolist())
    for p in range(NUM_PASSES)
    for layer in range(4)
]


def propose_all(seed: int = 0, **parameters: Any) -> list[list[int]]:
    """The proposals at each event, in order."""
    oracle = find_algorithm("prefetch", "oracle")(WIDE, seed=seed, **parameters)
    oracle.prepare(StreamFuture(WIDE, [EVENTS]))
    return [list(oracle.propose(event)) for event in EVENTS]


def test_by_default_it_names_exactly_what_the_next_event_needs() -> None:
    assert propose_all()[:-1] == [event.keys for event in EVENTS[1:]]
    assert propose_all()[-1] == []


@pytest.mark.parametrize(
    ("recall", "precision"), [(0.75, 1.0), (1.0, 0.5), (0.85, 0.85), (0.95, 0.6), (0.3, 0.2)]
)
def test_recall_and_precision_are_what_was_asked_for(recall: float, precision: float) -> None:
    proposals = propose_all(recall=recall, precision=precision)[:-1]
    right = sum(len(set(t) & set(e.keys)) for t, e in zip(proposals, EVENTS[1:], strict=True))
    needed = sum(len(event.keys) for event in EVENTS[1:])
    # Four deviations of a binomial: a wrong formula is further off.
    tolerance = 4 * np.sqrt(recall * (1 - recall) / needed)
    assert abs(right / needed - recall) <= tolerance
    assert right / sum(map(len, proposals)) == pytest.approx(precision, abs=0.02)
    for proposed, event in zip(proposals, EVENTS[1:], strict=True):
        assert len(set(proposed)) == len(proposed)
        assert {key // 32 for key in proposed} <= {event.layer}


def test_asked_from_further_away_it_says_the_same() -> None:
    near = propose_all(recall=0.7, precision=0.7)
    far = propose_all(recall=0.7, precision=0.7, horizon=3)
    for place in range(len(EVENTS) - 3):
        assert far[place] == near[place] + near[place + 1] + near[place + 2]


def test_another_seed_overlooks_others_and_right_ones_keep_their_order() -> None:
    first, repeat, another = (propose_all(seed=s, recall=0.7, precision=0.7) for s in (1, 1, 2))
    assert first == repeat != another
    for proposed, event in zip(first, EVENTS[1:], strict=False):
        right = [key for key in proposed if key in event.keys]
        assert right == [key for key in event.keys if key in proposed]


def test_wrong_ones_stand_at_every_place() -> None:
    """If they always came last, a saturated link would never carry them."""
    places = np.zeros(6)
    for proposed, event in zip(propose_all(precision=0.67), EVENTS[1:], strict=False):
        for place, key in enumerate(proposed[:6]):
            places[place] += key not in event.keys
    assert places.min() > 0.5 * places.mean()


def test_several_tokens_rank_experts_by_their_summed_scores() -> None:
    """Expert 2 is nobody's favourite, but 0.4 + 0.4 is more than 0.6; ties go to the smaller."""
    scores = np.array([[0.6, 0.0, 0.4, 0.0], [0.0, 0.6, 0.4, 0.0]])
    assert by_mass(1, scores > 0, scores) == [4 + 2, 4 + 0, 4 + 1]
    # What no token wants does not count, however likely.
    assert by_mass(0, np.array([[True, False, False, True]] * 2), scores) == [0, 3]
