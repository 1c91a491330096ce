"""No knob is dead: every parameter of every algorithm moves some figure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import pytest

from lm_eval_moecache.algorithms.policy import Choice, unmangle
from lm_eval_moecache.algorithms.registry import (
    AXES,
    algorithm_names,
    find_algorithm,
    parameters_of,
    ranges_of,
)
from lm_eval_moecache.records.artifact import BUDDIES, DATA_AWARE, PREDICTOR, SENSITIVITY
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing.streams import (
    laddered,
    make_geometry,
    policy_of,
    profile_for,
    run,
)

GEOMETRY = make_geometry(num_layers=3, num_experts=8, top_k=3)
NUMBERS = (1, 2, 4, 5, 6, 0.01, 0.05, 0.3, 0.5, 0.9, 1.5, 2.0, 3.0, 50.0, 95.0)
# Values that `alternatives` cannot find; add an entry for a new parameter only if the test fails.
EXTRA: dict[tuple[str, str, str], tuple[Any, ...]] = {
    # Above the router's top-k.
    ("routing", "max_rank", "M"): (5, 7),
    ("routing", "cache_prior", "logit_range"): (0.5, [0.5, 3.0, 6.0]),
    ("miss", "drop_cold", "factor"): (0.2, 0.8),
    # At least t1, which is 0.6.
    ("miss", "cascade", "t2"): (0.61, 0.7, 0.8),
    ("miss", "drop_cascade", "t2"): (0.61, 0.7, 0.8),
    **{
        (axis, name, "profile"): (profile_for(kind, GEOMETRY, 1),)
        for axis, name, kind in (
            *(("miss", "buddy", BUDDIES), ("routing", "sensitivity", SENSITIVITY)),
            *(("prefetch", "predictor", PREDICTOR), ("prefetch", "data_aware", DATA_AWARE)),
        )
    },
}
# Settings without which a parameter has no effect, or its other values are refused.
COMPANIONS: dict[tuple[str, str, str], dict[str, Any]] = {
    ("miss", "buddy", "tau_scale"): {"miss.tau": 0.5},
    ("miss", "expert_budget", "renormalize"): {"miss.budget": 2},
    ("miss", "expert_budget", "rescue"): {"miss.budget": 1},
    ("miss", "buddy", "partitions"): {"miss.kappa": 0.5, "miss.partitions": 2},
    ("miss", "buddy", "kappa"): {"miss.kappa": 0.1, "miss.partitions": 2},
    **{
        ("miss", name, "late"): {"prefetch": "next_gate"}
        for name in ("buddy", "substitute_random", "substitute_score")
    },
}
# Short streams have too few duels for any memory to matter: tests/engine/test_hazard.py varies it.
ELSEWHERE = {("eviction", "hazard", "memory")}
CASES = [
    (axis, name, parameter)
    for axis in AXES
    for name in algorithm_names(axis)
    for parameter in parameters_of(find_algorithm(axis, name))
    if (axis, name, parameter) not in ELSEWHERE
]


def alternatives(parameter: inspect.Parameter) -> list[Any]:
    """Values of the parameter's type other than its default."""
    kind = parameter.annotation
    if get_origin(kind) is Literal:
        values: tuple[Any, ...] = get_args(kind)
    elif kind is bool:
        values = (False, True)
    elif kind is int or (int in get_args(kind) and float not in get_args(kind)):
        values = tuple(n for n in NUMBERS if isinstance(n, int))
    else:
        values = NUMBERS
    return [value for value in values if value != parameter.default]


def companions(axis: str, name: str, parameter: str) -> Iterator[dict[str, Any]]:
    """The required settings, then each reading or switch that may let the parameter act."""
    yield COMPANIONS.get((axis, name, parameter), {})
    for other, other_parameter in parameters_of(find_algorithm(axis, name)).items():
        if other != parameter and get_origin(other_parameter.annotation) is Literal:
            yield from ({f"{axis}.{other}": value} for value in alternatives(other_parameter))


def contexts(axis: str, name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Partners and capacities in which to look for an effect."""
    partners = {a: names[-1] for a, names in find_algorithm(axis, name).pairs_with.items()}
    for capacity in ("40%", "60%"):
        yield partners, capacity
        if axis == "eviction":
            yield {**partners, "prefetch": "next_gate"}, capacity


def figures(choice: dict[str, Any], capacity: str) -> list[object]:
    return run(policy_of(choice), GEOMETRY, capacity, num_requests=4).figures


def moves(axis: str, name: str, parameter: str) -> bool:
    """Look for a value of the parameter that changes a figure."""
    key = f"{axis}.{unmangle(parameter)}"
    signature = parameters_of(find_algorithm(axis, name))[parameter]
    values = [*EXTRA.get((axis, name, parameter), ()), *alternatives(signature)]
    for partners, capacity in contexts(axis, name):
        for companion in companions(axis, name, parameter):
            overrides = {axis: name, **partners, **companion}
            try:
                before = figures(overrides, capacity)
            except ValueError:
                continue
            for value in values:
                try:
                    if figures({**overrides, key: value}, capacity) != before:
                        return True
                except ValueError:
                    continue
    return False


@pytest.mark.parametrize(("axis", "name", "parameter"), CASES)
def test_a_parameter_moves_some_figure(axis: str, name: str, parameter: str) -> None:
    assert moves(axis, name, parameter), (
        f"{axis}.{parameter} of {name} moves nothing: a dead knob, or EXTRA lacks a value for it"
    )


def test_phases_move_the_figures_of_a_lossy_policy() -> None:
    for overrides in ({"routing": "cache_prior"}, {"miss": "drop"}):
        assert figures({**overrides}, "40%") != figures({**overrides, "phases": "decode"}, "40%")


BUDDY = {"profile": profile_for(BUDDIES, GEOMETRY), "tau": 0.0, "tau_scale": "absolute"}
OWA, FEW = {"weights": "owa"}, {"tokens": "mispredicted"}
# For a model of three layers with eight experts each, top-3.
OUT_OF_RANGE: dict[tuple[str, str], list[tuple[dict[str, Any], str]]] = {
    ("miss", "buddy"): [
        ({"kappa": 0.1}, r"kappa=0\.1 with miss\.partitions=1: the one has no effect"),
        ({"partitions": 2}, r"partitions=2: the one has no effect"),
        ({"reuse": 0.5, "weight": "own"}, r"miss\.reuse=0\.5 .* only with weight=missing"),
        ({"tau": 1.5}, r"miss\.tau=1\.5 must lie between 0 and 1 \(tau_scale=absolute\)"),
        ({"alpha": [0.5, 0.5]}, r"one number, or 3, one for each MoE layer"),
        ({"H": 0}, r"miss\.H=0 must be at least 1 and below the longest list, 7"),
        ({"H": 2, "k_max": 2}, r"miss\.H=2 must be at least 1 and below the longest list, 2"),
    ],
    ("miss", "fetch_priority"): [
        ({"percentile": 0.6}, r"percentile=0\.6.*one at least.*not 0\.6"),
        ({"h": 3}, "h from 1 to 2"),
        ({"h": 2, "percentile": 50.0}, r"no effect with miss\.h=2"),
    ],
    ("miss", "cascade"): [({"t1": 0.9, "t2": 0.5}, "0 < t1 <= t2 < 1")],
    ("miss", "drop_cascade"): [({"t1": 0.9}, "0 < t1 < t2 < 1")],
    ("eviction", "score"): [({"decay": 0.5}, "decay=0.5 has no effect")],
    ("routing", "cache_prior"): [
        ({"logit_range": [1.0, 2.0]}, r"routing\.logit_range.*2 values.*or 3, one for each"),
        ({"logit_range": 1.0, "delta": "mean"}, r"routing\.logit_range.*routing\.delta='mean'"),
    ],
    ("routing", "commit"): [
        ({"alpha1": 1.2}, "alpha1=1.2 has no effect with routing.weights='plain'"),
        ({"trigger_max": 2}, "trigger_max=2 has no effect"),
        ({**OWA, "trigger_max": 3}, "must lie between 1 and top_k - 1 = 2"),
        ({**OWA, "trigger_min": 2, "trigger_max": 1}, "right in part"),
        ({**OWA, **FEW}, "cannot be combined with routing.weights='owa'"),
        ({"most_right": 2}, "most_right=2 has no effect with routing.tokens='all'"),
    ],
}


def choice_of(axis: str, name: str, given: dict[str, Any]) -> Choice:
    algorithm = find_algorithm(axis, name)
    defaults = {key: p.default for key, p in parameters_of(algorithm).items()}
    defaults |= BUDDY if name == "buddy" else {}
    return Choice(axis=axis, name=name, algorithm=algorithm, parameters={**defaults, **given})


@pytest.mark.parametrize(("axis", "name"), OUT_OF_RANGE)
def test_a_parameter_that_changes_nothing_or_too_much_is_refused(axis: str, name: str) -> None:
    uses_ladder = getattr(find_algorithm(axis, name), "uses_ladder", False)
    geometry = laddered(GEOMETRY) if uses_ladder else GEOMETRY
    for given, words in OUT_OF_RANGE[axis, name]:
        with pytest.raises(ValueError, match=words):
            choice_of(axis, name, given).build(geometry, 0)


TWO_LEVELS = replace(GEOMETRY, expert_bytes=((100, 50),) * 3, precision=("int8", "int4"))


@pytest.mark.parametrize(
    ("name", "geometry", "given", "words"),
    [
        ("cascade", TWO_LEVELS, {"t2": 0.9}, r"miss\.t2=0\.9 has no effect with the two levels"),
        ("cascade", GEOMETRY, {}, "'cascade' loads at lower precisions, but precision="),
        ("fetch_lowest", GEOMETRY, {}, "precision=int8:int4:int2"),
        ("buddy", replace(GEOMETRY, top_k=1), {}, "top_k=1 has no experts chosen together"),
    ],
)
def test_a_rule_for_which_the_model_or_its_store_is_not_made_is_refused(
    name: str, geometry: Geometry, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        choice_of("miss", name, given).build(geometry, 0)


def test_a_number_beyond_a_limit_of_its_range_is_refused() -> None:
    beyond = {"least": -1, "above": 0, "most": 1, "below": 0}
    texts = {"least": "{} or more", "above": "above {}", "most": "at most {}", "below": "below {}"}
    counts = {"top_k": "the router's top_k=3", "num_experts": "the 8 experts"}
    counts |= {"num_layers": "the 3 MoE layers"}
    tried = 0
    for axis, name in {(axis, name) for axis, name, _ in CASES}:
        for key, allowed in ranges_of(find_algorithm(axis, name)).items():
            for kind, limit in allowed.limits.items():
                number = getattr(GEOMETRY, limit) if isinstance(limit, str) else limit
                value = number + beyond[kind]
                words = f"{texts[kind].format(counts.get(limit, limit))}.*{re.escape(allowed.why)}"
                said = rf"{axis}\.{unmangle(key)}={value} must be .*{words}"
                with pytest.raises(ValueError, match=said):
                    choice_of(axis, name, {key: value}).build(GEOMETRY, 0)
                tried += 1
    assert tried > 70
