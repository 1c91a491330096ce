"""SwapMoE's importance: what its prefetcher brings in, its eviction keeps."""

from __future__ import annotations

import numpy as np

from lm_eval_moecache.algorithms.eviction.importance import Importance
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.testing.streams import make_geometry, run

GEOMETRY = make_geometry(num_layers=2, num_experts=4, top_k=1)


def event(index: int, layer: int, scores: list[float]) -> Event:
    logits = np.log(np.asarray([scores], dtype=np.float32))
    return Event(index, layer, DECODE, 1, [layer * 4], logits=logits)


def test_the_least_important_leaves_and_layers_compare() -> None:
    rule = Importance(GEOMETRY, decay=0.5)
    for key in (0, 1, 2, 4, 5):
        rule.on_insert(key, key == 2)
    rule.on_event(event(0, 0, [0.5, 0.3, 0.1, 0.1]))
    rule.on_event(event(0, 1, [0.6, 0.2, 0.1, 0.1]))
    # 0.1, 0.2, 0.3, 0.5, 0.6: keys 2, 5, 1, 0, 4.
    assert [rule.victim(set(), 0), rule.victim({2}, 0), rule.victim({2, 5}, 0)] == [2, 5, 1]
    rule.on_event(event(1, 0, [0.1, 0.1, 0.7, 0.1]))
    # Layer 0: 0.35, 0.25, 0.75; layer 1 as it was.
    assert [rule.victim(set(), 0), rule.victim({5}, 0), rule.victim({5, 1}, 0)] == [5, 1, 0]


def test_an_expert_is_as_important_when_it_comes_back() -> None:
    rule = Importance(GEOMETRY)
    rule.on_event(event(0, 0, [0.1, 0.2, 0.3, 0.4]))
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
