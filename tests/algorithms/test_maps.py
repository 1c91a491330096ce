"""Expert maps (FineMoE) against a slow oracle, and importance (SwapMoE) by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lm_eval_moecache.algorithms.eviction.importance import Importance
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.records.arrays import FloatArray, softmax
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing.streams import make_geometry, run

LAYERS, EXPERTS, TOP_K = 4, 8, 2
GEOMETRY = Geometry(
    model="m",
    num_layers=LAYERS,
    num_experts=EXPERTS,
    top_k=TOP_K,
    expert_bytes=((10,),) * LAYERS,
    dense_bytes=(0,) * LAYERS,
)


def event(pass_index: int, layer: int, logits: FloatArray) -> Event:
    experts = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP_K]
    keys = list(dict.fromkeys((experts + layer * EXPERTS).ravel().tolist()))
    return Event(pass_index, layer, DECODE, len(logits), keys, experts=experts, logits=logits)


class SlowMaps:
    """Every map kept as a matrix, every cosine from nothing, nothing ever thrown out."""

    def __init__(self, distance: int) -> None:
        self.distance, self.past = distance, list[np.ndarray]()

    def propose(self, now: np.ndarray, layer: int) -> list[int]:
        if not self.past:
            return []
        seen = now[: layer + 1].ravel()
        cosines = [
            float(seen @ (p := old[: layer + 1].ravel()) / np.linalg.norm(seen) / np.linalg.norm(p))
            for old in self.past
        ]
        best = int(np.argmax(cosines))
        target = (layer + self.distance) % LAYERS
        row, chosen, mass = self.past[best][target], list[int](), 0.0
        for expert in sorted(range(EXPERTS), key=lambda e: (-round(row[e], 9), e)):
            if len(chosen) >= TOP_K and mass >= 1 - cosines[best]:
                break
            chosen.append(target * EXPERTS + expert)
            mass += row[expert]
        return chosen


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
            found = fast.propose(event(index, layer, logits))
            assert list(found) == slow.propose(now, layer)
            proposals += len(found)
        slow.past.append(now)
    assert proposals > 24 * LAYERS * TOP_K, "no poor match ever fetched more than top_k"


def test_a_full_store_gives_up_the_map_most_like_the_newcomer() -> None:
    prefetch = find_algorithm("prefetch", "expert_map")(GEOMETRY, maps=2, distance=1)

    def one_pass(index: int, favourite: int) -> None:
        prefetch.on_pass(index)
        logits = np.full((1, EXPERTS), -9, dtype=np.float32)
        logits[0, favourite] = 9
        for layer in range(LAYERS):
            prefetch.propose(event(index, layer, logits))

    for index, favourite in enumerate((0, 1, 1)):  # the third replaces the second, not the first
        one_pass(index, favourite)
    prefetch.on_pass(3)
    logits = np.full((1, EXPERTS), -9, dtype=np.float32)
    logits[0, 0] = 9
    assert prefetch.propose(event(3, 0, logits))[0] == EXPERTS + 0


def test_importance_is_the_decayed_sum_of_gate_scores() -> None:
    prefetch = find_algorithm("prefetch", "importance")(GEOMETRY, experts=1, decay=0.5)
    strong = np.log(np.array([[0.93, *[0.01] * 7]], dtype=np.float32))
    weak = np.log(np.array([[0.16, 0.78, *[0.01] * 6]], dtype=np.float32))
    # Expert 0 has 0.93 after one turn, then 0.465 + 0.16 = 0.625 against 0.005 + 0.78 = 0.785.
    assert list(prefetch.propose(event(0, 2, strong))) == [2 * EXPERTS]
    assert list(prefetch.propose(event(1, 2, weak))) == [2 * EXPERTS + 1]
    # With all of the past kept it is 1.09 against 0.79.
    keeps = find_algorithm("prefetch", "importance")(GEOMETRY, experts=1, decay=1.0)
    keeps.propose(event(0, 2, strong))
    assert list(keeps.propose(event(1, 2, weak))) == [2 * EXPERTS]


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("expert_map", {"maps": 0}, "maps=0"),
        ("expert_map", {"distance": 5}, "distance=5"),
        ("importance", {"experts": 9}, "experts=9"),
        ("importance", {"decay": 1.5}, "decay=1.5"),
    ],
)
def test_parameters_out_of_range_are_named(
    name: str, parameters: dict[str, float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        find_algorithm("prefetch", name)(GEOMETRY, **parameters)


# --- importance as an eviction ---


SMALL = make_geometry(num_layers=2, num_experts=4, top_k=1)


def scored(index: int, layer: int, scores: list[float]) -> Event:
    logits = np.log(np.asarray([scores], dtype=np.float32))
    return Event(index, layer, DECODE, 1, [layer * 4], logits=logits)


def test_the_least_important_leaves_and_layers_compare() -> None:
    rule = Importance(SMALL, decay=0.5)
    for key in (0, 1, 2, 4, 5):
        rule.on_insert(key, key == 2)
    rule.on_event(scored(0, 0, [0.5, 0.3, 0.1, 0.1]))
    rule.on_event(scored(0, 1, [0.6, 0.2, 0.1, 0.1]))
    # 0.1, 0.2, 0.3, 0.5, 0.6: keys 2, 5, 1, 0, 4.
    assert [rule.victim(set(), 0), rule.victim({2}, 0), rule.victim({2, 5}, 0)] == [2, 5, 1]
    rule.on_event(scored(1, 0, [0.1, 0.1, 0.7, 0.1]))
    # Layer 0: 0.35, 0.25, 0.75; layer 1 as it was.
    assert [rule.victim(set(), 0), rule.victim({5}, 0), rule.victim({5, 1}, 0)] == [5, 1, 0]


def test_an_expert_is_as_important_when_it_comes_back() -> None:
    rule = Importance(SMALL)
    rule.on_event(scored(0, 0, [0.1, 0.2, 0.3, 0.4]))
    for key in (3, 1, 2):
        rule.on_insert(key, True)
    assert rule.victim(set(), 1) == 1


def test_what_swapmoe_prefetches_stays() -> None:
    """With an eviction by uses every prefetched expert left before its turn: it has no use yet."""
    geometry = make_geometry(num_layers=3, num_experts=16, top_k=2)

    def hits(eviction: str) -> int:
        policy = load_policy("swapmoe", {"eviction": eviction})
        served = run(policy, geometry, "40%", num_requests=2, num_decodes=20).engine
        return sum(p.prefetch_hits for p in served.ledger.passes)

    assert hits("importance") > hits("lfu")
