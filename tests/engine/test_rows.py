"""However events come to the one door, they are served alike: side by side, whole or by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.eviction.textbook import Clock
from lm_eval_moecache.algorithms.miss.base import MissOverRows
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.algorithms.routing.base import RoutingOverRows
from lm_eval_moecache.engine import callbacks
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.rows import Rows
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.errors import AlgorithmError
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import (
    batch_of,
    equip,
    laddered,
    make_event,
    make_geometry,
    make_hardware,
    policy_of,
)
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Drafted, Trace
from tests.engine import traces
from tests.engine.drawn import draw
from tests.engine.traces import draw_trace, figures, setting_for


def by_layer(engine: Engine) -> None:
    """Have its rules asked at each layer of each pass."""
    engine.alone.by_loop = False


# --- thousands of passes a call, and a layer a call ---


def assert_equal(trace: Trace, setting: Setting, cache_reset: str = "never") -> Engine:
    future = Future(trace)
    slow = replay(trace, setting, future=future, cache_reset=cache_reset, on_engine=by_layer)
    fast = replay(trace, setting, future=future, cache_reset=cache_reset)
    assert figures(fast) == figures(slow)
    return fast


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 560), marks=pytest.mark.slow)], ids=len
)
def test_whole_passes_of_random_settings(seeds: range) -> None:
    for seed in seeds:
        case = draw(seed)
        assert_equal(case.trace, case.setting, case.reset)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen.route.csv", "trace_olmoe_299.jsonl"])
def test_published_traces(name: str) -> None:
    trace = load_trace(str(traces.published(name)))
    for eviction, capacity in (("lru", "25%"), ("least_stale", "4experts"), ("belady", "8/layer")):
        axes = {"eviction": eviction, "prefetch": "frequency"}
        assert_equal(trace, setting_for(trace, capacity, axes))


def test_what_became_of_drafts() -> None:
    trace = draw_trace(7)
    trace = dataclasses.replace(trace, drafted=Drafted(settled={2: (3, 1), 5: (2, 2)}))
    passes = assert_equal(trace, setting_for(trace, "50%")).ledger.passes
    assert [(p.index, p.drafted, p.accepted) for p in passes if p.drafted] == [(2, 3, 1), (5, 2, 2)]


class Tired(Clock):
    """Evicts as CLOCK does, for a while."""

    rest: int = 20

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        self.rest -= 1
        if not self.rest:
            raise ZeroDivisionError("tired")
        return super().victim(pinned, layer)


class Blind(Clock):
    """Evicts what must not leave."""

    def victim(self, pinned: Collection[int], layer: int) -> int | None:
        return next(iter(pinned), None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Tired", r"Tired\.victim at layer \d raised .* tired"),
        ("Blind", r"Blind\.victim at layer \d returned the pinned key \d"),
    ],
)
def test_what_an_eviction_does_wrong_in_the_midst_of_a_call_is_raised(name: str, says: str) -> None:
    trace = draw_trace(7, (1000, 1500, 1000, 1500, 1500, 1000), 16, 3)
    for capacity in ("2experts", "30%", "5/layer"):
        with pytest.raises(AlgorithmError, match=says):
            setting = setting_for(trace, capacity, {"eviction": f"{__name__}.{name}"})
            replay(trace, setting, cache_reset="never")


# --- rows side by side ---


GEOMETRY = make_geometry(num_layers=3, num_experts=12, top_k=4)
ROWS, STEPS = 5, 6
MISSES = [
    name
    for name in algorithm_names("miss")
    if issubclass(find_algorithm("miss", name), MissOverRows)
]
ROUTINGS = [
    name
    for name in algorithm_names("routing")
    if issubclass(find_algorithm("routing", name), RoutingOverRows)
]
MORE = {
    # Without it one token loses nothing.
    "expert_budget": {"miss.budget": 2},
    "commit": {"prefetch": "predictor"},
}
CASES: list[dict[str, Any]] = [
    *({"routing": name, **MORE.get(name, {})} for name in ROUTINGS),
    *({"miss": name, **MORE.get(name, {})} for name in MISSES),
    *(
        {"routing": routing, "miss": miss, "prefetch": prefetch, "eviction": eviction}
        | MORE.get(miss, {})
        for (routing, miss), prefetch, eviction in zip(
            product(("standard", "cache_prior", "pruning"), MISSES),
            ("next_gate", "score", "none") * 7,
            ("score", "lru") * 11,
            strict=False,
        )
    ),
    {"routing": "pre_gated", "prefetch": "next_gate", "miss": "drop"},
    {"routing": "commit", "routing.weights": "owa", "miss": "drop", **MORE["commit"]},
    {"routing": "commit", "routing.tokens": "mispredicted", **MORE["commit"]},
    {"routing": "commit", "routing.scores": "router", "miss": "buddy", **MORE["commit"]},
    {"routing": "cache_prior", "routing.delta": "token"},
    {"routing": "cache_prior", "routing.delta": "mean"},
    {"routing": "cache_prior", "routing.logit_range": 2.5},
    {"miss": "drop_cold", "miss.renormalize": False, "routing": "drop_rank"},
    {"miss": "expert_budget", "miss.budget": 2, "miss.rescue": True},
    {"miss": "expert_budget", "miss.budget": 3, "miss.renormalize": True, "prefetch": "next_gate"},
    {"miss": "drop", "miss.h": 0, "miss.renormalize": True},
    {"miss": "buddy", "miss.reuse": 0.7, "miss.eta": 1.0, "miss.tau": 0.0},
    {"miss": "buddy", "miss.beta": 0.5, "miss.fallback": "drop", "miss.weight": "own"},
    {"miss": "buddy", "miss.late": "await", "miss.rho": 1, "prefetch": "next_gate"},
    {"miss": "buddy", "miss.order": "lightest", "prefetch": "next_gate", "prefetch.depth": 2},
    {"miss": "substitute_random", "miss.late": "await", "prefetch": "score"},
    {"miss": "substitute_score", "miss.fallback": "drop", "miss.scale": "relative"},
    {"miss": "substitute_cached", "miss.tau": 0.9, "miss.weight": "missing"},
    {"miss": "drop", "precision": "", "prefetch": "next_gate"},
    {"routing": "cache_prior", "precision": "", "prefetch": "next_gate"},
    *(
        {"miss": name, "miss.upgrade": upgrade, "prefetch": "next_gate"}
        for name in ("cascade", "fetch_priority")
        for upgrade in (True, False)
    ),
    {"miss": "drop_cascade", "miss.t1": 0.3, "miss.t2": 0.5, "routing": "drop_rank"},
    {"miss": "drop_cascade", "miss.renormalize": True, "prefetch": "score", "eviction": "score"},
]


def engines_of(case: Mapping[str, Any]) -> list[Engine]:
    given = {key: value for key, value in case.items() if key != "precision"}
    policy, geometry = equip(policy_of(given), GEOMETRY), GEOMETRY
    if policy.miss.algorithm.uses_ladder or given != case:
        geometry = laddered(GEOMETRY)
    capacity = parse_capacity("40%", geometry)
    setting = Setting(policy=policy, capacity=capacity, hardware=make_hardware(), seed=3)
    return [Engine(geometry, setting) for _ in range(ROWS)]


def step_of(step: int, layer: int, depth: int, wraps: bool) -> Event:
    """Return an event with a token of each row, with ties between its logits.

    `wraps`: the last layer predicts the next token's first one.
    """
    rng = np.random.default_rng((step, layer))
    rows = np.arange(ROWS)[:, None]
    logits = (np.sin(np.arange(12) * (1 + rows)) * 2 + rng.normal(size=(ROWS, 12))).round(1)
    ahead = [*range(layer + 1, min(layer + depth, 2) + 1)]
    ahead += [0] if wraps and layer == 2 else []
    predicted = {at: rng.normal(size=(ROWS, 12)).round(1).astype(np.float32) for at in ahead}
    return make_event(GEOMETRY, step, layer, logits, DECODE, predicted)


def chosen(rows: Rows, event: Event, places: list[int]) -> Selection | None:
    """Serve the tokens of some rows as the next layer."""
    own = event._replace(
        experts=event.experts[places],
        weights=event.weights[places],
        logits=event.logits[places],
        predicted={at: values[places] for at, values in event.predicted.items()},
    )
    return rows.choose(batch_of(own, len(places)))


def executed(selection: Selection | None, experts: Any) -> list[Any]:
    """What a selection computes: experts, what weighs them, and what is left out."""
    if selection is None:
        selection = Selection(experts)
    kept = np.ones(experts.shape, bool) if selection.keep is None else selection.keep
    source = selection.experts if selection.weigh_as is None else selection.weigh_as
    return [np.where(kept, x, -1).tolist() for x in (selection.experts, source)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_rows_get_what_each_gets_alone(case: dict[str, Any]) -> None:
    alone, together = engines_of(case), engines_of(case)
    for engine in alone:
        by_layer(engine)
    first, changed = alone[0], 0
    for step in range(STEPS):
        # Some rows end earlier than others, and some come later.
        live = [row for row in range(ROWS) if (row != 1 or step < 4) and (row != 3 or step > 1)]
        rows = Rows([together[row] for row in live])
        rows.begin(DECODE, [1] * len(live))
        for row in live:
            alone[row].begin_pass(DECODE, 1)
        for layer in range(GEOMETRY.num_layers):
            event = step_of(step, layer, first.depth, first.rules.prefetch.uses_predictor)
            whole = executed(chosen(rows, event, live), event.experts[live])
            for place, row in enumerate(live):
                own = alone[row].alone
                selection = chosen(own, event, [row])
                expected = executed(selection, event.experts[[row]])
                assert [part[place : place + 1] for part in whole] == expected
                changed += selection is not None
                if own.levels is not None:
                    assert rows.levels is not None
                    is_run = own.executed[0] >= 0
                    assert rows.levels[place][is_run].tolist() == own.levels[0][is_run].tolist()
                    changed += own.levels.any()
        rows.finish([1] * len(live))
        for row in live:
            alone[row].end_pass()
    assert list(map(figures, together)) == list(map(figures, alone))
    assert changed


# --- scanned texts, whole or token by token ---


SCANS: list[dict[str, Any]] = [
    {"eviction": "score"},
    {"eviction": "arc"},
    {"routing": "pruning", "routing.renormalize": True},
    {"routing": "cache_prior", "routing.delta": "mean", "eviction": "least_stale"},
    {"routing": "max_rank", "routing.M": 6, "routing.J": 0, "eviction": "lru"},
    {"miss": "buddy", "eviction": "lru"},
]


def scan_texts(engine: Engine) -> Iterator[Selection | None]:
    """Scan a few texts of the same router outputs for every engine."""
    rng, g = np.random.default_rng(7), GEOMETRY
    favourites = rng.normal(0, 1, (g.num_layers, g.num_experts))
    for _ in range(3):
        count = int(rng.integers(2, 30))
        engine.begin_scan(count)
        for layer in range(g.num_layers):
            logits = rng.normal(0, 1, (count, g.num_experts)) + favourites[layer]
            event = make_event(g, 0, layer, logits.astype(np.float16))
            yield engine.scan(batch_of(event))
        engine.end_scan()


@pytest.mark.parametrize("case", SCANS, ids=lambda case: " ".join(map(str, case.values())))
def test_a_scanned_text_is_served_as_token_by_token(case: Mapping[str, Any]) -> None:
    policy = equip(policy_of(case), GEOMETRY)
    capacity = parse_capacity("4/layer", GEOMETRY)
    setting = Setting(policy=policy, capacity=capacity, hardware=make_hardware())
    slow, fast = Engine(GEOMETRY, setting), Engine(GEOMETRY, setting)
    by_layer(slow)
    num_changed = 0
    for alone, together in zip(scan_texts(slow), scan_texts(fast), strict=True):
        assert (alone is None) == (together is None)
        if alone is not None and together is not None:
            num_changed += 1
            assert executed(alone, alone.experts) == executed(together, together.experts)
            ones = np.ones(len(alone.experts), bool)
            shares = [np.broadcast_to(each.renormalize, ones.shape) for each in (alone, together)]
            assert np.array_equal(*shares)
    assert figures(fast) == figures(slow)
    assert bool(num_changed) == (fast.rules.is_lossy)
    assert sum(record.misses for record in fast.ledger.passes) > 0


def test_a_full_buffer_of_messages_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = draw_trace(3)
    setting = setting_for(trace, 9, {"eviction": "arc"})
    expected = figures(replay(trace, setting))
    monkeypatch.setattr(callbacks, "_MESSAGES", 6)
    assert figures(replay(trace, setting)) == expected
