"""Rules stated by costs choose the same in plain Python as in machine code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms import costs
from lm_eval_moecache.algorithms.costs import Missing, Substitute, SubstituteCost, ranking
from lm_eval_moecache.algorithms.miss.base import SubstitutingMiss
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.algorithms.routing.base import RoutingByCost
from lm_eval_moecache.records.tokens import Tokens
from lm_eval_moecache.testing.streams import equip, make_geometry, policy_of

GEOMETRY = make_geometry(num_layers=3, num_experts=12, top_k=4)
BASES: dict[str, type[Any]] = {"routing": RoutingByCost, "miss": SubstitutingMiss}
CASES: list[dict[str, Any]] = [
    *(
        {axis: name}
        for axis, base in BASES.items()
        for name in algorithm_names(axis)
        if issubclass(find_algorithm(axis, name), base)
    ),
    {"routing": "cache_prior", "routing.delta": "mean", "routing.top_j": 0},
    {"routing": "cache_prior", "routing.logit_range": [1.0, 2.0, 3.0]},
    {"miss": "buddy", "miss.eta": 1.0, "miss.reuse": 0.5, "miss.order": "lightest"},
    {"miss": "substitute_score", "miss.scale": "relative", "miss.fallback": "drop"},
    {"miss": "substitute_random", "miss.rho": 2},
]


def rule_of(case: dict[str, Any]) -> Any:
    (axis,) = (axis for axis in BASES if axis in case)
    return getattr(equip(policy_of(case), GEOMETRY), axis).build(GEOMETRY, 0)


def tokens_of_rows(rows: int, per_row: int, state_size: int, is_biased: bool) -> Tokens:
    drawn = np.random.default_rng(rows * per_row)
    size, layer = (rows * per_row, GEOMETRY.num_experts), 1
    logits = drawn.normal(size=size).round(1).astype(np.float32)  # with ties
    bias = drawn.normal(size=size[1]) if is_biased else 0.0
    experts = np.argsort(-(logits + bias), axis=-1, kind="stable")[:, : GEOMETRY.top_k]
    weights = np.take_along_axis(np.exp(logits), experts, axis=-1)
    resident = np.repeat(drawn.random((rows, size[1])) < 0.5, per_row, axis=0)
    state = drawn.random((rows, state_size)) + 1
    own = experts, weights, logits, resident, ~resident, state
    return Tokens(layer, "decode", [*range(rows)], *own)


def told(rule: Any, tokens: Tokens) -> Any:
    chosen = rule.choose(tokens)
    if chosen is None:
        return None
    keep = None if chosen.keep is None else chosen.keep.tolist()
    return chosen.experts.tolist(), keep, tokens.state.tolist()


def set_compiling(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    monkeypatch.setattr(pytest.importorskip("numba").config, "DISABLE_JIT", not compiles)
    for loop in (costs.CHEAPEST, costs.SUBSTITUTES):
        monkeypatch.setattr(loop.upgrade, "is_due", lambda **_: compiles)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_machine_code_chooses_as_plain_python(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, changed = rule_of(case), 0
    for rows, per_row, is_biased in ((1, 1, False), (1, 1, True), (5, 1, True), (3, 7, False)):
        results = []
        for compiles in (False, True):
            set_compiling(monkeypatch, compiles)
            tokens = tokens_of_rows(rows, per_row, getattr(rule, "state_size", 0), is_biased)
            results.append(told(rule, tokens))
        assert results[0] == results[1]
        changed += results[0] is not None
    assert changed


@pytest.mark.parametrize("compiles", [False, True])
def test_ranks_and_ties_are_those_of_the_numpy_functions(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_compiling(monkeypatch, compiles)
    rule = rule_of({"routing": "max_rank", "routing.J": 1})
    for rows, is_biased in ((4, False), (9, True)):
        tokens = tokens_of_rows(rows, 3, rule.state_size, is_biased)
        ranked = ranking(tokens)
        cached = np.take_along_axis(tokens.resident, ranked, axis=-1)
        cached[:, 2 * GEOMETRY.top_k :] = False
        place = np.where(cached, 1, 2)
        place[:, 0] = 0
        taken = np.sort(place.argsort(axis=-1, kind="stable")[:, : GEOMETRY.top_k], axis=-1)
        expected = np.take_along_axis(ranked, taken, axis=-1)
        np.testing.assert_array_equal(rule.choose(tokens).experts, expected)


def test_a_cost_that_numba_cannot_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Latest(SubstitutingMiss):
        def cost(self) -> SubstituteCost:
            seen: list[Missing] = []

            def cost(missing: Missing, other: Substitute) -> tuple[float, float]:
                seen.append(missing)
                return -float(len(seen)), 0.0

            return cost

    set_compiling(monkeypatch, True)
    chosen = told(Latest(geometry=GEOMETRY), tokens_of_rows(2, 1, 0, False))
    assert chosen is not None


@pytest.mark.parametrize("given", [1.5, (float("nan"), 0.0), (0.0, 1.0, 2.0)], ids=str)
def test_plain_python_refuses_a_cost_that_is_not_two_numbers(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(SubstitutingMiss):
        def cost(self) -> SubstituteCost:
            return lambda missing, other: given

    set_compiling(monkeypatch, False)
    with pytest.raises(ValueError, match=re.escape(f"the cost is {given!r}; expected: a tuple")):
        told(Wrong(geometry=GEOMETRY), tokens_of_rows(2, 1, 0, False))


def test_a_rule_made_again_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    set_compiling(monkeypatch, True)
    case = {"routing": "cache_prior", "routing.lambda": 0.25}
    tokens = tokens_of_rows(1, 1, 3, False)
    rule_of(case).choose(tokens)
    known = len(costs.CHEAPEST._compiled)
    rule_of(case).choose(tokens)
    assert len(costs.CHEAPEST._compiled) == known
    rule_of(case | {"routing.lambda": 0.75}).choose(tokens)
    assert len(costs.CHEAPEST._compiled) == known + 1


def test_getting_ready_compiles_the_cost_and_leaves_the_rule_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_compiling(monkeypatch, True)
    for case in ({"routing": "cache_prior", "routing.lambda": 0.375}, {"miss": "buddy"}):
        rule = rule_of(case)
        loop = costs.CHEAPEST if "routing" in case else costs.SUBSTITUTES
        monkeypatch.setattr(loop, "_compiled", {})
        rule.get_ready()
        assert len(loop._compiled) == 1 and not rule.state.any()


LIKING = """
from lm_eval_moecache.algorithms.costs import RankCost, Ranked, Seen
from lm_eval_moecache.algorithms.routing.base import RoutingByCost
import scales
from scales import SCALE


class Imported(RoutingByCost):
    def cost(self) -> RankCost:
        def cost(expert: Ranked, seen: Seen) -> tuple[float, float]:
            return -expert.logit - expert.resident * SCALE, 0.0

        return cost


class Attribute(RoutingByCost):
    def cost(self) -> RankCost:
        def cost(expert: Ranked, seen: Seen) -> tuple[float, float]:
            return -expert.logit - expert.resident * scales.SCALE, 0.0

        return cost


class Local(RoutingByCost):
    def cost(self) -> RankCost:
        scale = scales.SCALE

        def cost(expert: Ranked, seen: Seen) -> tuple[float, float]:
            return -expert.logit - expert.resident * scale, 0.0

        return cost
"""
CHOOSE = """
import sys
from unittest.mock import patch
import liking
from lm_eval_moecache.algorithms import costs
from tests.algorithms.test_costs import GEOMETRY, told, tokens_of_rows

with patch.object(costs.CHEAPEST.upgrade, "is_due", lambda **_: True):
    for name in ("Imported", "Local", "Attribute"):
        rule = getattr(liking, name)(geometry=GEOMETRY)
        print(told(rule, tokens_of_rows(4, 1, 3, False)))
    print([found is not None for found in costs.CHEAPEST._compiled.values()])
"""


def test_machine_code_on_disk_ends_with_the_values_that_it_was_made_of(tmp_path: Path) -> None:
    """Whether the cost's own file holds them or another one."""
    pytest.importorskip("numba")
    (tmp_path / "liking.py").write_text(LIKING)
    environment = dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path / "kept"), NUMBA_DISABLE_JIT="0")
    environment |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    printed = []
    for scale in (0.0, 9.0):
        (tmp_path / "scales.py").write_text(f"SCALE = {scale}")
        command = [sys.executable, "-c", CHOOSE]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        *chosen, compiled = run.stdout.splitlines()
        assert len(set(chosen)) == 1, "the same rule, stated in three ways"
        assert compiled == "[True, True]", "but for a module's attribute, which may change"
        printed.append(chosen[0])
    assert printed[0] == "None" != printed[1]


def test_a_value_that_changes_in_a_process_gives_another_machine_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_compiling(monkeypatch, True)
    told_of = []
    for scale in (0.0, 9.0):
        scope: dict[str, Any] = {"__name__": "liking"}
        monkeypatch.setitem(sys.modules, "scales", SimpleNamespace(SCALE=scale))
        exec(compile(LIKING, __file__, "exec"), scope)
        rule = scope["Imported"](geometry=GEOMETRY)
        told_of.append(told(rule, tokens_of_rows(4, 1, 3, False)))
    assert told_of[0] is None is not told_of[1]
