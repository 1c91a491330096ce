"""Rules together: the YAMLs of policies/ and every sensible pairing run; others are refused."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lm_eval_moecache.algorithms.policy import check_cache_form, load_policy, policy_names
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names, find_algorithm
from lm_eval_moecache.engine.engine import Engine as VirtualEngine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.records.event import DECODE, PREFILL, VERIFY
from lm_eval_moecache.records.files import policies_dir
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import (
    choose,
    make_event,
    make_geometry,
    make_hardware,
    policy_of,
    run,
    weigh,
)
from tests.algorithms import asked

# --- compositions ---


@pytest.mark.parametrize("name", policy_names())
def test_a_composition_says_where_it_comes_from_and_survives_being_printed(
    name: str, tmp_path: Path
) -> None:
    text, policy = (policies_dir() / f"{name}.yaml").read_text(), load_policy(name)
    assert text.startswith("# ") and policy.name == name and policy.source
    printed = policy.as_dict()
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(printed))
    assert load_policy(str(copy)).as_dict() == printed


@pytest.mark.parametrize("name", policy_names())
def test_a_composition_runs(name: str) -> None:
    policy = load_policy(name)
    for capacity in ("15%" if policy.per_layer else "5%", "50%"):
        served = run(policy, make_geometry(top_k=6 if "deepseek" in name else 4), capacity).engine
        assert served.ledger.passes
        assert len(served.pools) == (served.geometry.num_layers if policy.per_layer else 1)


@pytest.mark.parametrize("name", ["mixture_cache", "cumsum", "max_rank"])
def test_cache_conditional_compositions_are_the_papers(name: str) -> None:
    """They act only while decoding, with a cache per layer, whatever the capacity's form."""
    policy, geometry = load_policy(name), make_geometry(num_layers=3, num_experts=8)
    assert policy.phases == "decode"
    size = geometry.expert_bytes[0][0]
    for text, slots in (("25%", 2), ("14experts", 4), ("2/layer", 2)):
        parts = parse_capacity(text, geometry, per_layer=policy.per_layer).bytes_by_partition
        assert parts == (slots * size,) * 3
    with pytest.raises(ValueError, match="too small for one expert in each of 3 layers"):
        parse_capacity("2experts", geometry, per_layer=True)
    with pytest.raises(ValueError, match="chooses between layers"):
        read_config({"policy": name, "eviction": "fld"})


@pytest.mark.parametrize("name", ["fiddler", "ktransformers"])
def test_host_compositions_start_from_placed_experts(name: str) -> None:
    geometry = replace(make_geometry(num_layers=8, num_experts=64), model="tiny")
    setting = read_config({"policy": name, "capacity": "25%"}).setting(geometry)
    assert setting.warm is not None and setting.warm.model == "tiny"
    assert len(VirtualEngine(geometry, setting).pools[0].resident) == 128
    with pytest.raises(ValueError, match=f"{name}.*no profile ships. Give warm=PROFILE"):
        read_config({"policy": name}).setting(replace(geometry, model="some/other"))


def passes_of(name: str) -> list[Any]:
    return run(policy_of({}, name), make_geometry(), "100%").engine.ledger.passes


def test_what_was_decided_is_prefetched_and_adapmoe_takes_one_expert_a_layer_and_token() -> None:
    passes = passes_of("pre_gated")
    assert all(p.predicted_right == p.predicted == p.predictable for p in passes)
    assert sum(p.predicted for p in passes) > 50
    committed = [p for p in passes_of("commitmoe_no_owa") if p.phase == DECODE]
    assert all(p.predicted_right == p.predicted for p in committed)
    assert sum(p.predicted for p in committed) > 20 and any(p.unfaithful for p in committed)
    # Two of the three layers have a layer before them.
    assert {p.predicted for p in passes_of("adapmoe") if p.phase == DECODE} == {2}


@pytest.mark.parametrize(
    ("name", "top_k", "values"),
    [
        ("commitmoe", 4, [1.3, 1.0, 2, 3]),
        ("commitmoe_deepseek", 6, [1.15, 1.0, 4, 5]),
        ("commitmoe_mixtral", 2, [1.2, 1.06, 1, 1]),
    ],
)
def test_commitmoes_values_are_compositions(name: str, top_k: int, values: list[float]) -> None:
    parameters = load_policy(name).routing.parameters
    assert [parameters[n] for n in ("alpha1", "alpha2", "trigger_min", "trigger_max")] == values
    geometry = make_geometry(num_experts=16, top_k=top_k)
    neutral = find_algorithm("routing", "commit")(geometry, weights="owa")
    assert [*neutral.triggers] == values[2:], "the default range"


# --- pairings ---

GEOMETRY = make_geometry(num_layers=2, num_experts=6, top_k=3)
SMALL = {"num_requests": 2, "num_decodes": 1}
Pairing = tuple[str, ...]


def is_sensible(pairing: Pairing) -> bool:
    """Whether a pairing should run: the rules restated independently."""
    routing, prefetch, eviction, miss = pairing
    if routing == "pre_gated" and prefetch not in ("none", "next_gate"):
        return False
    if eviction == "lhu" and not find_algorithm("miss", miss).uses_ladder:
        return False
    if routing == "commit" and prefetch != "predictor":
        return False
    lossless = find_algorithm("routing", routing).is_lossless
    lossless = lossless and find_algorithm("miss", miss).is_lossless
    return lossless or not (prefetch == "oracle" or eviction == "belady")


ALL = list(product(*(algorithm_names(axis) for axis in AXES)))


@cache
def covering(sensible: bool) -> list[Pairing]:
    """Choose pairings that cover every possible pair of two algorithms at least once.

    There are some fifty thousand in all, and faults nearly always involve two axes only.
    """
    covered: set[tuple[tuple[int, str], ...]] = set()
    cover = []
    pairings = [pairing for pairing in ALL if is_sensible(pairing) == sensible]
    for pairing in random.Random(0).sample(pairings, len(pairings)):
        meetings = set(combinations(enumerate(pairing), 2))
        if meetings - covered:
            covered |= meetings
            cover.append(pairing)
    return cover


@pytest.mark.parametrize("routing", algorithm_names("routing"))
def test_every_sensible_pairing_runs_and_keeps_the_books(routing: str) -> None:
    """`run` checks bytes, loads, evictions and transfers after every event."""
    assert len(covering(True)) > 384
    for pairing in (p for p in covering(True) if p[0] == routing):
        policy = policy_of(dict(zip(AXES, pairing, strict=True)))
        served = run(policy, GEOMETRY, "40%", **SMALL)
        for record in served.engine.ledger.passes:
            assert record.end_s >= record.start_s, pairing


def test_every_other_pairing_is_refused_with_the_reason() -> None:
    for pairing in covering(False):
        with pytest.raises(ValueError, match="cannot be combined with") as caught:
            policy_of(dict(zip(AXES, pairing, strict=True)))
        assert "Allowed: " in str(caught.value)


BETWEEN_LAYERS = {"fld", "shallow_first", "frequency_layer", "layered_lru"}


@pytest.mark.parametrize("name", algorithm_names("eviction"))
def test_an_eviction_runs_with_a_cache_per_layer_unless_it_chooses_between_layers(
    name: str,
) -> None:
    algorithm = find_algorithm("eviction", name)
    partners = {axis: names[-1] for axis, names in algorithm.pairs_with.items()}
    policy = policy_of({"eviction": name, **partners})
    check_cache_form(policy, per_layer=False)
    assert algorithm.compares_layers == (name in BETWEEN_LAYERS)
    if not algorithm.compares_layers:
        check_cache_form(policy, per_layer=True)
        run(policy, GEOMETRY, "3/layer", **SMALL)
        return
    with pytest.raises(ValueError, match=f"eviction='{name}' chooses between layers"):
        check_cache_form(policy, per_layer=True)


# --- one lossy rule on top of another ---

LAYER = make_geometry(num_layers=1, num_experts=6, top_k=3)
LOGITS = [3.0, 2.0, 1.0, 0.9, 0.2, 0.0]
PRUNED = {"routing": "pruning", "routing.h": 2, "miss": "drop", "miss.h": 1}


def serve(given: dict[str, Any], *texts: list[float]) -> tuple[Any, Any]:
    """Serve a token at a time; return the engine, and what the last token's experts are."""
    policy, capacity = policy_of(given), parse_capacity("5experts", LAYER)
    engine = VirtualEngine(
        LAYER, Setting(policy=policy, capacity=capacity, hardware=make_hardware())
    )
    for place, logits in enumerate(texts):
        engine.begin_pass(DECODE, 1)
        selection = choose(engine, make_event(LAYER, place, 0, [logits]))
        engine.end_pass()
        engine.check_integrity()
    return engine, selection


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_drop_after_pruning_keeps_what_both_keep(renormalize: bool) -> None:
    engine, selection = serve({**PRUNED, "routing.renormalize": renormalize}, LOGITS)
    assert selection.experts.tolist() == [[0, 1, 2]]
    assert selection.keep.tolist() == [[True, False, False]]
    (record,) = engine.ledger.passes
    assert (record.requests, record.misses, record.dropped) == (2, 2, 2)
    assert (record.unfaithful, record.substituted, record.executed) == (0, 0, 1)
    assert engine.pools[0].resident.keys() == {0}
    scores = softmax(np.array([LOGITS], dtype=np.float32))[0]
    expected = scores[:3].sum() if renormalize else scores[0]
    original = make_event(LAYER, 0, 0, [LOGITS])
    assert weigh(original, selection).sum() == pytest.approx(expected)


def test_substitutes_are_counted_and_what_they_weigh_reaches_the_eviction() -> None:
    given = {"miss": "substitute_score", "eviction": "score"}
    engine, selection = serve(given, LOGITS, [3.0, 2.0, 0.9, 1.0, 0.2, 0.0])
    record = engine.ledger.passes[-1]
    # Expert 3 is absent; 2 is 0.007 away and resident.
    assert selection.experts.tolist() == [[0, 1, 2]]
    assert (record.misses, record.substituted, record.unfaithful) == (1, 1, 1)
    assert record.bytes_moved == 0
    # Both tokens' scores of the three experts.
    texts = np.array([LOGITS, [3.0, 2.0, 0.9, 1.0, 0.2, 0.0]], dtype=np.float32)
    summed = engine.memory.experts["weight"][:3]
    np.testing.assert_allclose(summed, softmax(texts)[:, :3].sum(axis=0), rtol=1e-6)


# --- commit: which layers are predicted ---


def committed(routing: Any, pass_index: int, layer: int, phase: str, ahead: Any = None) -> bool:
    """Whether it chooses, at an event of a token that predicts the layer ahead, or none."""
    event = make_event(GEOMETRY, pass_index, layer, [range(6)], phase, ahead)
    return asked.choose(routing, event) is not None


def test_the_first_layer_of_the_first_generated_token_is_the_routers() -> None:
    rule, some = find_algorithm("routing", "commit")(GEOMETRY), np.zeros((1, 6), np.float32)
    # A prefill's last layer predicts nothing, a decode step's does.
    for place, phase in enumerate((PREFILL, DECODE, DECODE)):
        wraps = {0: some} if phase == DECODE else None
        assert committed(rule, place, 0, phase, {1: some}) == (place == 2)
        assert committed(rule, place, 1, phase, wraps)
    assert not committed(rule, 3, 0, PREFILL, {1: some}), "another request begins"
    assert not committed(rule, 5, 0, DECODE, {1: some}), "a prefill passed by in between"
    assert not committed(rule, 6, 1, DECODE, {0: some}), "nothing was predicted in this pass"


@pytest.mark.parametrize(("rows", "phase"), [(2, DECODE), (1, VERIFY)])
def test_a_batch_whose_row_has_ended_and_a_verification_are_routed_as_usual(
    rows: int, phase: str
) -> None:
    rule, ahead = find_algorithm("routing", "commit")(GEOMETRY), {0: np.zeros((rows, 6))}
    asked.choose(rule, make_event(GEOMETRY, 0, 1, [range(6)] * rows, DECODE, ahead))
    assert not committed(rule, 1, 0, phase)
