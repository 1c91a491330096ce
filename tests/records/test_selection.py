"""A changed choice: parts joined, and one change after another, by hand."""

from __future__ import annotations

import numpy as np

from lm_eval_moecache.records.selection import Selection

OWN = np.array([[0, 1], [2, 3], [4, 5]])


def test_parts_keep_what_they_drop_weigh_and_replace() -> None:
    """Three texts of a token each: one replaces, one is left alone, one drops and weighs."""
    replaced = Selection(np.array([[0, 7]]), weigh_as=OWN[:1])
    dropped = Selection(
        OWN[2:], keep=np.array([[True, False]]), renormalize=True, weights=np.float32([[0.5, 0.25]])
    )
    joined = Selection.join(OWN, [(1, replaced), (1, None), (1, dropped)])
    assert joined is not None and np.array_equal(joined.renormalize, [False, False, True])
    assert joined.experts.tolist() == [[0, 7], [2, 3], [4, 5]]
    assert joined.weigh_as is not None and joined.weigh_as.tolist() == OWN.tolist()
    assert joined.keep is not None and joined.keep.tolist() == [
        [True] * 2,
        [True] * 2,
        [True, False],
    ]
    assert joined.weights is not None and joined.weights[2].tolist() == [0.5, 0.25]
    assert np.isnan(joined.weights[:2]).all()
    assert Selection.join(OWN, [(1, None), (2, None)]) is None


def test_what_was_dropped_before_stays_as_it_was() -> None:
    earlier = Selection(
        OWN[:2],
        keep=np.array([[True, False], [True, True]]),
        renormalize=True,
        weights=np.float32([[0.6, 0.4], [0.7, 0.3]]),
    )
    later = Selection(np.array([[6, 7], [2, 8]]), keep=np.array([[True, True], [False, True]]))
    both = later.after(earlier)
    assert both.experts.tolist() == [[6, 1], [2, 8]] and both.renormalize
    assert both.keep is not None and both.keep.tolist() == [[True, False], [False, True]]
    # A replacement is weighed by its own logit; who stays has the weight given before.
    assert both.weights is not None
    np.testing.assert_array_equal(both.weights, np.float32([[np.nan, np.nan], [0.7, np.nan]]))


def test_a_change_shares_the_weight_of_the_tokens_that_it_touches_alone() -> None:
    """A batch's rows are tokens here: what a miss does to one changes no other's weights."""
    earlier = Selection(OWN, keep=np.array([[True, False]] * 3))
    later = Selection(np.array([[0, -1], [2, -1], [7, -1]]), renormalize=True)
    dropping = Selection(
        OWN, keep=np.array([[True, False], [False, True], [True, True]]), renormalize=True
    )
    assert np.array_equal(later.after(earlier).renormalize, [False, False, True])
    assert np.array_equal(dropping.after(earlier).renormalize, [False, True, False])
