"""Cases of every rule, worked by hand: `by_hand.yaml` has them, and says what its words mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.learned.buddies import PAIRS
from lm_eval_moecache.algorithms.learned.sensitivity import LAYERS, THRESHOLDS
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names, find_algorithm
from lm_eval_moecache.records.artifact import BUDDIES, SENSITIVITY, write_artifact
from lm_eval_moecache.records.event import DECODE, DROPPED, Event
from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing.contracts import expected, play
from lm_eval_moecache.testing.ranked import as_stateful
from lm_eval_moecache.testing.streams import (
    artifact_for,
    laddered,
    make_event,
    make_geometry,
    profile_parameter,
)
from tests.algorithms.asked import choose, resolve

CASES: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_name("by_hand.yaml"), "")
UNWORKED = {
    ("eviction", "belady"): "it goes by the future alone",
    ("eviction", "importance"): "it goes by gate scores, which scripts have not: below",
    ("eviction", "random"): "its choices are draws",
    ("prefetch", "expert_map"): "its cosines are no work for a hand",
    ("prefetch", "history"): "its cosines are no work for a hand",
    ("prefetch", "oracle"): "it goes by the future alone",
}
EVENT = ("logits", "shares", "gates", "router", "layer", "phase", "pass", "predicted", "draft")
GIVEN = (*EVENT, "top_k", "cached", "resident", "precision", "pairs", "sensitivity", "before")
OUT = ("out", "weigh_as", "renormalized", "fetch", "levels", "keys", "proposed", "why")
LISTED = [
    (axis, name, case)
    for axis in ("routing", "miss", "prefetch")
    for name, cases in CASES[axis].items()
    for case in cases
]


def test_every_rule_has_a_case_or_a_reason() -> None:
    for axis in AXES:
        names = {*CASES[axis], *(name for on, name in UNWORKED if on == axis)}
        advice = f"{axis}: add a case to tests/algorithms/by_hand.yaml"
        assert names == {*algorithm_names(axis)}, advice


def logits_of(given: Any) -> Any:
    """Return the logits [tokens, experts] of `logits`, or of the logarithms of `shares`."""
    if isinstance(given, Mapping):
        logs = np.log(given["shares"]) if "shares" in given else given["logits"]
        return np.atleast_2d(np.asarray(logs, dtype=np.float32))
    return np.atleast_2d(np.asarray(given, dtype=np.float32))


def event_of(geometry: Geometry, case: Mapping[str, Any]) -> Event:
    place = case.get("pass", 0), case.get("layer", 0)
    if "gates" in case:
        weights = np.atleast_2d(np.array(case["gates"], dtype=np.float32))
        experts = np.tile(np.arange(weights.shape[1]), (len(weights), 1))
        return Event(place[1], DECODE, [place[0]], geometry.num_experts, experts, weights)
    predicted = {layer: logits_of(given) for layer, given in case.get("predicted", {}).items()}
    event = make_event(geometry, *place, logits_of(case), case.get("phase", DECODE), predicted)
    if "router" in case:
        experts = np.atleast_2d(case["router"])
        weights = np.where(experts == DROPPED, 0, event.weights)
        event = event._replace(experts=experts, weights=weights)
    return event


def make(axis: str, name: str, case: Mapping[str, Any], folder: Path) -> Any:
    """Return the rule of a case, for two layers."""
    algorithm = find_algorithm(axis, name)
    row = np.atleast_2d(case[next(key for key in (*EVENT[:3], "draft") if key in case)])[0]
    geometry = make_geometry(2, len(row), case.get("top_k", len(row)))
    if getattr(algorithm, "uses_ladder", False):
        geometry = laddered(geometry)
    if "precision" in case:
        sizes = {"expert_bytes": ((100, 50),) * 2, "precision": (*case["precision"].split(":"),)}
        geometry = dataclasses.replace(geometry, **sizes)
    own = {key: value for key, value in case.items() if key not in (*GIVEN, *OUT)}
    if axis != "prefetch":  # where it is importance' number of experts
        own.pop("experts", None)
    parameters, path = profile_parameter(algorithm, geometry) | own, folder / "p.safetensors"
    if "pairs" in case:
        artifact = artifact_for(BUDDIES, geometry)
        arrays = {**artifact.arrays, PAIRS: np.array([case["pairs"]] * 2, dtype=float)}
        made_from = {"alpha": [1.0, 1.0], "k_max": 4, "smoothing": 0.0}
        artifact = dataclasses.replace(artifact, arrays=arrays, made_from=made_from)
    elif "sensitivity" in case:
        artifact = artifact_for(SENSITIVITY, geometry)
        steps = {LAYERS: np.array(case["sensitivity"]), THRESHOLDS: np.linspace(0, 1, 101)}
        artifact = dataclasses.replace(artifact, arrays=steps)
    else:
        return algorithm(geometry, **parameters)
    write_artifact(path, artifact)
    return algorithm(geometry, **{**parameters, "profile": str(path)})


@pytest.mark.parametrize(
    ("axis", "name", "case"), LISTED, ids=[f"{axis}-{name}" for axis, name, _ in LISTED]
)
def test_a_case_worked_by_hand(axis: str, name: str, case: Any, tmp_path: Path) -> None:
    rule = make(axis, name, case, tmp_path)
    ask = {"routing": routed, "miss": resolved, "prefetch": proposed}[axis]
    asked = [*case.get("before", ()), case]
    for place, each in enumerate(asked):
        if place == 0 or each.get("pass", 0) != asked[place - 1].get("pass", 0):
            rule.on_pass(each.get("pass", 0))
        ask(rule, each)


def routed(rule: Any, case: Mapping[str, Any]) -> None:
    event = event_of(rule.geometry, case)
    executes(case, rule, choose(rule, event, case.get("cached", ())))


def executes(case: Mapping[str, Any], rule: Any, selection: Any) -> None:
    """Compare a selection with the `experts` of a case, their weights and how they are weighed."""
    if "experts" not in case:
        return
    if case["experts"] == "same":
        assert selection is None
        return
    live = selection.experts != DROPPED
    live &= True if selection.keep is None else selection.keep
    chosen = [row[kept].tolist() for row, kept in zip(selection.experts, live, strict=True)]
    assert chosen == case["experts"] or chosen == [case["experts"]]
    whole = case.get("renormalized", getattr(rule, "renormalize", False))
    assert selection.renormalize == whole
    for key, found in (("out", selection.weights), ("weigh_as", selection.weigh_as)):
        if key in case and case[key] is None:
            assert found is None
        elif key in case:
            np.testing.assert_allclose(found, np.atleast_2d(case[key]), rtol=1e-5)


def resolved(rule: Any, case: Mapping[str, Any]) -> None:
    event, given = event_of(rule.geometry, case), case["resident"]
    base = event.layer * event.num_experts
    resident = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given, 0)
    held = {key - base: level for key, level in resident.items() if 0 <= key - base < 100}
    selection, loaded = resolve(rule, event, held)
    levels = {base + expert: level for expert, level in loaded.items()}
    if case["fetch"] == "all":
        assert selection is None
        assert levels == dict.fromkeys((key for key in event.keys if key not in resident), 0)
    else:
        by_key = isinstance(case["fetch"], Mapping)
        assert levels == (case["fetch"] if by_key else dict.fromkeys(case["fetch"], 0))
        executes(case, rule, selection)
    if "keys" in case:
        experts = np.array(case["keys"]) - event.num_experts
        experts = np.where(experts < 0, experts + event.num_experts, experts)
        assert rule.prefetch_levels(event, 1, experts).tolist() == case["levels"]


def proposed(rule: Any, case: Mapping[str, Any]) -> None:
    if "draft" in case:
        assert [*rule.propose_draft(case["layer"], logits_of(case["draft"]))] == case["proposed"]
        return
    assert [*rule.propose(event_of(rule.geometry, case))] == case["proposed"]


def test_evictions_choose_as_scripted() -> None:
    geometry = make_geometry()
    for name, cases in CASES["eviction"].items():
        for case in cases:
            given = dict(case) if isinstance(case, Mapping) else {"script": case}
            script = given.pop("script")
            victims = play(find_algorithm("eviction", name)(geometry, **given), script)
            assert victims == expected(script), f"{name}: {script!r}, but who leaves is {victims}"


def test_the_least_important_leaves_and_layers_compare() -> None:
    """SwapMoE's importance: a decayed sum of gate scores, resident or not."""
    geometry = make_geometry(num_layers=2, num_experts=4, top_k=4)
    rule = as_stateful(find_algorithm("eviction", "importance")(geometry, decay=0.5))
    turns = [
        # 0.1, 0.2, 0.3, 0.5, 0.6 of keys 2, 5, 1, 0, 4.
        ([(0, [0.5, 0.3, 0.1, 0.1]), (1, [0.6, 0.2, 0.1, 0.1])], [2, 5, 1, 0, 4]),
        # Layer 0: 0.35, 0.25, 0.75; layer 1 is unchanged.
        ([(0, [0.1, 0.1, 0.7, 0.1])], [5, 1, 0, 4, 2]),
    ]
    for events, order in turns:
        for layer, scores in events:
            rule.on_event(make_event(geometry, 0, layer, np.log([scores])))
        for key in (0, 1, 2, 4, 5):
            rule.on_insert(key, key == 2)
        for key in order:
            assert rule.victim(set(), 0) == key
            rule.on_evict(key)
