"""BuddyMoE: its equations by hand, algorithm 1 and its gates against plain loops."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.learned.buddies import (
    NO_BUDDY,
    PAIRS,
    TOP_LOGITS,
    Coactivation,
    activating_entropy,
    buddy_lists,
    conditional,
    top_k_shares,
)
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.records.artifact import BUDDIES, write_artifact
from lm_eval_moecache.records.event import DROPPED, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing.streams import (
    artifact_for,
    fresh,
    make_event,
    make_geometry,
    profile_for,
)
from tests.algorithms import oracles

GEOMETRY = make_geometry(num_layers=1, num_experts=5, top_k=3)
WIDE = make_geometry(num_layers=2, num_experts=8, top_k=3)
LIGHT = settings(max_examples=60, derandomize=True)
# M(0, .) is 4 with expert 3, 3 with 2, 2 with 1, 1 with 4; the other rows follow by symmetry.
M = np.array(
    [[0, 2, 3, 4, 1], [2, 0, 1, 1, 1], [3, 1, 0, 1, 1], [4, 1, 1, 0, 1], [1, 1, 1, 1, 0]],
    dtype=float,
)
TEXT = [3.0, 2.0, 1.0, 0.5, 0.0]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A profile whose counts are M, unsmoothed."""
    made_from = {"alpha": [1.0], "k_max": 4, "smoothing": 0.0}
    return write(tmp_path, {PAIRS: M[None]}, made_from=made_from)


def write(folder: Path, arrays: dict[str, Any], **changes: Any) -> str:
    """Write a valid profile with these arrays replaced."""
    artifact, path = artifact_for(BUDDIES, GEOMETRY), folder / "m.safetensors"
    changed = dataclasses.replace(artifact, **changes, arrays={**artifact.arrays, **arrays})
    write_artifact(path, changed)
    return str(path)


def make(profile: str | None, geometry: Geometry = GEOMETRY, /, **parameters: Any) -> Any:
    """Build it with open gates: every token's entropy is above 0."""
    open_gates = {"tau": 0.0, "tau_scale": "absolute", "profile": profile}
    return find_algorithm("miss", "buddy")(geometry, **{**open_gates, **parameters})


def resolve(handler: Any, resident: set[int], *texts: list[float]) -> Any:
    event = make_event(GEOMETRY, 0, 0, list(texts) or [TEXT])
    return handler.resolve(event, [key for key in event.keys if key not in resident], resident)


# --- equations 1 to 6 -------------------------------------------------------------------------


def test_equation_1_entropy_is_one_for_equal_shares_and_less_for_peaked_ones() -> None:
    equal = top_k_shares(np.zeros((1, 4), dtype=np.float32), 1.0)
    assert activating_entropy(equal) == pytest.approx([1.0])
    # Shares 1/2, 1/4, 1/4: (ln 2 / 2 + ln 4 / 4 + ln 4 / 4) / ln 3 = 1.5 ln 2 / ln 3.
    logits = np.log(np.array([[2.0, 1.0, 1.0]], dtype=np.float32))
    expected = 1.5 * math.log(2) / math.log(3)
    assert activating_entropy(top_k_shares(logits, 1.0)) == pytest.approx([expected])


def test_equation_2_the_residency_gate_bypasses_at_beta(profile: str) -> None:
    # The token needs 0, 1 and 2; two of three are absent: delta = 2/3.
    assert resolve(make(profile, beta=2 / 3), {2, 3, 4}) is None
    assert resolve(make(profile, beta=0.67), {2, 3, 4}).selection is not None
    assert resolve(make(profile, beta=1 / 3), {1, 2, 3, 4}) is None


def test_equation_4_counts_become_shares_and_rows_without_evidence_stay_empty() -> None:
    q = conditional(M, 0.0)
    np.testing.assert_allclose(q[0], [0, 0.2, 0.3, 0.4, 0.1])
    np.testing.assert_allclose(q.sum(axis=-1), 1.0)
    smoothed = conditional(M, 1.0)
    np.testing.assert_allclose(smoothed[0], np.array([0, 3, 4, 5, 2]) / 14)
    empty = M.copy()
    empty[4] = empty[:, 4] = 0
    assert not conditional(empty, 1.0)[4].any()


def test_similarities_stand_in_for_counts_and_are_not_smoothed() -> None:
    path = profile_for(BUDDIES, WIDE)
    cosines = artifact_for(BUDDIES, WIDE).arrays["similarity"]
    handler = find_algorithm("miss", "buddy")(WIDE, profile=path, measure="similarity", alpha=1.0)
    for layer in range(WIDE.num_layers):
        np.testing.assert_array_equal(handler.is_buddy[layer], ~np.eye(8, dtype=bool))
        # The most similar expert first, and shares as (1 + cosine).
        shares = np.where(handler.is_buddy[layer], 1 + cosines[layer], 0)
        expected = shares / shares.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(handler.q[layer], expected, rtol=1e-5, atol=1e-7)


def test_equations_5_and_6_take_the_shortest_prefix_that_covers_alpha() -> None:
    q = conditional(M, 0.0)
    # By falling share: 3 (0.4), 2 (0.3), 1 (0.2), 4 (0.1).
    for alpha, expected in (
        (0.4, [3]),
        (0.41, [3, 2]),
        (0.7, [3, 2]),
        (0.9, [3, 2, 1]),
        (1.0, [3, 2, 1, 4]),
    ):
        row = buddy_lists(q, alpha, 4)[0]
        assert row[row != NO_BUDDY].tolist() == expected
    assert buddy_lists(q, 1.0, 2)[0].tolist() == [3, 2]
    # Ties go to the smaller index; an active expert has a buddy however small alpha is.
    assert buddy_lists(q, 1e-6, 4)[1].tolist() == [0, NO_BUDDY, NO_BUDDY, NO_BUDDY]
    assert (buddy_lists(conditional(M * 0, 1.0), 1.0, 4) == NO_BUDDY).all()


def test_equation_3_weighs_global_similarity_by_the_tokens_logits_and_the_hops(
    profile: str,
) -> None:
    # Expert 0 is absent; 3 and 4 are resident and not selected by the token: q is 0.4 and 0.1.
    assert resolve(make(profile), {1, 2, 3, 4}).selection.experts.tolist() == [[3, 1, 2]]
    # The logits of 3 and 4, scaled to 0..1, are 0 and 2.5 / 3: 0.1 (1 + 5 eta / 6) > 0.4 from 3.6.
    text = [3.0, 2.9, 2.8, 0.0, 2.5]
    for eta, expected in ((3.5, 3), (3.7, 4)):
        selection = resolve(make(profile, eta=eta), {1, 2, 3, 4}, text).selection
        assert selection.experts.tolist() == [[expected, 1, 2]]
    # Two devices hold 0, 1, 2 and 3, 4. Expert 4, absent, has equal shares for all: without a
    # penalty the smaller index goes first, with one the neighbour.
    text = [0.5, 0.4, 2.0, 0.3, 3.0]
    for topology, expected in (({}, 1), ({"kappa": 0.1, "partitions": 2}, 3)):
        selection = resolve(make(profile, **topology), {0, 1, 2, 3}, text).selection
        assert selection.experts.tolist() == [[expected, 2, 0]]


# --- gates, budget, fallback ------------------------------------------------------------------


def test_a_token_of_low_entropy_is_left_alone(profile: str) -> None:
    diffuse, peaked = [1.0, 1.0, 1.0, 0.0, 0.0], [9.0, 1.0, 0.9, 0.0, 0.0]
    fetched = resolve(make(profile, tau=0.5), {1, 2, 3}, diffuse, peaked)
    assert fetched.selection.experts.tolist() == [[3, 1, 2], [0, 1, 2]]
    # The sensitive token keeps its expert 0, which is fetched even where misses are dropped.
    dropped = resolve(make(profile, tau=0.5, fallback="drop"), {1, 2, 3}, diffuse, peaked)
    assert [fetch.key for fetch in fetched.fetch] == [fetch.key for fetch in dropped.fetch] == [0]
    assert dropped.selection.keep is None


def test_tau_as_a_percentile_is_calibrated_on_each_layers_tokens() -> None:
    path = profile_for(BUDDIES, WIDE)
    for temperature in (0.8, 1.2):
        handler = find_algorithm("miss", "buddy")(
            WIDE, profile=path, tau=20, temperature=temperature
        )
        sampled = artifact_for(BUDDIES, WIDE).arrays[TOP_LOGITS]
        for layer, logits in enumerate(sampled):
            slow = [oracles.activating_entropy(row.tolist(), temperature) for row in logits]
            assert handler.thresholds[layer] == pytest.approx(np.percentile(slow, 20), abs=1e-5)
        assert handler.thresholds[0] != handler.thresholds[1]


def test_what_finds_no_buddy_is_fetched_or_dropped(profile: str) -> None:
    resident, text = {1, 3}, [3.0, 2.0, 2.5, 0.0, 0.0]
    fetched = resolve(make(profile), resident, text)
    assert [fetch.key for fetch in fetched.fetch] == [2] and fetched.selection.keep is None
    dropped = resolve(make(profile, fallback="drop"), resident, text)
    assert list(dropped.fetch) == []
    assert dropped.selection.keep.tolist() == [[True, False, True]]


def test_a_substitute_weighs_what_the_missing_one_did_or_its_own_score(profile: str) -> None:
    assert resolve(make(profile), {1, 2, 3}).selection.weigh_as.tolist() == [[0, 1, 2]]
    assert resolve(make(profile, weight="own"), {1, 2, 3}).selection.weigh_as is None


def test_all_resident_none_resident_and_empty_lists_change_nothing(profile: str) -> None:
    handler = make(profile)
    assert resolve(handler, set()) is None
    event = make_event(GEOMETRY, 0, 0, [TEXT])
    assert handler.resolve(event, [], {0, 1, 2, 3, 4}) is None
    handler.affinities[0, 0] = -1
    assert resolve(handler, {1, 2, 3, 4}) is None


# --- plain loops ------------------------------------------------------------------------------

NUMBER = st.integers(-40, 40).map(lambda n: n / 8)
TEXTS = st.lists(st.lists(NUMBER, min_size=8, max_size=8), min_size=1, max_size=4)
RESIDENT = st.sets(st.integers(0, 7))


def wide(**parameters: Any) -> Any:
    return make(profile_for(BUDDIES, WIDE), WIDE, **parameters)


def answer(handler: Any, event: Event, resident: set[int]) -> Any:
    base = event.layer * 8
    resident = {base + e for e in resident}
    absent = [key for key in event.keys if key not in resident]
    resolution = handler.resolve(fresh(event), absent, resident)
    if resolution is None or resolution.selection is None:
        return event.experts
    fetches = {base + e for row in resolution.selection.experts.tolist() for e in row} - resident
    assert {fetch.key for fetch in resolution.fetch} == fetches
    return resolution.selection.experts


ALGORITHM_1 = {"H": None, "tau": 0.0, "gamma": 1.0, "temperature": 1.0, "alpha": 1.0, "rho": None}
ALGORITHM_1 |= {"kappa": 0.0, "eta": 0.0, "reuse": 0.0, "order": "heaviest"}
OTHERS = {
    "H": (1, 3, 6),
    "tau": (0.5, 0.8, 0.95),
    "gamma": (0.2, 0.5),
    "temperature": (0.8, 1.5),
    "alpha": (0.3, 0.8),
    "rho": (1, 2),
    "kappa": (0.3, 0.4),
    "eta": (2.0,),
    "reuse": (0.7,),
    "order": ("lightest",),
}


@settings(LIGHT, max_examples=200)
@given(
    texts=TEXTS,
    resident=RESIDENT,
    others=st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in OTHERS.items()}),
)
def test_algorithm_1_gates_scores_and_budget_agree_with_plain_loops(
    texts: list[list[float]], resident: set[int], others: dict[str, Any]
) -> None:
    given: dict[str, Any] = {**ALGORITHM_1, **others}
    kappa, temperature = given["kappa"], given["temperature"]
    partitions = {0.0: 1, 0.3: 2, 0.4: 4}[kappa]
    handler = wide(**given, partitions=partitions)
    # Layer 1, as the tests by hand use layer 0.
    event = make_event(WIDE, 0, 1, texts)
    artifact = artifact_for(BUDDIES, WIDE)
    q = conditional(artifact.arrays[PAIRS][1], 1.0).tolist()
    lists = [oracles.buddy_list(row, given["alpha"], 16)[: given["H"]] for row in q]

    def hop_factor(i: int, j: int) -> float:
        return 1 - kappa * abs(i * partitions // 8 - j * partitions // 8)

    bypass = not {k % 8 for k in event.keys} & resident
    answers = answer(handler, event, resident).tolist()
    for text, selected, changed in zip(texts, event.experts.tolist(), answers, strict=True):
        selected_logits = [text[e] for e in selected]
        shares = sorted(math.exp((z - max(selected_logits)) / temperature) for z in selected_logits)
        margin = (shares[-1] - shares[-2]) / sum(shares)
        entropy = oracles.activating_entropy(selected_logits, temperature)
        if abs(entropy - given["tau"]) < 1e-5 or abs(margin - given["gamma"]) < 1e-5:
            continue
        expected = selected
        if not bypass and entropy > given["tau"] and margin < given["gamma"]:
            options = {name: given[name] for name in ("eta", "reuse", "order")}
            options |= {"rho": given["rho"] or 3, "hop_factor": hop_factor}
            expected = oracles.buddy_token(text, selected, resident, lists, q, **options)
        assert changed == expected


def test_counting_agrees_with_going_through_the_tokens() -> None:
    rng = np.random.default_rng(2)
    counts = Coactivation(WIDE)
    logits = rng.normal(size=(40, 8)).astype(np.float32)
    weight = rng.random(40)
    event = make_event(WIDE, 0, 1, logits)
    counts.add(1, event.experts, logits, weight)
    active, pairs, weighted = np.zeros(8), np.zeros((8, 8)), np.zeros((8, 8))
    for token, selected in enumerate(event.experts.tolist()):
        mass = {e: math.exp(logits[token, e]) for e in selected}
        for i in selected:
            active[i] += weight[token]
            for j in selected:
                if i != j:
                    pairs[i, j] += weight[token]
                    share = min(mass[i], mass[j]) / sum(mass.values())
                    weighted[i, j] += weight[token] * share
    np.testing.assert_allclose(counts.activations[1], active)
    np.testing.assert_allclose(counts.pairs[1], pairs)
    np.testing.assert_allclose(counts.weighted_pairs[1], weighted, rtol=1e-6)
    assert not counts.pairs[0].any()


def test_what_routing_dropped_is_neither_replaced_nor_counted(profile: str) -> None:
    event = make_event(GEOMETRY, 0, 0, [[1.0, 1.0, 1.0, 0.0, 0.0]])
    event = event._replace(experts=np.array([[0, 1, DROPPED]]))
    event = event._replace(keys=[0, 1])
    resolution = make(profile, tau=0.99).resolve(event, [0], {1, 2, 4})
    # Expert 2 is free again, as routing dropped it; two equal shares are fully diffuse.
    assert resolution.selection.experts.tolist() == [[2, 1, DROPPED]]


# --- refusals ---------------------------------------------------------------------------------


def unlike(row: Any, column: Any, value: float) -> Any:
    counts = M[None].copy()
    counts[0, row, column] = value
    return counts


@pytest.mark.parametrize(
    ("pairs", "changes", "said"),
    [
        (
            unlike(4, slice(None), 0) * unlike(slice(None), 4, 0),
            {},
            r"1 of 5 experts were never activated .*expert 4 of layer 0.*no evidence",
        ),
        (M[None] * 0, {}, r"5 of 5 experts"),
        (-M[None], {}, "'pairs' holds no counts"),
        (unlike(1, 2, 7), {}, "'pairs' holds no counts"),
        (M[None], {"made_from": {"k_max": 4}}, r"`made_from` lacks .alpha., .smoothing."),
    ],
)
def test_a_profile_that_cannot_be_is_refused(
    tmp_path: Path, pairs: Any, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make(write(tmp_path, {PAIRS: pairs}, **changes))


def test_top_1_routers_are_refused() -> None:
    single = make_geometry(num_layers=1, num_experts=5, top_k=1)
    with pytest.raises(ValueError, match=r"top_k=1 has no experts chosen together"):
        find_algorithm("miss", "buddy")(single)
