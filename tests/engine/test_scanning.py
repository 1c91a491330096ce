"""A text scanned in machine code gets, to the last digit, what plain Python gives each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.algorithms.routing.base import RoutingByCost
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.records.event import PREFILL, Event
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.testing.streams import make_geometry
from tests.engine.test_loop import figures
from tests.engine.traces import setting_for

GEOMETRY = make_geometry(num_layers=3, num_experts=12, top_k=4)
TEXTS = 3
ROUTINGS = [
    name
    for name in algorithm_names("routing")
    if issubclass(find_algorithm("routing", name), RoutingByCost)
]
CASES: list[dict[str, Any]] = [
    {},
    {"eviction": "score"},
    {"eviction": "hazard"},
    {"routing": "pruning", "routing.renormalize": True},
    *(
        {"routing": name, "eviction": eviction}
        for name in ROUTINGS
        for eviction in ("lru", "least_stale")
    ),
    {"routing": "cache_prior", "routing.delta": "token", "routing.top_j": 0},
    {"routing": "cache_prior", "routing.delta": "mean"},
    {"routing": "max_rank", "routing.M": 6, "routing.J": 0},
]


pytestmark = pytest.mark.usefixtures("machine_code")


def scan_texts(engine: VirtualEngine) -> Iterator[Selection | None]:
    """Scan a few texts of the same router outputs for every engine."""
    rng, g = np.random.default_rng(7), GEOMETRY
    favourites = rng.normal(0, 1, (g.num_layers, g.num_experts))
    for _ in range(TEXTS):
        count = int(rng.integers(2, 30))
        engine.begin_scan(count)
        for layer in range(g.num_layers):
            logits = rng.normal(0, 1, (count, g.num_experts)) + favourites[layer]
            logits = logits.astype(np.float16).astype(np.float32)
            experts = np.argsort(-logits, axis=1, kind="stable")[:, : g.top_k]
            scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            weights = np.take_along_axis(scores, experts, 1)
            yield engine.scan(Event(-1, layer, PREFILL, count, [], experts, weights, logits))
        engine.end_scan()


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_as_token_by_token(case: Mapping[str, Any]) -> None:
    setting = setting_for(GEOMETRY, "4/layer", case)
    slow, fast = VirtualEngine(GEOMETRY, setting), VirtualEngine(GEOMETRY, setting)
    slow.on_event = lambda event: None
    num_changed = 0
    for alone, together in zip(scan_texts(slow), scan_texts(fast), strict=True):
        assert fast.loop.is_compiled and not slow.loop.is_compiled
        assert (alone is None) == (together is None)
        if alone is not None and together is not None:
            num_changed += 1
            assert np.array_equal(alone.experts, together.experts)
            ones = np.ones(alone.experts.shape, bool)
            kept = [ones if each.keep is None else each.keep for each in (alone, together)]
            assert np.array_equal(*kept)
            shares = [np.broadcast_to(s.renormalize, len(ones)) for s in (alone, together)]
            assert np.array_equal(*shares)
    assert figures(fast) == figures(slow)
    assert bool(num_changed) == (case.get("routing", "standard") != "standard")
    assert sum(record.misses for record in fast.ledger.passes) > 0


@pytest.mark.parametrize("case", [{"routing": "swap_rank"}, {"miss": "drop"}])
def test_other_rules_are_asked_about_each_token(case: Mapping[str, Any]) -> None:
    engine = VirtualEngine(GEOMETRY, setting_for(GEOMETRY, "4/layer", case))
    assert any(scan_texts(engine))
    assert not engine.loop.is_compiled
