"""Every algorithm against its slow version, key by key, on random event streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm, parameters_of
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.tokens import Tokens
from lm_eval_moecache.testing.contracts import Pool
from lm_eval_moecache.testing.streams import fresh, make_event, make_geometry, make_stream
from tests.algorithms import oracles
from tests.algorithms.oracles import Entry, Scene
from tests.algorithms.test_libcachesim import THEIRS

GEOMETRY = make_geometry(num_layers=3, num_experts=4, top_k=2)
EXPERT = st.integers(0, GEOMETRY.num_experts - 1)
KEY = st.integers(0, GEOMETRY.num_layers * GEOMETRY.num_experts - 1)
TOKEN = st.lists(EXPERT, min_size=2, max_size=2, unique=True)
EVENT = st.tuples(
    st.just("event"),
    st.integers(0, GEOMETRY.num_layers - 1),
    st.lists(TOKEN, min_size=1, max_size=2),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
)
STEP = st.one_of(
    EVENT,
    EVENT,
    st.tuples(st.just("pass")),
    st.tuples(st.just("prefetch"), KEY),
    st.tuples(st.just("wish"), KEY),
)
READINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in oracles.EVICTIONS),
    # Every reading of a paper, each alone.
    *(
        (name, {key: value})
        for name in oracles.EVICTIONS
        for key, parameter in parameters_of(find_algorithm("eviction", name)).items()
        for value in get_args(parameter.annotation)
        if value != parameter.default and isinstance(value, str)
    ),
    ("score", {"history": "decayed", "decay": 0.5}),
    ("heat_lru", {"protect_above": 1}),
    ("hysteresis", {"half_life": 2}),
    ("least_stale", {"protect": "none", "order": "fifo"}),
]
LIGHT = settings(max_examples=25, derandomize=True)


class Witness(Pool):
    """A small cache that compares the algorithm's victims with the oracle's."""

    def __init__(self, name: str, parameters: dict[str, Any], size: int) -> None:
        super().__init__(find_algorithm("eviction", name)(GEOMETRY, **parameters), size)
        self.oracle, self.parameters = oracles.EVICTIONS[name], parameters
        self.log, self.pass_index, self.num_events = [Entry("pass")], 0, 0
        self.eviction.on_pass(0)

    def play(self, steps: Sequence[Any]) -> None:
        for what, *rest in steps:
            if what == "pass":
                self.pass_index += 1
                self.log.append(Entry("pass"))
                self.eviction.on_pass(self.pass_index)
            elif what == "event":
                self.execute(*rest)
            elif what == "prefetch" and rest[0] not in self.keys:
                if len(self.keys) == self.size:
                    self.evict(set(), layer=1)
                self.insert(rest[0], prefetched=True)
            elif what == "wish" and rest[0] in self.keys:
                self.log.append(Entry("wish", rest[0]))
                self.eviction.on_predicted(rest[0])

    def execute(self, layer: int, tokens: list[list[int]], weights: list[int]) -> None:
        event = self.event(layer, tokens, weights)
        self.load(event)
        # Any levels will do: these are derived from the weights.
        levels = {k: weights[k % len(weights)] % 3 for k in event.keys}
        self.eviction.on_levels(event, levels)
        for key in event.keys:
            assigned = event.experts == key % GEOMETRY.num_experts
            served = tuple(event.weights[assigned].tolist())
            places = tuple(assigned.ravel().nonzero()[0].tolist())
            use = Entry("use", key, served, levels[key], event=self.num_events, places=places)
            self.log.append(use)
        self.num_events += 1

    def event(self, layer: int, tokens: list[list[int]], weights: list[int]) -> Event:
        experts = np.array(tokens)
        keys = list(dict.fromkeys((experts + layer * GEOMETRY.num_experts).ravel().tolist()))
        shares = np.array(weights[: experts.size], dtype=np.float32).reshape(experts.shape) / 16
        return Event(self.pass_index, layer, DECODE, len(tokens), keys, experts, shares)

    def evict(self, pinned: set[int], layer: int) -> None:
        scene = Scene(self.log, self.keys, pinned, layer, GEOMETRY)
        order = {k: self.oracle(scene, k, **self.parameters) for k in scene.free}
        expected = min(order, key=lambda k: order[k]) if order else None
        victim = self.eviction.victim(pinned, layer)
        assert victim == expected, f"{victim} leaves, but by {order} it is {expected}'s turn"
        super().evict(pinned, layer)
        self.log += [Entry("evict", victim)] if victim is not None else []

    def insert(self, key: int, prefetched: bool = False) -> None:
        self.log.append(Entry("insert", key, prefetched=prefetched))
        super().insert(key, prefetched)


@pytest.mark.parametrize(("name", "parameters"), READINGS)
def test_an_eviction_agrees_with_its_oracle_key_by_key(
    name: str, parameters: dict[str, Any]
) -> None:
    @LIGHT
    @given(steps=st.lists(STEP, min_size=5, max_size=30), size=st.integers(1, 7))
    def agree(steps: list[Any], size: int) -> None:
        Witness(name, parameters, size).play(steps)

    agree()


def test_every_online_deterministic_eviction_has_an_oracle() -> None:
    """The textbook rules have an independent one (`test_libcachesim.py`)."""
    # Random is tested by its distribution; Belady, importance and hazard in their own files; the
    # others by their scripts.
    has_none = {"random", "belady", "importance", "hazard", "w_tinylfu", "pinned_lru"}
    online = {n for n in algorithm_names("eviction") if n not in has_none | THEIRS.keys()}
    missing = online - oracles.EVICTIONS.keys()
    assert not missing, f"{missing}: add to _RULES of tests/algorithms/oracles.py"


# Whole logits, so that ties are common.
LOGITS = st.lists(st.integers(-3, 3).map(float), min_size=8, max_size=8)
CACHED = st.sets(st.integers(0, 7))
WIDE = make_geometry(num_layers=1, num_experts=8, top_k=3)


def select(name: str, logits: list[float], cached: set[int], **parameters: Any) -> set[int]:
    routing = find_algorithm("routing", name)(WIDE, **parameters)
    event = make_event(WIDE, 0, 0, [logits])
    selection = routing.select(fresh(event), cached)
    experts = event.experts if selection is None else selection.experts
    return set(experts[0].tolist())


@LIGHT
@given(LOGITS, CACHED, st.integers(4, 8), st.floats(0.05, 0.97), st.integers(0, 2))
def test_max_rank_and_cumsum_agree_with_algorithms_1_and_2(
    logits: list[float], cached: set[int], M: int, p: float, J: int
) -> None:
    assert select("max_rank", logits, cached, M=M, J=J) == oracles.max_rank(logits, cached, 3, M, J)
    assert select("cumsum", logits, cached, p=p, J=J) == oracles.cumsum(logits, cached, 3, p, J)


@LIGHT
@given(
    st.lists(LOGITS, min_size=1, max_size=4),
    CACHED,
    st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    st.integers(0, 2),
    st.sampled_from(["range", "mean"]),
)
def test_cache_prior_agrees_with_equations_9_and_10(
    texts: list[list[float]], cached: set[int], lambda_: float, top_j: int, delta: str
) -> None:
    routing = find_algorithm("routing", "cache_prior")(
        WIDE, lambda_=lambda_, top_j=top_j, delta=delta
    )
    seen = []
    for logits in texts:
        # A mean may be negative, and then resident experts are lowered.
        mean = float(np.mean(np.array(logits, dtype=np.float32)))
        seen.append(mean if delta == "mean" else max(logits) - min(logits))
        event = make_event(WIDE, 0, 0, [logits])
        selection = routing.select(fresh(event), cached)
        prior = lambda_ * sum(seen) / len(seen)
        expected = oracles.cache_prior(logits, cached, 3, prior, top_j)
        experts = event.experts if selection is None else selection.experts
        assert set(experts[0].tolist()) == expected


# A few fixed values, so that ties are common, and any others between them.
FINE_LOGITS = st.lists(
    st.one_of(st.sampled_from([-1.5, 0.0, 0.25, 2.0]), st.floats(-20, 20, width=16)),
    min_size=10,
    max_size=10,
)


@given(
    st.lists(FINE_LOGITS, min_size=1, max_size=5),
    st.lists(st.sets(st.integers(0, 9)), min_size=5, max_size=5),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.integers(0, 2),
    st.booleans(),
)
def test_a_rule_chooses_for_rows_together_as_for_each_alone(
    texts: list[list[float]],
    cached: list[set[int]],
    lambda_: float,
    top_j: int,
    is_unusual: bool,
) -> None:
    geometry = make_geometry(num_layers=2, num_experts=10, top_k=3)
    event = make_event(geometry, 0, 1, texts)
    if is_unusual:
        # The choice of a router that selects by more than its logits.
        event = event._replace(experts=np.array([[7, 1, 4]] * len(texts)))
    resident = np.array([[e in held for e in range(10)] for held in cached[: len(texts)]])
    for name, parameters in (
        ("cache_prior", {"lambda_": lambda_, "top_j": top_j}),
        ("cache_prior", {"lambda_": lambda_, "delta": "token"}),
        ("max_rank", {"J": top_j}),
        ("cumsum", {"p": lambda_, "J": top_j}),
        ("swap_rank", {"rank": 1 + top_j}),
    ):
        rules = [find_algorithm("routing", name)(geometry, **parameters) for _ in texts]
        alone = [
            rule.select(
                event._replace(experts=event.experts[row : row + 1], logits=logits[None]),
                {geometry.key(1, e) for e in cached[row]},
            )
            for row, (rule, logits) in enumerate(zip(rules, event.logits, strict=True))
        ]
        state = np.zeros((len(texts), rules[0].state_size))
        tokens = Tokens(
            *(1, DECODE, [0] * len(texts), event.experts, event.weights, event.logits),
            *(resident, ~resident, state),
        )
        together = find_algorithm("routing", name)(geometry, **parameters).choose(tokens)
        experts = event.experts if together is None else together.experts
        for row, selection in enumerate(alone):
            own = event.experts[row : row + 1] if selection is None else selection.experts
            assert experts[row : row + 1].tolist() == own.tolist()
            assert state[row].tolist() == rules[row].state[1].tolist()


@LIGHT
@given(
    st.lists(LOGITS, min_size=1, max_size=3),
    CACHED,
    st.sampled_from([0.02, 0.1, 0.5]),
    st.booleans(),
)
def test_substitute_score_agrees_token_by_token(
    texts: list[list[float]], resident: set[int], tolerance: float, relative: bool
) -> None:
    scale = "relative" if relative else "absolute"
    handler = find_algorithm("miss", "substitute_score")(WIDE, tolerance=tolerance, scale=scale)
    event = make_event(WIDE, 0, 0, texts)
    absent = [key for key in event.keys if key not in resident]
    resolution = handler.resolve(fresh(event), absent, resident)
    experts = event.experts if resolution is None else resolution.selection.experts
    scores = softmax(np.array(texts, dtype=np.float32))
    for token, original in enumerate(event.experts.tolist()):
        row = [np.float32(s) for s in scores[token]]
        expected = oracles.substitute_score(
            row, original, resident, np.float32(tolerance), relative
        )
        assert experts[token].tolist() == expected
    if resolution is not None:
        expected_fetches = {e for row in experts.tolist() for e in row} - resident
        assert {fetch.key for fetch in resolution.fetch} == expected_fetches


@LIGHT
@given(st.lists(LOGITS, min_size=1, max_size=3), CACHED, st.integers(0, 2))
def test_drop_loses_exactly_the_light_absent_experts(
    texts: list[list[float]], resident: set[int], h: int
) -> None:
    event = make_event(WIDE, 0, 0, texts)
    absent = [key for key in event.keys if key not in resident]
    resolution = find_algorithm("miss", "drop")(WIDE, h=h).resolve(fresh(event), absent, resident)
    expected = [
        [expert in resident or place < h for place, expert in enumerate(row)]
        for row in event.experts.tolist()
    ]
    if resolution is None:
        assert all(all(row) for row in expected)
        return
    assert resolution.selection.keep.tolist() == expected
    np.testing.assert_array_equal(resolution.selection.experts, event.experts)
    expected_fetches = {e for row in event.experts[:, :h].tolist() for e in row} - resident
    assert {fetch.key for fetch in resolution.fetch} == expected_fetches


@pytest.mark.parametrize("axis_name", ["swap_rank", "substitute_random"])
def test_random_replacements_are_uniform_over_what_is_allowed(axis_name: str) -> None:
    counts = np.zeros(8)
    for pass_index in range(400):
        event = make_event(WIDE, pass_index, 0, [[9.0, 8.0, 7.0, 0, 0, 0, 0, 0]])
        if axis_name == "swap_rank":
            replaced = find_algorithm("routing", axis_name)(WIDE, rank=2).select(event, set())
            counts[replaced.experts[0, 1]] += 1
        else:
            handler = find_algorithm("miss", axis_name)(WIDE)
            resident = {0, 2, 3, 4, 5, 6, 7}
            counts[handler.resolve(event, [1], resident).selection.experts[0, 1]] += 1
    assert counts[:3].sum() == 0
    np.testing.assert_allclose(counts[3:] / 400, 0.2, atol=0.07)


@pytest.mark.parametrize("seed", range(4))
def test_frequency_prefetch_agrees_with_counting(seed: int) -> None:
    geometry = make_geometry()
    algorithm = find_algorithm("prefetch", "frequency")(geometry, overfetch=1.4, lookahead=2)
    past_events: list[Event] = []
    for event in (e for p in make_stream(geometry, seed=seed) for e in p):
        past_events.append(event)
        counts = oracles.activation_matrix(geometry, past_events)
        expected = []
        for ahead in (1, 2):
            layer = (event.layer + ahead) % 3
            best = sorted(range(8), key=lambda e: (-counts[layer, e], e))[:5]
            expected += [layer * 8 + e for e in best if counts[layer, e]]
        assert list(algorithm.propose(fresh(event))) == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kept", [1, 2, 100])
def test_history_prefetch_follows_the_most_similar_request(seed: int, kept: int) -> None:
    geometry = make_geometry()
    algorithm = find_algorithm("prefetch", "history")(geometry, requests=kept)
    past: list[Any] = []
    now: list[Event] = []
    for events in make_stream(geometry, seed=seed, num_requests=5, num_decodes=2):
        if events[0].phase == "prefill" and now:
            matrix = oracles.activation_matrix(geometry, now)
            if len(past) < kept:
                past.append(matrix)
            else:
                past[oracles.best_match(matrix, past)] = matrix
            now = []
        for event in events:
            now.append(event)
            keys = list(algorithm.propose(fresh(event)))
            if not past:
                assert keys == []
                continue
            match = past[oracles.best_match(oracles.activation_matrix(geometry, now), past)]
            assert keys == predicted(match, event.layer)


def predicted(match: Any, layer: int) -> list[int]:
    """Each later layer's three largest shares, discounted by distance, largest first."""
    ranked = []
    for target in range(layer + 1, 3):
        best = sorted(range(8), key=lambda e: (-match[target, e], e))[:3]
        share = match[target] / match[target].sum()
        discount = 1 - (target - layer) / 3
        ranked += [(-round(discount * share[e], 9), target * 8 + e) for e in best if share[e]]
    return [key for _, key in sorted(ranked)]
