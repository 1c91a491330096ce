"""Rows served together get, to the last digit, what each gets of its engine alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.miss.base import MissOverRows
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.algorithms.routing.base import RoutingOverRows
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.engine.virtual.together import can_serve, serving
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.jit import column
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import (
    equip,
    laddered,
    make_event,
    make_geometry,
    make_hardware,
    policy_of,
)

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


def engines_of(case: Mapping[str, Any]) -> list[VirtualEngine]:
    given = {key: value for key, value in case.items() if key != "precision"}
    policy, geometry = equip(policy_of(given), GEOMETRY), GEOMETRY
    if policy.miss.algorithm.uses_ladder or given != case:
        geometry = laddered(GEOMETRY)
    setting = Setting(
        policy=policy,
        capacity=parse_capacity("40%", geometry),
        hardware=make_hardware(),
        seed=3,
    )
    return [VirtualEngine(geometry, setting) for _ in range(ROWS)]


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


def own_event(event: Event, row: int) -> Event:
    """Return a row's part of an event, as a model's hook makes it."""
    own = slice(row, row + 1)
    return Event(
        *(event.pass_index, event.layer, DECODE, 1),
        (event.experts[row] + event.layer * GEOMETRY.num_experts).tolist(),
        *(event.experts[own], event.weights[own], event.logits[own]),
        {at: values[own] for at, values in event.predicted.items()},
    )


def executed(selection: Selection | None, event: Event) -> list[Any]:
    """What a token's selection computes: experts, what weighs them, and what is left out."""
    if selection is None:
        selection = Selection(event.experts)
    kept = np.ones(event.experts.shape, bool) if selection.keep is None else selection.keep
    source = selection.experts if selection.weigh_as is None else selection.weigh_as
    return [np.where(kept, x, -1).tolist() for x in (selection.experts, source)]


def figures(engine: VirtualEngine) -> list[Any]:
    engine.check_integrity()
    pools = [(pool.resident, pool.arriving, pool.loads, pool.evictions) for pool in engine.pools]
    names = "unused", "predicted", "since", "due", "level", "queued_level"
    return [
        [asdict(record) for record in engine.ledger.passes],
        (engine.clock.now, engine.link.busy_s, engine.link.bytes_moved),
        pools,
        [column(engine.state.slots, name).tolist() for name in names],
        [
            rule.state.tolist()
            for rule in (engine.rules.routing, engine.rules.miss)
            if hasattr(rule, "state")
        ],
    ]


def compare(case: Mapping[str, Any], leaves_at: int | None = None) -> int:
    """Serve the same steps both ways; return how many selections or levels were changed.

    At one of them, rows may leave machine code.
    """
    alone, rows = engines_of(case), engines_of(case)
    changed, together, first = 0, None, alone[0]
    for step in range(STEPS):
        # Some rows end earlier than others, and some come later.
        live = [row for row in range(ROWS) if (row != 1 or step < 4) and (row != 3 or step > 1)]
        if step == leaves_at:
            assert all(rows[row].loop.is_compiled for row in live)
            for engine in rows:
                engine.loop.leave()
        for engine in [*(alone[row] for row in live), *(rows[row] for row in live)]:
            engine.begin_pass(DECODE, 1)
        served = [rows[row] for row in live]
        together = serving(served, together)
        assert together is not None
        for layer in range(GEOMETRY.num_layers):
            event = step_of(step, layer, first.depth, first.rules.prefetch.uses_predictor)
            plans = []
            for row in live:
                alone[row].enter(layer, 1)
                own = own_event(event, row)._replace(pass_index=alone[row].record.index)
                plans.append(alone[row].run(own))
            predicted = {at: values[live] for at, values in event.predicted.items()}
            given = event.experts[live], event.weights[live], event.logits[live], predicted
            selection = together.run(layer, *given)
            whole = executed(selection, event._replace(experts=given[0]))
            for place, (row, plan) in enumerate(zip(live, plans, strict=True)):
                expected = executed(plan.selection, own_event(event, row))
                assert [part[place : place + 1] for part in whole] == expected
                changed += plan.selection is not None
                if plan.levels is not None:
                    levels = together.levels_of(layer)[place]
                    base = layer * GEOMETRY.num_experts
                    ran = {base + int(e): int(levels[e]) for e in np.flatnonzero(levels >= 0)}
                    assert ran == plan.levels
                    changed += any(ran.values())
        together.end()
        for engine in [*(alone[row] for row in live), *served]:
            engine.end_pass()
    assert list(map(figures, rows)) == list(map(figures, alone))
    return changed


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_rows_get_what_each_gets_alone(case: dict[str, Any]) -> None:
    assert compare(case)


def test_machine_code_goes_through_the_rows_as_plain_python_does(machine_code: None) -> None:
    for case in CASES:
        assert compare(case)


def test_rows_may_leave_machine_code(machine_code: None) -> None:
    for step in (3, 5):  # after a step of the same rows, and of others
        assert compare({"routing": "cache_prior"}, step)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"miss": "drop", "eviction": "arc"},
        {"miss": "drop", "prefetch": "history"},
        {"miss": "my_rules.Mine"},
        {"miss": "my_rules.Other"},
    ],
    ids=str,
)
def test_what_decides_otherwise_is_served_row_by_row(
    case: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rules.py").write_text(
        "from lm_eval_moecache import Miss\n"
        "from lm_eval_moecache.algorithms.miss.drops import Drop\n"
        "class Mine(Miss):\n"
        "    source = 'a test'\n"
        "    def resolve(self, event, absent, resident):\n"
        "        return None\n"
        "class Other(Drop):\n"
        "    def resolve(self, event, absent, resident):\n"
        "        return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert not can_serve(engines_of(case))
