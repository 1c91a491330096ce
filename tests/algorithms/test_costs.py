"""Rules stated by costs: ranks and ties, and when their machine code is made anew or not at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.cheapest import ranking
from lm_eval_moecache.algorithms.miss.base import SubstitutingMiss
from lm_eval_moecache.algorithms.routing.base import RoutingByCost
from lm_eval_moecache.algorithms.substitution import Missing, Substitute, SubstituteCost
from lm_eval_moecache.records import machine_code
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.testing.streams import equip, make_geometry, policy_of

GEOMETRY = make_geometry(num_layers=3, num_experts=12, top_k=4)


def rule_of(case: dict[str, Any]) -> Any:
    return equip(policy_of(case), GEOMETRY).routing.build(GEOMETRY, 0)


def event_of_rows(sizes: Sequence[int], rule: Any, is_biased: bool) -> Event:
    drawn = np.random.default_rng(sum(sizes))
    size, rows = (sum(sizes), GEOMETRY.num_experts), len(sizes)
    logits = drawn.normal(size=size).round(1).astype(np.float32)  # with ties
    bias = drawn.normal(size=size[1]) if is_biased else 0.0
    experts = np.argsort(-(logits + bias), axis=-1, kind="stable")[:, : GEOMETRY.top_k]
    weights = np.take_along_axis(np.exp(logits), experts, axis=-1)
    resident = drawn.random((rows, size[1])) < 0.5
    own = [copy(rule) for _ in sizes]
    for each in own:
        if isinstance(rule, RoutingByCost):
            each.seen = drawn.random((GEOMETRY.num_layers, 3)) + 1
    bounds = np.cumsum([0, *sizes]).tolist()
    given = experts, weights, logits, bounds, resident, ~resident, own
    return Event(1, "decode", [*range(rows)], GEOMETRY.num_experts, *given)


def told(rule: Any, event: Event) -> Any:
    chosen = rule.choose(event)
    if chosen is None:
        return None
    keep = None if chosen.keep is None else chosen.keep.tolist()
    return chosen.experts.tolist(), keep, [vars(own).get("seen", ()) for own in event.own]


def test_ranks_and_ties_are_those_of_the_numpy_functions() -> None:
    rule = rule_of({"routing": "max_rank", "routing.J": 1})
    for rows, is_biased in ((4, False), (9, True)):
        event = event_of_rows([3] * rows, rule, is_biased)
        ranked = ranking(event)
        cached = np.take_along_axis(event.resident[event.rows], ranked, axis=-1)
        cached[:, 2 * GEOMETRY.top_k :] = False
        place = np.where(cached, 1, 2)
        place[:, 0] = 0
        taken = np.sort(place.argsort(axis=-1, kind="stable")[:, : GEOMETRY.top_k], axis=-1)
        expected = np.take_along_axis(ranked, taken, axis=-1)
        np.testing.assert_array_equal(rule.choose(event).experts, expected)


def test_a_cost_that_numba_cannot_compile_runs_as_it_is() -> None:
    class Latest(SubstitutingMiss):
        def cost(self) -> SubstituteCost:
            seen: list[Missing] = []

            def cost(missing: Missing, other: Substitute) -> tuple[float, float]:
                seen.append(missing)
                return -float(len(seen)), 0.0

            return cost

    rule = Latest(geometry=GEOMETRY)
    assert told(rule, event_of_rows([1, 1], rule, False)) is not None


@pytest.mark.parametrize("given", [1.5, (float("nan"), 0.0), (0.0, 1.0, 2.0)], ids=str)
def test_a_cost_in_plain_python_is_refused_where_it_is_not_two_numbers(given: Any) -> None:
    class Wrong(SubstitutingMiss):
        def cost(self) -> SubstituteCost:
            return lambda missing, other: [given][int(other.score)]

    rule = Wrong(geometry=GEOMETRY)
    with pytest.raises(ValueError, match=re.escape(f"returned {given!r}; expected: two numbers")):
        told(rule, event_of_rows([1, 1], rule, False))


def test_a_rule_made_again_is_not_compiled_again() -> None:
    case = {"routing": "cache_prior", "routing.lambda": 0.25}
    assert rule_of(case).loop
    known = len(machine_code._bridges)
    assert rule_of(case).loop and len(machine_code._bridges) == known
    assert rule_of(case | {"routing.lambda": 0.71}).loop
    assert len(machine_code._bridges) == known + 1


COSTS = {"Imported": "SCALE", "Attribute": "scales.SCALE", "Local": "scale"}
"""Name of a rule -> where its cost finds a number."""
LIKING = """
from lm_eval_moecache.algorithms.cheapest import RankCost, Ranked, Seen
from lm_eval_moecache.algorithms.routing.base import RoutingByCost
import scales
from scales import SCALE
""" + "".join(
    f"""

class {name}(RoutingByCost):
    def cost(self) -> RankCost:
        scale = scales.SCALE

        def cost(expert: Ranked, seen: Seen) -> tuple[float, float]:
            return -expert.logit - expert.resident * {scale}, 0.0

        return cost
"""
    for name, scale in COSTS.items()
)
CHOOSE = """
import liking
from lm_eval_moecache.records import machine_code
from tests.algorithms.test_costs import GEOMETRY, event_of_rows, told

plain = []
machine_code._in_python = lambda rule, *more, kept=machine_code._in_python: (
    plain.append(rule.__qualname__.split(".")[0]), kept(rule, *more)
)[1]
for name in ("Imported", "Local", "Attribute"):
    rule = getattr(liking, name)(geometry=GEOMETRY)
    print(told(rule, event_of_rows([1] * 4, rule, False)))
print(plain)
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
        *chosen, plain = run.stdout.strip().rsplit("\n", 1)
        assert plain == "['Attribute']", "a module's attribute may change"
        chosen = [line for line in chosen[0].split("\n") if line]
        printed.append(chosen[0])
    assert printed[0] == "None" != printed[1]


def test_a_value_that_changes_in_a_process_gives_another_machine_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told_of = []
    for scale in (0.0, 9.0):
        scope: dict[str, Any] = {"__name__": "liking"}
        monkeypatch.setitem(sys.modules, "scales", SimpleNamespace(SCALE=scale))
        exec(compile(LIKING, __file__, "exec"), scope)
        rule = scope["Imported"](geometry=GEOMETRY)
        told_of.append(told(rule, event_of_rows([1] * 4, rule, False)))
    assert told_of[0] is None is not told_of[1]
