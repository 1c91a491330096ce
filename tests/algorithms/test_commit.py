"""CommitMoE's execution without fallback: equations 5 and 6 by hand, and against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.records.event import DECODE, PREFILL, VERIFY
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.testing.streams import make_event, make_geometry, policy_of, run
from tests.algorithms import oracles

GEOMETRY = make_geometry(num_layers=2, num_experts=6, top_k=4)
LIGHT = settings(max_examples=60, derandomize=True)
LOGITS = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=6, max_size=6, unique=True)


def commit(**parameters: Any) -> Any:
    return find_algorithm("routing", "commit")(GEOMETRY, **parameters)


def chosen(routing: Any, predicted: Any, logits: Any, phase: str = DECODE) -> Selection | None:
    """Predict layer 1 at layer 0, then route layer 1."""
    tokens = np.atleast_2d(np.asarray(logits, dtype=np.float32))
    guess = np.atleast_2d(np.asarray(predicted, dtype=np.float32))
    first = make_event(GEOMETRY, 3, 0, np.zeros_like(tokens), phase, {1: guess})
    routing.select(first, ())
    selection: Selection | None = routing.select(make_event(GEOMETRY, 3, 1, tokens, phase), ())
    return selection


def logits_of(shares: list[float]) -> list[float]:
    return np.log(shares).tolist()


# The router's shares: its top-4 are experts 0, 1, 2 and 3.
TRUE = [0.4, 0.2, 0.15, 0.1, 0.09, 0.06]
# The predictor's shares: its top-4 are 0, 1, 4 and 5, of which two are right.
GUESS = [0.3, 0.25, 0.02, 0.03, 0.22, 0.18]


def test_owa_by_hand() -> None:
    """Eq. 5 scales the right ones (0.6) by 1 + 0.25 / 0.6 for the missed 0.25; eq. 6 rescales."""
    selection = chosen(
        commit(weights="owa", alpha1=1.2, alpha2=1.1), *map(logits_of, (GUESS, TRUE))
    )
    assert selection is not None and selection.experts.tolist() == [[0, 1, 4, 5]]
    right = [0.4 * (1 + 0.25 / 0.6) * 1.2, 0.2 * (1 + 0.25 / 0.6) * 1.2]
    adjusted = [*right, 0.22, 0.18]
    expected = [w * 0.85 / sum(adjusted) * 1.1 for w in adjusted]
    np.testing.assert_allclose(selection.weights, [expected], rtol=1e-5)
    assert sum(expected) == pytest.approx(0.85 * 1.1)


@pytest.mark.parametrize("scores", ["predicted", "router"])
@pytest.mark.parametrize("weights", ["plain", "owa"])
@LIGHT
@given(guess=LOGITS, true=LOGITS)
def test_the_heaviest_expert_comes_first(
    scores: str, weights: str, guess: list[float], true: list[float]
) -> None:
    """Miss algorithms read a column as a rank."""
    selection = chosen(commit(scores=scores, weights=weights), guess, true)
    assert selection is not None
    given = selection.weights
    if given is None:
        given = np.exp(np.asarray([true]))[:, selection.experts[0]]
    assert (np.diff(given) <= 1e-6).all()
    assert len(set(selection.experts[0].tolist())) == GEOMETRY.top_k


def test_without_owa_the_predictors_scores_weigh_or_the_routers() -> None:
    plain = chosen(commit(), *map(logits_of, (GUESS, TRUE)))
    assert plain is not None
    np.testing.assert_allclose(plain.weights, [[0.3, 0.25, 0.22, 0.18]], rtol=1e-5)
    by_router = chosen(commit(scores="router"), *map(logits_of, (GUESS, TRUE)))
    assert by_router is not None and by_router.weights is None, (
        "the family's rule on the router's logits"
    )
    adjusted = chosen(commit(scores="router", weights="owa"), *map(logits_of, (GUESS, TRUE)))
    assert adjusted is not None and adjusted.weights is not None
    # The right ones sum to 0.85, the wrong ones are 0.09 and 0.06; all are scaled to 0.85.
    np.testing.assert_allclose(adjusted.weights[0, 2:], [0.09 * 0.85, 0.06 * 0.85], rtol=1e-5)


@pytest.mark.parametrize(("right", "triggered"), [(0, False), (1, False), (2, True), (3, True)])
def test_owa_acts_on_predictions_that_are_right_in_part(right: int, triggered: bool) -> None:
    """Section 5.2, Qwen1.5-MoE: top-4, triggered by 2 or 3 right ones."""
    shares = np.array([8, 7, 6, 5, 1, 1, 1, 1]) / 30
    geometry = make_geometry(num_layers=2, num_experts=8, top_k=4)
    routing = find_algorithm("routing", "commit")(geometry, weights="owa", alpha1=1.3)
    guess = np.roll(shares, 4 - right).astype(np.float32)
    logits = np.log(shares)[None].astype(np.float32)
    routing.select(make_event(geometry, 0, 0, logits, DECODE, {1: np.log(guess)[None]}), ())
    selection = routing.select(make_event(geometry, 0, 1, logits), ())
    plain = np.take_along_axis(softmax(np.log(guess)[None]), selection.experts, -1)
    assert np.allclose(selection.weights, plain, rtol=1e-4) != triggered


def test_the_papers_values_are_compositions() -> None:
    expected = {
        "commitmoe": (4, 1.3, 1.0, 2, 3),
        "commitmoe_deepseek": (6, 1.15, 1.0, 4, 5),
        "commitmoe_mixtral": (2, 1.2, 1.06, 1, 1),
    }
    for name, (top_k, *values) in expected.items():
        parameters = load_policy(name).routing.parameters
        names = ("alpha1", "alpha2", "trigger_min", "trigger_max")
        assert [parameters[n] for n in names] == values
        geometry = make_geometry(num_experts=16, top_k=top_k)
        neutral = find_algorithm("routing", "commit")(geometry, weights="owa")
        assert [*neutral.triggers] == values[2:], "the default range"


@LIGHT
@given(
    LOGITS,
    LOGITS,
    st.sampled_from([1.0, 1.15, 1.3]),
    st.sampled_from([1.0, 1.06]),
    st.integers(1, 3),
    st.sampled_from(["predicted", "router"]),
)
def test_owa_agrees_with_equations_5_and_6(
    predicted: list[float],
    logits: list[float],
    alpha1: float,
    alpha2: float,
    least: int,
    scores: str,
) -> None:
    parameters = {"alpha1": alpha1, "alpha2": alpha2, "trigger_min": least, "trigger_max": 3}
    routing = commit(weights="owa", scores=scores, **parameters)
    selection = chosen(routing, predicted, logits)
    assert selection is not None and selection.weights is not None
    expected = oracles.output_weights(
        logits, predicted, 4, alpha1, alpha2, range(least, 4), scores == "router"
    )
    assert set(selection.experts[0].tolist()) == set(expected)
    for expert, weight in zip(selection.experts[0].tolist(), selection.weights[0], strict=True):
        assert weight == pytest.approx(expected[expert], rel=1e-4), expert


def test_the_first_layer_of_the_first_generated_token_is_the_routers() -> None:
    routing = commit()
    ahead = np.zeros((1, 6), np.float32)

    def ask(pass_index: int, layer: int, phase: str, wraps: bool = True) -> bool:
        predicted = {1: ahead} if layer == 0 else ({0: ahead} if wraps else {})
        event = make_event(GEOMETRY, pass_index, layer, [range(6)], phase, predicted)
        return routing.select(event, ()) is not None

    # A prefill's last layer predicts nothing, a decode step's does.
    assert [ask(0, 0, PREFILL), ask(0, 1, PREFILL, wraps=False)] == [False, True]
    assert [ask(1, 0, DECODE), ask(1, 1, DECODE)] == [False, True]
    assert [ask(2, 0, DECODE), ask(2, 1, DECODE)] == [True, True]
    assert not ask(3, 0, PREFILL), "another request begins: what was predicted was for the old one"
    assert not ask(5, 0, DECODE), "a prefill passed by in between"
    assert ask(6, 1, DECODE) is False, "nothing was predicted in this pass"


@pytest.mark.parametrize(("rows", "phase"), [(2, DECODE), (1, VERIFY)])
def test_a_batch_whose_row_has_ended_and_a_verification_are_routed_as_usual(
    rows: int, phase: str
) -> None:
    routing, ahead = commit(), {0: np.zeros((rows, 6), np.float32)}
    routing.select(make_event(GEOMETRY, 0, 1, [range(6)] * rows, DECODE, ahead), ())
    assert routing.select(make_event(GEOMETRY, 1, 0, [range(6)], phase), ()) is None


def test_only_wholly_mispredicted_tokens_are_replaced_for_table_1() -> None:
    geometry = make_geometry(num_layers=2, num_experts=6, top_k=2)
    routing = find_algorithm("routing", "commit")(geometry, tokens="mispredicted")
    logits = np.array([[5, 4, 0, 0, 0, 0], [5, 4, 0, 0, 0, 0]], np.float32)
    guess = np.array([[0, 0, 5, 4, 0, 0], [0, 5, 4, 0, 0, 0]], np.float32)
    routing.select(make_event(geometry, 0, 0, logits, DECODE, {1: guess}), ())
    selection = routing.select(make_event(geometry, 0, 1, logits), ())
    assert selection.experts.tolist() == [[2, 3], [0, 1]]
    assert np.isnan(selection.weights[1]).all() and not np.isnan(selection.weights[0]).any()


def test_tokens_of_which_few_were_right_are_replaced_where_asked() -> None:
    few = chosen(commit(tokens="mispredicted", most_right=2), *map(logits_of, (GUESS, TRUE)))
    assert few is not None and set(few.experts[0].tolist()) == {0, 1, 4, 5}
    fewer = chosen(commit(tokens="mispredicted", most_right=1), *map(logits_of, (GUESS, TRUE)))
    assert fewer is not None and fewer.experts.tolist() == [[0, 1, 2, 3]]


def test_it_executes_exactly_what_was_prefetched() -> None:
    served = run(policy_of({}, "commitmoe_no_owa"), make_geometry(), "100%")
    for record in served.engine.ledger.passes:
        if record.phase == DECODE and record.predicted:
            assert record.predicted_right == record.predicted
    decoded = [r for r in served.engine.ledger.passes if r.phase == DECODE]
    assert sum(record.predicted for record in decoded) > 20
    assert sum(record.unfaithful for record in decoded) > 0


def test_a_lossy_miss_keeps_the_weights_of_what_it_leaves() -> None:
    first = Selection(np.array([[0, 1, 2]]), weights=np.array([[0.5, 0.3, 0.2]], np.float32))
    swapped = Selection(np.array([[0, 4, 2]])).after(first)
    np.testing.assert_allclose(swapped.weights, [[0.5, np.nan, 0.2]])
    inherited = Selection(np.array([[0, 4, 2]]), weigh_as=np.array([[0, 1, 2]])).after(first)
    np.testing.assert_allclose(inherited.weights, [[0.5, 0.3, 0.2]])
    joined = Selection.join(np.array([[0, 1, 2], [3, 4, 5]]), [(1, first), (1, None)])
    assert joined is not None and joined.weights is not None
    np.testing.assert_allclose(joined.weights, [[0.5, 0.3, 0.2], [np.nan] * 3])
