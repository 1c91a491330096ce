"""Every family of rules against its slow version, on random events."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.learned.buddies import PAIRS, conditional
from lm_eval_moecache.algorithms.prefetch.gates import Score
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.records.arrays import FloatArray, softmax
from lm_eval_moecache.records.artifact import BUDDIES
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.testing.ranked import as_stateful
from lm_eval_moecache.testing.streams import (
    StreamFuture,
    artifact_for,
    fresh,
    laddered,
    make_event,
    make_geometry,
    make_stream,
    profile_for,
)
from tests.algorithms import oracles
from tests.algorithms.asked import choose, executed, resolve

LIGHT = settings(max_examples=25, derandomize=True)

# --- routing ----------------------------------------------------------------------------------

# Whole logits, so that ties are common.
LOGITS = st.lists(st.integers(-3, 3).map(float), min_size=8, max_size=8)
TEXTS = st.lists(LOGITS, min_size=1, max_size=4)
RESIDENT = st.sets(st.integers(0, 7))
WIDE = make_geometry(num_layers=2, num_experts=8, top_k=3)
KEPT = st.integers(0, 2)
CACHE_AWARE: dict[Callable[..., set[int]], Any] = {
    oracles.max_rank: {"M": st.integers(4, 8), "J": KEPT},
    oracles.cumsum: {"p": st.floats(0.05, 0.97), "J": KEPT},
    # A mean may be negative, and then resident experts are lowered.
    oracles.cache_prior: {
        "lambda_": st.sampled_from([0.1, 0.25, 0.5, 1.0]),
        "top_j": KEPT,
        "delta": st.sampled_from(["range", "mean", "token"]),
    },
}


@pytest.mark.parametrize("oracle", CACHE_AWARE)
def test_cache_aware_routing_agrees_with_the_papers_algorithms(oracle: Any) -> None:
    @LIGHT
    @given(TEXTS, RESIDENT, st.fixed_dictionaries(CACHE_AWARE[oracle]))
    def agree(texts: list[list[float]], cached: set[int], parameters: dict[str, Any]) -> None:
        rule = find_algorithm("routing", oracle.__name__)(WIDE, **parameters)
        for place, logits in enumerate(texts):
            event = make_event(WIDE, 0, 0, [logits])
            experts = executed(event, choose(rule, event, cached))
            expected = oracle(texts[: place + 1], cached, WIDE.top_k, **parameters)
            assert set(experts[0].tolist()) == expected

    agree()


SHARES = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=6, max_size=6, unique=True)


@settings(LIGHT, max_examples=60)
@given(
    guess=SHARES,
    logits=SHARES,
    alphas=st.tuples(st.sampled_from([1.0, 1.15, 1.3]), st.sampled_from([1.0, 1.06])),
    least=st.integers(1, 3),
    scores=st.sampled_from(["predicted", "router"]),
)
def test_commit_agrees_with_equations_5_and_6_heaviest_first(
    guess: list[float], logits: list[float], alphas: tuple[float, float], least: int, scores: str
) -> None:
    geometry = make_geometry(num_layers=2, num_experts=6, top_k=4)
    given = {"trigger_min": least, "trigger_max": 3, "alpha1": alphas[0], "alpha2": alphas[1]}
    rule = find_algorithm("routing", "commit")(geometry, weights="owa", scores=scores, **given)
    choose(rule, make_event(geometry, 3, 0, [[0.0] * 6], predicted={1: [guess]}))
    selection = choose(rule, make_event(geometry, 3, 1, [logits]))
    assert selection is not None and selection.weights is not None
    args = logits, guess, 4, *alphas, range(least, 4), scores == "router"
    expected = oracles.output_weights(*args)
    assert dict(zip(selection.experts[0].tolist(), selection.weights[0], strict=True)) == (
        pytest.approx(expected, rel=1e-4)
    )
    assert (np.diff(selection.weights) <= 1e-6).all(), "miss algorithms read a column as a rank"


# --- miss -------------------------------------------------------------------------------------


NUMBER = st.integers(-40, 40).map(lambda n: n / 8)
ALGORITHM_1 = {"H": None, "tau": 0.0, "gamma": 1.0, "temperature": 1.0, "alpha": 1.0, "rho": None}
ALGORITHM_1 |= {"k_max": 16, "kappa": 0.0, "eta": 0.0, "reuse": 0.0, "order": "heaviest"}
OTHERS = {
    **{"H": (1, 3), "tau": (0.5, 0.8, 0.95), "gamma": (0.2, 0.5), "temperature": (0.8, 1.5)},
    **{"alpha": (0.3, 0.8), "rho": (1, 2), "kappa": (0.3, 0.4), "eta": (2.0,), "reuse": (0.7,)},
    **{"k_max": (4, 5), "order": ("lightest",)},
}


@settings(LIGHT, max_examples=200)
@given(
    texts=st.lists(st.lists(NUMBER, min_size=8, max_size=8), min_size=1, max_size=4),
    resident=RESIDENT,
    others=st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in OTHERS.items()}),
)
def test_buddies_agree_with_algorithm_1_its_gates_and_its_budget(
    texts: list[list[float]], resident: set[int], others: dict[str, Any]
) -> None:
    given: dict[str, Any] = {**ALGORITHM_1, **others}
    kappa, temperature = given["kappa"], given["temperature"]
    partitions = {0.0: 1, 0.3: 2, 0.4: 4}[kappa]
    profile = {"profile": profile_for(BUDDIES, WIDE), "tau_scale": "absolute"}
    rule = find_algorithm("miss", "buddy")(WIDE, **profile, **given, partitions=partitions)
    event = make_event(WIDE, 0, 1, texts)
    q = conditional(artifact_for(BUDDIES, WIDE).arrays[PAIRS][1], 1.0).tolist()
    sizes = given["alpha"], given["k_max"]
    lists = [oracles.buddy_list(row, *sizes)[: given["H"]] for row in q]
    bypass = not {k % 8 for k in event.keys} & resident
    answers = executed(event, choose(rule, event, resident)).tolist()
    for text, own, changed in zip(texts, event.experts.tolist(), answers, strict=True):
        mass = [math.exp((text[e] - text[own[0]]) / temperature) for e in own]
        margin = (mass[0] - mass[1]) / sum(mass)
        entropy = oracles.activating_entropy([text[e] for e in own], temperature)
        if abs(entropy - given["tau"]) < 1e-5 or abs(margin - given["gamma"]) < 1e-5:
            continue

        def cost(missing: int, other: int, text: Any = text) -> float:
            """Equation 3, the larger the better, with the hops between devices."""
            standing = (text[other] - min(text)) / max(max(text) - min(text), 1e-9)
            hops = abs(missing * partitions // 8 - other * partitions // 8)
            psi = q[missing][other] * (1 + given["eta"] * standing) * (1 - kappa * hops)
            return -psi if other in lists[missing] else math.inf

        expected = own
        if not bypass and entropy > given["tau"] and margin < given["gamma"]:
            options = {"reuse": given["reuse"], "order": given["order"], "most": given["rho"] or 3}
            expected = oracles.replaced(own, resident, cost, **options)
        assert changed == expected


LADDER = laddered(make_geometry(num_layers=2, num_experts=6, top_k=4))


def demands(name: str, event: Event, token: int, t1: float, t2: float, h: int) -> dict[int, int]:
    """Expert -> the level that one token demands; 3 means dropping."""
    experts, scores = event.experts[token].tolist(), softmax(event.logits)[token].tolist()
    total, found = sum(scores[e] for e in experts), {}
    for rank, expert in enumerate(experts):
        before = sum(scores[e] for e in experts[:rank]) / total
        bounds = (t1, t2) if name == "cascade" else (t1, (t1 + t2) / 2, t2)
        found[expert] = sum(before > bound for bound in bounds)
        if name == "fetch_priority":
            found[expert] = 0 if rank < h else 1 + math.floor((rank - h) * 2 / (len(experts) - h))
    return found


@settings(max_examples=120)
@given(
    name=st.sampled_from(["fetch_priority", "cascade", "drop_cascade"]),
    logits=st.lists(
        st.lists(st.floats(-3, 3).map(lambda x: round(x, 2)), min_size=6, max_size=6),
        min_size=1,
        max_size=3,
    ),
    resident=st.dictionaries(st.integers(0, 5), st.integers(0, 2), max_size=5),
    steps=st.tuples(st.sampled_from([0.31, 0.57]), st.sampled_from([0.73, 0.89])),
    h=st.integers(1, 3),
    upgrade=st.booleans(),
)
def test_ladders_agree_with_their_slow_version(
    name: str,
    logits: list[list[float]],
    resident: dict[int, int],
    steps: tuple[float, float],
    h: int,
    upgrade: bool,
) -> None:
    event = make_event(LADDER, 0, 0, logits)
    parameters: dict[str, Any] = {"t1": steps[0], "t2": steps[1]}
    parameters = {"h": h} if name == "fetch_priority" else parameters
    parameters |= {"upgrade": upgrade} if name != "drop_cascade" else {}
    expected: dict[int, int] = {}
    keep = np.ones(event.experts.shape, dtype=bool)
    for token, experts in enumerate(event.experts.tolist()):
        for expert, level in demands(name, event, token, *steps, h).items():
            if level == 3:
                keep[token, experts.index(expert)] = expert in resident
            elif expert not in resident or (parameters.get("upgrade") and level < resident[expert]):
                expected[expert] = min(level, expected.get(expert, 9))
    rule = find_algorithm("miss", name)(LADDER, **parameters)
    selection, loaded = resolve(rule, event, resident)
    assert loaded == expected
    found = keep | True if selection is None else selection.keep
    assert found.tolist() == keep.tolist()


@pytest.mark.parametrize("name", ["swap_rank", "substitute_random", "random"])
def test_random_choices_are_uniform_over_what_is_allowed(name: str) -> None:
    counts, eviction = np.zeros(8), as_stateful(find_algorithm("eviction", "random")(WIDE))
    for key in range(8):
        eviction.on_insert(key, False)
    for pass_index in range(400):
        if name == "random":
            victim = eviction.victim({0, 1, 2}, 0)
            counts[victim] += 1
            eviction.on_evict(victim)
            eviction.on_insert(victim, False)
            continue
        event = make_event(WIDE, pass_index, 0, [[9.0, 8.0, 7.0, 0, 0, 0, 0, 0]])
        if name == "swap_rank":
            selection = choose(find_algorithm("routing", name)(WIDE, rank=2), event)
        else:
            selection = choose(find_algorithm("miss", name)(WIDE), event, (0, 2, 3, 4, 5, 6, 7))
        assert selection is not None
        counts[selection.experts[0, 1]] += 1
    assert counts[:3].sum() == 0
    np.testing.assert_allclose(counts[3:] / 400, 0.2, atol=0.07)


# --- prefetch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kept", [1, 2, 100])
def test_frequency_and_history_follow_the_activations_counted_anew(seed: int, kept: int) -> None:
    geometry = make_geometry()
    frequency = find_algorithm("prefetch", "frequency")(geometry, overfetch=1.4, lookahead=2)
    history = find_algorithm("prefetch", "history")(geometry, requests=kept)
    seen, now, past = list[Event](), list[Event](), list[Any]()
    for events in make_stream(geometry, seed=seed, num_requests=5, num_decodes=2):
        if events[0].phase == "prefill" and now:
            matrix = oracles.activation_matrix(geometry, now)
            if len(past) < kept:
                past.append(matrix)
            else:
                past[oracles.best_match(matrix, past)] = matrix
            now = []
        for event in events:
            seen, now = [*seen, event], [*now, event]
            counts, most_used = oracles.activation_matrix(geometry, seen), list[int]()
            for layer in ((event.layer + ahead) % 3 for ahead in (1, 2)):
                best = sorted(range(8), key=lambda e: (-counts[layer, e], e))[:5]
                most_used += [layer * 8 + e for e in best if counts[layer, e]]
            assert list(frequency.propose(fresh(event))) == most_used
            alike: list[int] = []
            if past:
                match = oracles.best_match(oracles.activation_matrix(geometry, now), past)
                alike = predicted(past[match], event.layer)
            assert list(history.propose(fresh(event))) == alike


def predicted(match: Any, layer: int) -> list[int]:
    """Each later layer's three largest shares, discounted by distance, largest first."""
    ranked = []
    for target in range(layer + 1, 3):
        best = sorted(range(8), key=lambda e: (-match[target, e], e))[:3]
        share = match[target] / match[target].sum()
        discount = 1 - (target - layer) / 3
        ranked += [(-round(discount * share[e], 9), target * 8 + e) for e in best if share[e]]
    return [key for _, key in sorted(ranked)]


MAPS = make_geometry(num_layers=4, num_experts=8, top_k=2)


@pytest.mark.parametrize("distance", [1, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_expert_maps_propose_what_the_slow_search_does(distance: int, seed: int) -> None:
    rng, proposals = np.random.default_rng(seed), 0
    fast = find_algorithm("prefetch", "expert_map")(MAPS, distance=distance)
    slow = oracles.SlowMaps(MAPS, distance)
    for index in range(25):
        fast.on_pass(index)
        now = np.zeros((4, 8))
        for layer in range(4):
            spread = 3.0 if layer % 2 == 0 else 0.3
            logits = (rng.normal(size=(1 + index % 3, 8)) * spread).astype(np.float32)
            now[layer] = softmax(logits).astype(np.float64).mean(axis=0)
            proposal = fast.propose(make_event(MAPS, index, layer, logits))
            assert list(proposal) == slow.propose(now, layer)
            proposals += len(proposal)
        slow.past.append(now)
    assert proposals > 24 * 4 * 2, "no poor match ever fetched more than top_k"


def test_a_full_store_gives_up_the_map_most_like_the_newcomer() -> None:
    prefetch = find_algorithm("prefetch", "expert_map")(MAPS, maps=2, distance=1)
    for index, favourite in enumerate((0, 1, 1, 0)):  # the third replaces the second
        prefetch.on_pass(index)
        for layer in range(4):
            event = make_event(MAPS, index, layer, 18.0 * np.eye(8)[favourite][None])
            first = next(iter(prefetch.propose(event)), None)
            assert index < 3 or layer or first == 8 + 0


TWO_LAYERS = make_geometry(num_layers=2, num_experts=16, top_k=2)


def single(logits: FloatArray, layer: int = 1) -> Event:
    experts = np.tile([0, 1], (len(logits), 1))
    return Event(0, DECODE, [0], 16, experts, predicted={layer: logits})


@pytest.mark.parametrize("percentile", [0.0, 33.0, 80.0, 99.5, 100.0])
@pytest.mark.parametrize("spread", [0.1, 2.0, 40.0])
def test_the_bar_is_the_bin_of_the_percentile_of_all_scores(
    percentile: float, spread: float
) -> None:
    rng, bins = np.random.default_rng(7), list[float]()
    rule = Score(TWO_LAYERS, percentile=percentile)
    for step in range(200):
        # The spread changes every 50 steps, so that the percentile moves far, up and down.
        scale = spread if step // 50 % 2 else 0.5
        logits = rng.normal(0, scale, (1 + 3 * (step % 5 == 0), 16)).astype(np.float32)
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        bins = sorted([*bins, *np.minimum(np.floor(scores * 4096), 4095).ravel().tolist()])
        rank = int(np.ceil(percentile / 100 * len(bins)))
        bar = 0 if rank == 0 else bins[rank - 1] / 4096
        proposed = {key - 16 for key in rule.propose(single(logits))}
        assert proposed == set(np.flatnonzero((scores > bar).any(0)).tolist())


# A predictor of stated quality has that quality.

MANY = make_geometry(num_layers=4, num_experts=32, top_k=4)
RNG = np.random.default_rng(0)
EVENTS = [
    Event(layer, DECODE, [p], 32, RNG.permutation(32)[None, :4])
    for p in range(150)
    for layer in range(4)
]


def propose_all(seed: int = 0, **parameters: Any) -> list[list[int]]:
    """The proposals at each event, in order."""
    oracle = find_algorithm("prefetch", "oracle")(MANY, seed=seed, **parameters)
    oracle.prepare(StreamFuture(MANY, [EVENTS]))
    return [list(oracle.propose(event)) for event in EVENTS]


@pytest.mark.parametrize(
    ("recall", "precision"),
    [(1.0, 1.0), (0.75, 1.0), (1.0, 0.5), (0.85, 0.85), (0.95, 0.6), (0.3, 0.2)],
)
def test_recall_and_precision_are_what_was_asked_for(recall: float, precision: float) -> None:
    proposals, right, needed = propose_all(recall=recall, precision=precision), 0, 0
    assert proposals[-1] == []
    for proposed, event in zip(proposals, EVENTS[1:], strict=False):
        own = [key for key in proposed if key in event.keys]
        assert own == [key for key in event.keys if key in proposed], "in their order"
        assert len({*proposed}) == len(proposed) and {k // 32 for k in proposed} <= {event.layer}
        right, needed = right + len(own), needed + len(event.keys)
    # Four deviations of a binomial: a wrong formula is further off.
    tolerance = 4 * np.sqrt(recall * (1 - recall) / needed)
    assert abs(right / needed - recall) <= tolerance
    assert right / sum(map(len, proposals)) == pytest.approx(precision, abs=0.02 * (precision < 1))


def test_an_oracle_says_the_same_from_further_away_and_other_things_by_another_seed() -> None:
    near, far = (propose_all(recall=0.7, precision=0.7, horizon=n) for n in (1, 3))
    for place in range(len(EVENTS) - 3):
        assert far[place] == near[place] + near[place + 1] + near[place + 2]
    first, repeat, another = (propose_all(seed=s, recall=0.7, precision=0.7) for s in (1, 1, 2))
    assert first == repeat != another


def test_wrong_ones_stand_at_every_place() -> None:
    """If they always came last, a saturated link would never carry them."""
    places = np.zeros(6)
    for proposed, event in zip(propose_all(precision=0.67), EVENTS[1:], strict=False):
        for place, key in enumerate(proposed[:6]):
            places[place] += key not in event.keys
    assert places.min() > 0.5 * places.mean()
