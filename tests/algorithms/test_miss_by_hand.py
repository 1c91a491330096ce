"""Drops and substitutions worked by hand, alone and on top of a routing that dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import (
    make_event,
    make_geometry,
    make_hardware,
    policy_of,
    weigh,
)

GEOMETRY = make_geometry(num_layers=1, num_experts=6, top_k=3)
LOGITS = [3.0, 2.0, 1.0, 0.9, 0.2, 0.0]


def make(name: str, **parameters: Any) -> Any:
    return find_algorithm("miss", name)(GEOMETRY, **parameters)


def resolved(
    name: str, absent: list[int], resident: set[int], *more: list[float], **parameters: Any
) -> tuple[list[int], list[list[int]]] | None:
    """Return the keys that are loaded and each token's experts, of LOGITS and `more` tokens."""
    event = make_event(GEOMETRY, 0, 0, [LOGITS, *more])
    resolution = make(name, **parameters).resolve(event, absent, resident)
    if resolution is None:
        return None
    experts, keep = resolution.selection.experts, resolution.selection.keep
    rows = zip(experts, np.ones_like(experts, bool) if keep is None else keep, strict=True)
    return [fetch.key for fetch in resolution.fetch], [row[kept].tolist() for row, kept in rows]


PRUNED = {"routing": "pruning", "routing.h": 2, "miss": "drop", "miss.h": 1}


def make_engine(given: dict[str, Any]) -> VirtualEngine:
    policy, capacity = policy_of(given), parse_capacity(5, GEOMETRY)
    return VirtualEngine(
        GEOMETRY, Setting(policy=policy, capacity=capacity, hardware=make_hardware())
    )


def serve(engine: VirtualEngine, event: Event) -> tuple[PassRecord, Selection | None]:
    record = engine.begin_pass(DECODE, event.num_tokens)
    engine.enter(event.layer, event.num_tokens)
    selection = engine.run(event).selection
    engine.end_pass()
    engine.check_integrity()
    return record, selection


def test_substitute_score_takes_the_closest_near_expert_within_the_tolerance() -> None:
    # Expert 2 (absent) is closest to 3; 1 is selected already; 4 and 5 are resident as well.
    assert resolved("substitute_score", [2], {0, 1, 3, 4, 5}) == ([], [[0, 1, 3]])
    # Scores are about 0.56 and 0.21 for 0 and 1: nothing else comes within 0.1 of expert 0.
    assert resolved("substitute_score", [0], {1, 2, 3, 4, 5}) is None


def test_what_finds_no_substitute_is_fetched_or_dropped() -> None:
    # The heaviest goes first: 0 has nothing within 0.1, 1 is 0.14 from 3, 2 is 0.007 from it.
    assert resolved("substitute_score", [0, 1, 2], {3}) == ([0, 1], [[0, 1, 3]])
    assert resolved("substitute_score", [0, 1, 2], {3}, fallback="drop") == ([], [[3]])


@pytest.mark.parametrize("name", ["substitute_score", "substitute_random", "substitute_cached"])
def test_a_substitute_weighs_its_own_score_or_the_missing_ones(name: str) -> None:
    event = make_event(GEOMETRY, 0, 0, [LOGITS])
    scores = softmax(np.array([LOGITS], dtype=np.float32))[0]
    for weight, source in (("own", 3), ("missing", 2)):
        resolution = make(name, weight=weight).resolve(event, [2], {0, 1, 3})
        output = weigh(event, resolution.selection)
        assert output[0, 3] == pytest.approx(scores[source])
        assert output[0, 2] == 0


def test_a_drop_after_pruning_keeps_what_both_keep() -> None:
    engine = make_engine(PRUNED)
    record, selection = serve(engine, make_event(GEOMETRY, 0, 0, [LOGITS]))
    assert selection is not None and selection.keep is not None
    assert selection.experts.tolist() == [[0, 1, 2]]
    assert selection.keep.tolist() == [[True, False, False]]
    assert (record.requests, record.misses, record.dropped) == (2, 2, 2)
    assert (record.unfaithful, record.substituted, record.executed) == (0, 0, 1)
    assert engine.pools[0].resident.keys() == {0}


def test_renormalising_shares_the_lost_weight_and_is_off_by_default() -> None:
    scores = softmax(np.array([LOGITS], dtype=np.float32))[0]
    for renormalize in (False, True):
        engine = make_engine({**PRUNED, "routing.renormalize": renormalize})
        event = make_event(GEOMETRY, 0, 0, [LOGITS])
        output = weigh(make_event(GEOMETRY, 0, 0, [LOGITS]), serve(engine, event)[1])
        expected = scores[:3].sum() if renormalize else scores[0]
        assert output.sum() == pytest.approx(expected)


def test_substitutes_are_counted_and_what_they_weigh_reaches_the_eviction() -> None:
    engine = make_engine({"miss": "substitute_score", "eviction": "score"})
    serve(engine, make_event(GEOMETRY, 0, 0, [LOGITS]))
    event = make_event(GEOMETRY, 1, 0, [[3.0, 2.0, 0.9, 1.0, 0.2, 0.0]])
    record = engine.begin_pass(DECODE, 1)
    engine.enter(0, 1)
    plan = engine.run(event)
    engine.end_pass()
    selection = plan.selection
    # Expert 3 is absent; 2 is 0.007 away and resident.
    assert selection is not None
    assert selection.experts.tolist() == [[0, 1, 2]]
    assert (record.misses, record.substituted, record.unfaithful) == (1, 1, 1)
    assert record.bytes_moved == 0
    np.testing.assert_allclose(plan.event.weights, softmax(event.logits)[:, :3])


# Shares of a token's weight with LOGITS: 0.665, 0.245, 0.090; an even share is 1/3.


def test_drop_cold_leaves_out_what_has_less_than_its_even_share() -> None:
    assert resolved("drop_cold", [0, 1, 2], set()) == ([0], [[0]])
    assert resolved("drop_cold", [0], {1, 2}) is None
    # Half of an even share is 1/6: only expert 2 is below.
    assert resolved("drop_cold", [1, 2], {0}, factor=0.5) == ([1], [[0, 1]])


def test_degrade_zero_keeps_one_expert_and_leaves_prompts_alone() -> None:
    assert resolved("degrade_zero", [0, 2], {1}, tau=0.1) == ([0], [[0, 1]])
    assert resolved("degrade_zero", [0, 1, 2], set(), tau=1.0) == ([0], [[0]])
    prompt = make_event(GEOMETRY, 0, 0, [LOGITS], phase="prefill")
    assert make("degrade_zero", tau=1.0).resolve(prompt, [0, 1, 2], set()) is None


@pytest.mark.parametrize("name", ["drop_cold", "degrade_zero"])
def test_the_kept_share_the_dropped_weight_as_in_the_sources(name: str) -> None:
    event = make_event(GEOMETRY, 0, 0, [LOGITS])
    assert make(name).resolve(event, [2], {0, 1}).selection.renormalize


def test_expert_budget_keeps_hits_and_the_heaviest_misses_of_all_tokens() -> None:
    # Needed: 0 1 2 of the first token, 2 3 4 of the second; 1 is resident. Summed shares of the
    # others: 0 has 0.665, 2 has 0.090 + 0.665, 3 has 0.245, 4 has 0.090.
    case = "expert_budget", [0, 2, 3, 4], {1}, [0.0, 0.0, 3.0, 2.0, 1.0, 0.0]
    assert resolved(*case, budget=3) == ([0, 2], [[0, 1, 2], [2]])
    assert resolved(*case, budget=5) is None


def test_expert_budget_may_rescue_a_tokens_heaviest_expert() -> None:
    """The case of colibri#560: two tokens with different experts, and a budget of one."""
    # Shares of the first token are 0.665, 0.245, 0.090, of the second 0.506, 0.307, 0.186.
    case = "expert_budget", [0, 1, 2, 3, 4, 5], set[int](), [0.0, 0.0, 0.0, 3.0, 2.5, 2.0]
    assert resolved(*case, budget=1) == ([0], [[0], []])
    assert resolved(*case, budget=1, rescue=True) == ([0, 3], [[0], [3]])


def test_substitute_cached_takes_the_resident_with_the_highest_gate_for_a_light_expert() -> None:
    # Expert 0 is heavy and loaded; of 3, 4 and 5 expert 3 has the highest gate score.
    assert resolved("substitute_cached", [0, 2], {1, 3, 4, 5}, tau=0.1) == ([0], [[0, 1, 3]])
