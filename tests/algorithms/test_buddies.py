"""BuddyMoE's profile: equation 4 by hand, counting, and profiles that cannot be."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.learned.buddies import (
    PAIRS,
    TOP_LOGITS,
    Coactivation,
    conditional,
)
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.records.artifact import BUDDIES, write_artifact
from lm_eval_moecache.testing.streams import artifact_for, make_event, make_geometry, profile_for
from tests.algorithms import oracles

GEOMETRY = make_geometry(num_layers=1, num_experts=5, top_k=3)
WIDE = make_geometry(num_layers=2, num_experts=8, top_k=3)
# M(0, .) is 4 with expert 3, 3 with 2, 2 with 1, 1 with 4; the other rows follow by symmetry.
M = np.array(
    [[0, 2, 3, 4, 1], [2, 0, 1, 1, 1], [3, 1, 0, 1, 1], [4, 1, 1, 0, 1], [1, 1, 1, 1, 0]],
    dtype=float,
)


def test_equation_4_counts_become_shares_and_rows_without_evidence_stay_empty() -> None:
    q = conditional(M, 0.0)
    np.testing.assert_allclose(q[0], [0, 0.2, 0.3, 0.4, 0.1])
    np.testing.assert_allclose(q.sum(axis=-1), 1.0)
    np.testing.assert_allclose(conditional(M, 1.0)[0], np.array([0, 3, 4, 5, 2]) / 14)
    assert not conditional(M * np.outer([1, 1, 1, 1, 0], [1, 1, 1, 1, 0]), 1.0)[4].any()


def test_similarities_stand_in_for_counts_and_are_not_smoothed() -> None:
    path, cosines = profile_for(BUDDIES, WIDE), artifact_for(BUDDIES, WIDE).arrays["similarity"]
    rule = find_algorithm("miss", "buddy")(WIDE, profile=path, measure="similarity", alpha=1.0)
    for layer in range(WIDE.num_layers):
        # The most similar expert first, and shares as (1 + cosine).
        shares = np.where(~np.eye(8, dtype=bool), 1 + cosines[layer], 0)
        expected = shares / shares.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(rule.q[layer], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [0.8, 1.2])
def test_tau_as_a_percentile_is_calibrated_on_each_layers_tokens(temperature: float) -> None:
    given = {"profile": profile_for(BUDDIES, WIDE), "tau": 20, "temperature": temperature}
    rule = find_algorithm("miss", "buddy")(WIDE, **given)
    for layer, logits in enumerate(artifact_for(BUDDIES, WIDE).arrays[TOP_LOGITS]):
        slow = [oracles.activating_entropy(row.tolist(), temperature) for row in logits]
        assert rule.thresholds[layer] == pytest.approx(np.percentile(slow, 20), abs=1e-5)
    assert rule.thresholds[0] != rule.thresholds[1]


def test_counting_agrees_with_going_through_the_tokens() -> None:
    rng = np.random.default_rng(2)
    counts = Coactivation(WIDE)
    logits = rng.normal(size=(40, 8)).astype(np.float32)
    experts = make_event(WIDE, 0, 1, logits).experts
    counts.add(1, experts, logits)
    active, pairs, weighted = np.zeros(8), np.zeros((8, 8)), np.zeros((8, 8))
    for token, selected in enumerate(experts.tolist()):
        mass = {e: math.exp(logits[token, e]) for e in selected}
        for i in selected:
            active[i] += 1
            for j in set(selected) - {i}:
                pairs[i, j] += 1
                weighted[i, j] += min(mass[i], mass[j]) / sum(mass.values())
    np.testing.assert_allclose(counts.activations[1], active)
    np.testing.assert_allclose(counts.pairs[1], pairs)
    np.testing.assert_allclose(counts.weighted_pairs[1], weighted, rtol=1e-6)
    assert not counts.pairs[0].any()


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
    artifact, path = artifact_for(BUDDIES, GEOMETRY), tmp_path / "m.safetensors"
    arrays = {**artifact.arrays, PAIRS: pairs}
    write_artifact(path, dataclasses.replace(artifact, **changes, arrays=arrays))
    with pytest.raises(ValueError, match=said):
        find_algorithm("miss", "buddy")(GEOMETRY, profile=str(path))
