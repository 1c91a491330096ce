"""The running percentile of score-based prefetch, against sorting every score seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.prefetch import score
from lm_eval_moecache.algorithms.prefetch.score import Score
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.geometry import Geometry

GEOMETRY = Geometry(
    model="generated",
    num_layers=2,
    num_experts=16,
    top_k=2,
    expert_bytes=((1,),) * 2,
    dense_bytes=(0,) * 2,
)


def event(logits: FloatArray) -> Event:
    return Event(0, 0, DECODE, len(logits), [0, 1], predicted={1: logits})


def proposed(algorithm: Score, logits: FloatArray) -> set[int]:
    return {key - 16 for key in algorithm.propose(event(logits))}


@pytest.mark.parametrize("percentile", [0.0, 33.0, 80.0, 99.5, 100.0])
@pytest.mark.parametrize("spread", [0.1, 2.0, 40.0])
def test_the_bar_is_the_bin_of_the_percentile_of_all_scores(
    percentile: float, spread: float
) -> None:
    rng = np.random.default_rng(7)
    algorithm = Score(GEOMETRY, percentile=percentile)
    seen: list[float] = []
    for step in range(200):
        # The spread changes on the way, so that the percentile moves far, up and down.
        scale = spread if step // 50 % 2 else 0.5
        logits = rng.normal(0, scale, (1 + 3 * (step % 5 == 0), 16)).astype(np.float32)
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        seen = sorted([*seen, *np.minimum(np.floor(scores * 4096), 4095).ravel().tolist()])
        rank = int(np.ceil(percentile / 100 * len(seen)))
        bar = 0 if rank == 0 else seen[rank - 1] / 4096
        assert proposed(algorithm, logits) == set(np.flatnonzero((scores > bar).any(0)).tolist())


def test_where_most_scores_are_below_a_bin_all_experts_are_proposed() -> None:
    logits = np.arange(16, 0, -1, dtype=np.float32)[None] * 3
    assert proposed(Score(GEOMETRY), logits) == set(range(16))
    assert len(proposed(Score(GEOMETRY, scope="token"), logits)) == 3


@pytest.mark.parametrize("percentile", [0.0, 33.0, 80.0, 99.5, 100.0])
@pytest.mark.parametrize("taker", [None, score.take_rows])
def test_many_steps_at_once_move_the_bar_as_single_ones_do(
    percentile: float, taker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "_compiled", lambda count: taker)
    rng = np.random.default_rng(8)
    at_once, alone = Score(GEOMETRY, percentile=percentile), Score(GEOMETRY, percentile=percentile)
    for size in (1, 2, 30, 7, 60, 5):
        # A chunk of another spread moves the percentile beyond the bins that are looked at first.
        logits = rng.normal(0, rng.choice([0.1, 1, 40]), (size, 16)).astype(np.float32)
        told = at_once.propose_arrays([1] * size, logits)
        assert told is not None
        keys, counts = told
        rows = np.split(keys, counts.cumsum()[:-1])
        one_by_one = [alone.propose(event(row[None])) for row in logits]
        assert [row.tolist() for row in rows] == one_by_one
