"""Equations 1 and 5 to 10 and algorithms 1 and 2, worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.records.event import DECODE, Event
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.testing.streams import make_event, make_geometry

EIGHT = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0]
"""Logits whose ranking r is 0, 1, ..., 7."""
FOUR = [4.0, 2.0, 1.0, 0.0]
PROBABILITIES = [0.4, 0.3, 0.1, 0.08, 0.06, 0.03, 0.02, 0.01]


def make(name: str, num_experts: int, top_k: int, **parameters: Any) -> Any:
    geometry = make_geometry(num_layers=2, num_experts=num_experts, top_k=top_k)
    return find_algorithm("routing", name)(geometry, **parameters)


def select(routing: Any, *logits: list[float], cached: set[int], layer: int = 0) -> Any:
    """Return the experts of each token (or of the only one), or None where nothing changed."""
    event = make_event(routing.geometry, 0, layer, logits)
    resident = {routing.geometry.key(layer, expert) for expert in cached}
    selection: Selection | None = routing.select(event, resident)
    if selection is None:
        return None
    experts = selection.experts.tolist()
    return experts[0] if len(logits) == 1 else experts


@pytest.mark.parametrize(
    ("M", "J", "expected"),
    [
        (5, 1, [0, 2, 4]),  # r[:5] & C = (2, 4): 2 4 0 1 3 ...; then the top 1: 0 2 4 ...
        (4, 1, None),  # r[:4] & C = (2): 2 0 1 3 ...; the best three are the router's own
        (7, 0, [2, 4, 6]),  # without a top J, the best expert is lost
        (7, 2, None),  # with the top 2 in front, 0 1 2 are the router's own again
    ],
)
def test_max_rank_promotes_cached_experts_of_rank_up_to_m(M: int, J: int, expected: Any) -> None:
    assert select(make("max_rank", 8, 3, M=M, J=J), EIGHT, cached={2, 4, 6}) == expected


def test_max_rank_defaults_to_twice_the_top_k() -> None:
    assert make("max_rank", 8, 3)._first == 6
    assert make("max_rank", 4, 3)._first == 4


@pytest.mark.parametrize(
    ("p", "J", "expected"),
    [
        (0.69, 1, None),  # 0.4 + 0.3 reach it: M = 2, none of those is cached
        (0.75, 1, [0, 2]),  # M = 3
        (0.75, 0, [0, 2]),
        (0.85, 1, [0, 2]),  # M = 4: 2 3 0 1 ..., then the top 1: 0 2
        (0.85, 0, [2, 3]),
        (1.0, 0, [2, 3]),
    ],
)
def test_cumsum_finds_m_by_the_cumulative_probability(p: float, J: int, expected: Any) -> None:
    logits = [math.log(probability) for probability in PROBABILITIES]
    assert select(make("cumsum", 8, 2, p=p, J=J), logits, cached={2, 3, 7}) == expected


def test_cumsum_adapts_m_to_each_token_of_a_prefill() -> None:
    sure, unsure = [9.0, 1.0, 0.5, 0.0], [0.3, 0.2, 0.1, 0.0]
    routing = make("cumsum", 4, 2, p=0.8, J=1)
    assert select(routing, sure, unsure, cached={3}) == [[0, 1], [0, 3]]


@pytest.mark.parametrize(
    ("lambda_", "cached", "expected"),
    [
        (0.5, {2}, [0, 2]),  # 1 + 0.5 * 4 = 3 > 2
        (0.2, {2}, None),  # 1.8 < 2
        (0.25, {2}, None),  # 2 = 2: the better rank stays
        (0.5, {3}, None),  # 2 = 2
        (0.6, {3}, [0, 3]),  # 2.4 > 2
        (1.0, {2, 3}, [0, 2]),  # 8, 2, 5, 4
    ],
)
def test_cache_prior_adds_lambda_times_the_range_to_cached_logits(
    lambda_: float, cached: set[int], expected: Any
) -> None:
    assert select(make("cache_prior", 4, 2, lambda_=lambda_), FOUR, cached=cached) == expected


def test_cache_prior_boosts_the_top_j_as_if_they_were_cached() -> None:
    logits = [4.0, 3.0, 2.0, 0.0]
    # J = 0: 4, 7, 6, 0. J = 1: 8, 7, 6, 0, which is the router's own choice.
    assert select(make("cache_prior", 4, 2, lambda_=1.0, top_j=0), logits, cached={1, 2}) == [1, 2]
    assert select(make("cache_prior", 4, 2, lambda_=1.0, top_j=1), logits, cached={1, 2}) is None


def test_cache_prior_averages_the_range_over_tokens_and_for_each_layer() -> None:
    routing = make("cache_prior", 4, 2)
    wide = [8.0, 5.0, 1.5, 0.0]
    select(routing, FOUR, cached=set())
    # Ranges 4 and 8: 0.5 * 6 = 3 brings the cached 1.5 to 4.5 < 5.
    assert select(routing, wide, cached={2}) is None
    # Layer 1 has no history yet: there this token's range counts alone, 1.5 + 4 > 5.
    assert select(routing, wide, cached={2}, layer=1) == [0, 2]
    together = make("cache_prior", 4, 2)
    # One prefill of ranges 4 and 8: both tokens are boosted by 3.
    assert select(together, FOUR, wide, cached={2}) == [[0, 2], [0, 1]]


def test_a_calibrated_range_replaces_the_running_average() -> None:
    assert select(make("cache_prior", 4, 2, logit_range=1.9), FOUR, cached={2}) is None
    assert select(make("cache_prior", 4, 2, logit_range=2.1), FOUR, cached={2}) == [0, 2]
    by_layer = make("cache_prior", 4, 2, logit_range=[1.0, 9.0])
    assert select(by_layer, FOUR, cached={2}, layer=0) is None
    assert select(by_layer, FOUR, cached={2}, layer=1) == [0, 2]


def test_specmd_equation_1_is_cache_prior_without_top_j() -> None:
    logits = [4.0, 3.0, 2.0, 0.0]
    # z' = z + 0.5 * 4 * 1_C with C = {2, 3}: 4, 3, 4, 2.
    assert select(make("cache_prior", 4, 2, top_j=0), logits, cached={2, 3}) == [0, 2]
    # Read literally, the paper averages the logits: 0.5 * 2.25 brings 2 to 3.125 > 3.
    mean = make("cache_prior", 4, 2, top_j=0, delta="mean")
    assert select(mean, logits, cached={2}) == [0, 2]
    assert select(make("cache_prior", 4, 2, top_j=0, delta="mean"), FOUR, cached={2}) is None


def test_a_router_that_selects_by_more_than_its_logits_is_taken_at_its_word() -> None:
    """DeepSeek-V3 adds a bias before its top-k: here that selects 3 and 0."""
    routing = make("cache_prior", 4, 2, lambda_=0.01)
    event = make_event(routing.geometry, 0, 0, [FOUR])
    event = event._replace(experts=np.array([[3, 0]]))
    assert routing.select(event, {1, 2}) is None
    strong = make("cache_prior", 4, 2, lambda_=1.0, top_j=1)
    selection = strong.select(event, {1})
    # Its ranking is 3 0 1 2 with the sorted logits 4 2 1 0: boosted to 8 2 5 0.
    assert selection.experts.tolist() == [[3, 1]]


def test_the_range_bias_goes_by_each_tokens_own_range() -> None:
    routing = make("cache_prior", 4, 2, delta="token", lambda_=0.5, top_j=0)
    narrow = [0.4, 0.3, 0.19, 0.0]
    # Range 4: 1 + 2 = 3 > 2. Range 0.4: 0.19 + 0.2 = 0.39 > 0.3, and 0.2 < 0.3.
    assert select(routing, FOUR, cached={2}) == [0, 2]
    assert select(routing, narrow, cached={2}) == [0, 2]
    assert select(routing, FOUR, narrow, cached={2}) == [[0, 2], [0, 2]]
    assert select(routing, narrow, cached={3}) is None
    # The average range, 2.2, would raise the narrow token's last logit to 1.1.
    average = make("cache_prior", 4, 2, lambda_=0.5, top_j=0)
    assert select(average, FOUR, narrow, cached={3}) == [[0, 1], [0, 3]]


def weighed(routing: Any, *weights: list[float]) -> Any:
    """Return the keep mask of a routing for tokens with these weights."""
    row = np.array(weights, dtype=np.float32)
    experts = np.tile(np.arange(row.shape[1]), (len(row), 1))
    event = Event(0, 0, DECODE, len(row), list(range(row.shape[1])), experts, row)
    selection = routing.select(event, set())
    return None if selection is None else selection.keep.tolist()


def test_skip_ratio_keeps_k_min_and_what_is_heavy_enough_next_to_the_first() -> None:
    routing = make("skip_ratio", 8, 4, k_min=2, t=0.5)
    # Half of 0.5 is 0.25: no other weight exceeds it; the second is kept as one of k_min = 2.
    assert weighed(routing, [0.5, 0.25, 0.25, 0.0]) == [[True, True, False, False]]
    assert weighed(routing, [0.5, 0.1, 0.09, 0.05]) == [[True, True, False, False]]
    assert weighed(routing, [0.3, 0.3, 0.2, 0.2]) is None
    # t = 1 keeps k_min experts, whatever their weights; a router need not order by weight.
    strict = make("skip_ratio", 8, 4, k_min=1)
    assert weighed(strict, [0.2, 0.3, 0.3, 0.2]) == [[False, True, False, False]]


def test_skip_mass_keeps_the_expert_that_crosses_p_and_none_after_it() -> None:
    routing = make("skip_mass", 8, 4, p=0.7)
    # The weights sum to 0.8, of which p = 0.7 is 0.56: 0.4 is not enough, 0.6 is.
    assert weighed(routing, [0.4, 0.2, 0.1, 0.1]) == [[True, True, False, False]]
    assert weighed(routing, [0.1, 0.1, 0.4, 0.2]) == [[False, False, True, True]]
    assert weighed(routing, [0.75, 0.1, 0.1, 0.05], [0.25] * 4) == [
        [True, False, False, False],
        [True, True, True, False],
    ]
    assert weighed(make("skip_mass", 8, 4, p=0.99), [0.25] * 4) is None
    assert not make("skip_mass", 8, 4).renormalize


def test_pruning_keeps_the_h_heaviest() -> None:
    routing = make("pruning", 8, 4, h=3, renormalize=True)
    selection = routing.select(make_event(routing.geometry, 0, 0, [EIGHT]), {0, 1})
    assert selection.experts.tolist() == [[0, 1, 2, 3]]
    assert selection.keep.tolist() == [[True, True, True, False]]
    assert selection.renormalize
    assert make("pruning", 8, 4)._left == 3


def test_drop_rank_leaves_out_one_rank_or_all_from_it_on() -> None:
    for scope, expected in (("from", [True] + [False] * 3), ("only", [True, False, True, True])):
        routing = make("drop_rank", 8, 4, rank=2, scope=scope)
        selection = routing.select(make_event(routing.geometry, 0, 0, [EIGHT]), set())
        assert selection.keep.tolist() == [expected]


def test_swap_rank_replaces_one_rank_by_an_expert_the_token_did_not_select() -> None:
    routing = make("swap_rank", 8, 3, rank=2, seed=1)
    for pass_index in range(20):
        event = make_event(routing.geometry, pass_index, 0, [EIGHT, EIGHT[::-1]])
        (a, b, c), (d, e, f) = routing.select(event, set()).experts.tolist()
        assert (a, c, d, f) == (0, 2, 7, 5)
        assert b not in (0, 1, 2) and e not in (7, 6, 5)


def test_pre_gated_routes_by_what_the_layer_before_predicted() -> None:
    routing = make("pre_gated", 4, 2)
    predicted = {1: [[0.0, 1.0, 2.0, 3.0]]}
    first = make_event(routing.geometry, 0, 0, [FOUR], predicted=predicted)
    second = make_event(routing.geometry, 0, 1, [FOUR])
    for _ in range(2):
        routing.on_pass(0)
        assert routing.select(first, set()) is None
        # The heavier expert by the layer's own logits comes first.
        assert routing.select(second, set()).experts.tolist() == [[2, 3]]
    routing.on_pass(1)
    assert routing.select(second, set()) is None, "nothing of an earlier pass is left"
