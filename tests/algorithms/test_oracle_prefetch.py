"""A predictor of stated quality has that quality, draws by its seed, and is exact at its best."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.testing.streams import StreamFuture, make_geometry

GEOMETRY = make_geometry(num_layers=4, num_experts=32, top_k=4)
NUM_PASSES = 150


def make_passes() -> list[list[Event]]:
    rng = np.random.default_rng(0)
    return [
        [
            Event(p, layer, DECODE, 1, (32 * layer + rng.permutation(32)[:4]).tolist())
            for layer in range(4)
        ]
        for p in range(NUM_PASSES)
    ]


PASSES = make_passes()
EVENTS = [event for events in PASSES for event in events]


def foretold(seed: int = 0, **parameters: Any) -> list[list[int]]:
    """What is proposed at each event, in order."""
    oracle = find_algorithm("prefetch", "oracle")(GEOMETRY, seed=seed, **parameters)
    oracle.prepare(StreamFuture(GEOMETRY, PASSES))
    return [list(oracle.propose(event)) for event in EVENTS]


def test_by_default_it_names_exactly_what_the_next_event_needs() -> None:
    assert foretold()[:-1] == [event.keys for event in EVENTS[1:]]
    assert foretold()[-1] == []


@pytest.mark.parametrize(
    ("recall", "precision"), [(0.75, 1.0), (1.0, 0.5), (0.85, 0.85), (0.95, 0.6), (0.3, 0.2)]
)
def test_recall_and_precision_are_what_was_asked_for(recall: float, precision: float) -> None:
    told = foretold(recall=recall, precision=precision)[:-1]
    right = sum(len(set(t) & set(e.keys)) for t, e in zip(told, EVENTS[1:], strict=True))
    needed = sum(len(event.keys) for event in EVENTS[1:])
    # Four deviations of a binomial: a wrong formula is further off.
    tolerance = 4 * np.sqrt(recall * (1 - recall) / needed)
    assert abs(right / needed - recall) <= tolerance
    assert right / sum(map(len, told)) == pytest.approx(precision, abs=0.02)
    for proposed, event in zip(told, EVENTS[1:], strict=True):
        assert len(set(proposed)) == len(proposed)
        assert {key // 32 for key in proposed} <= {event.layer}


def test_asked_from_further_away_it_says_the_same() -> None:
    near = foretold(recall=0.7, precision=0.7)
    far = foretold(recall=0.7, precision=0.7, horizon=3)
    for place in range(len(EVENTS) - 3):
        assert far[place] == near[place] + near[place + 1] + near[place + 2]


def test_another_seed_overlooks_others_and_right_ones_keep_their_order() -> None:
    one, same, other = (foretold(seed=s, recall=0.7, precision=0.7) for s in (1, 1, 2))
    assert one == same != other
    for proposed, event in zip(one, EVENTS[1:], strict=False):
        right = [key for key in proposed if key in event.keys]
        assert right == [key for key in event.keys if key in proposed]


def test_wrong_ones_stand_at_every_place() -> None:
    """Were they always last, a link that is short of time would never carry them."""
    places = np.zeros(6)
    for proposed, event in zip(foretold(precision=0.67), EVENTS[1:], strict=False):
        for place, key in enumerate(proposed[:6]):
            places[place] += key not in event.keys
    assert places.min() > 0.5 * places.mean()


@pytest.mark.parametrize("name", ["recall", "precision"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.1])
def test_a_quality_outside_its_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"prefetch\.{name}={value}"):
        find_algorithm("prefetch", "oracle")(GEOMETRY, **{name: value})
