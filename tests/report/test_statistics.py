"""Each test and interval against scipy, a slow obvious version, or values worked by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.report.statistics import (
    answers_interval,
    bootstrap_interval,
    holm,
    margin_test,
    mean_interval,
    sign_flip_test,
    sign_test,
    tarone,
    z_test,
)

stats = pytest.importorskip("scipy.stats")


def slow_sign_flip(losses: list[float]) -> float:
    """Enumerate every pattern of signs, in exact arithmetic."""
    integers = [round(x * 1024) for x in losses]
    sums = [
        sum(s * x for s, x in zip(signs, integers, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(integers))
    ]
    return sum(s >= sum(integers) for s in sums) / len(sums)


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_the_sign_test_is_the_binomial_test(better: int, worse: int) -> None:
    changed = better + worse
    binomial = stats.binomtest(worse, changed, 0.5, alternative="greater") if changed else None
    assert sign_test(better, worse) == pytest.approx(binomial.pvalue if binomial else 1.0, rel=1e-9)


@pytest.mark.parametrize(
    ("test", "given", "said"),
    [
        (sign_test, (3, -1), "worse=-1"),
        (holm, ([2.0],), "p=2"),
        (sign_flip_test, ([math.nan],), "finite"),
    ],
)
def test_what_is_no_count_chance_or_loss_is_refused(test: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        test(*given)


@settings(deadline=None)
@given(st.lists(st.integers(-9, 9).map(lambda n: n / 8), max_size=9))
def test_the_sign_flip_test_looks_at_every_pattern(losses: list[float]) -> None:
    assert sign_flip_test(losses) == pytest.approx(slow_sign_flip(losses), abs=1e-12)


def test_many_samples_are_drawn_and_repeat() -> None:
    random = np.random.default_rng(3)
    losses = (random.normal(0.1, 1, 200)).tolist()
    p = sign_flip_test(losses)
    assert p == sign_flip_test(losses)
    expected = stats.ttest_1samp(losses, 0, alternative="greater").pvalue
    assert p == pytest.approx(expected, abs=0.02)
    assert sign_flip_test([1.0] * 100) == 1 / 20_001


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_is_the_step_down_rule(p_values: list[float]) -> None:
    """The rule as Holm states it: the smallest against alpha/m, the next against alpha/(m-1) ..."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    adjusted = holm(p_values)
    for alpha in (0.01, 0.05, 0.3):
        order = sorted(range(len(p_values)), key=lambda i: p_values[i])
        rejected = set()
        for rank, index in enumerate(order):
            if (len(p_values) - rank) * p_values[index] > alpha:
                break
            rejected.add(index)
        assert {i for i, p in enumerate(adjusted) if p <= alpha} == rejected


def test_tarones_rule_by_hand() -> None:
    # Two can reach 0.05 / 2; the third cannot even reach 0.05 and is left out.
    assert tarone([1 / 64, 0.02, 0.5], 0.05) == [True, True, False]
    # At 0.05 both could be tested, which halves the level to 0.025, and there only one can.
    assert tarone([1 / 64, 0.04], 0.05) == [True, False]
    assert tarone([1.0, 0.5], 0.05) == [False, False]
    assert tarone([], 0.05) == []
    assert tarone([0.0] * 5, 0.05) == [True] * 5


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_tarone_and_holm_keep_the_error_rate_exactly(changed: list[int]) -> None:
    """Over all outcomes of fair coins the chance of any rejection is at most alpha."""
    alpha = 0.05
    testable = tarone([0.5**n for n in changed], alpha)
    tested = [n for n, is_testable in zip(changed, testable, strict=True) if is_testable]
    chance = 0.0
    for lost in itertools.product(*(range(n + 1) for n in tested)):
        weight = math.prod(math.comb(n, k) / 2**n for n, k in zip(tested, lost, strict=True))
        p_values = [sign_test(n - k, k) for n, k in zip(tested, lost, strict=True)]
        if any(p <= alpha for p in holm(p_values)):
            chance += weight
    assert chance <= alpha + 1e-12


def test_the_normal_test_is_scipys() -> None:
    assert z_test(1.7, 1.0) == pytest.approx(stats.norm.sf(1.7))
    assert (z_test(0.0, 0.0), z_test(0.1, 0.0)) == (1.0, 0.0)


def test_no_change_in_forty_answers_leaves_five_points_open() -> None:
    """With a 5% loss rate, 40 answers lose none with probability 0.95 ** 40."""
    assert margin_test(0, 0, 40, -0.05, 1) == pytest.approx(0.95**40)
    low, high = answers_interval(0, 0, 40)
    assert -low == high == pytest.approx(1 - 0.025 ** (1 / 40))
    assert margin_test(0, 0, 400, -0.05, 1) < 1e-8


def test_at_no_margin_the_test_and_the_interval_are_mcnemars() -> None:
    assert margin_test(1, 8, 50, 0, -1) == sign_test(1, 8) == margin_test(8, 1, 50, 0, 1)
    for won, lost in ((0, 5), (0, 6), (1, 8), (2, 9), (8, 1), (6, 0)):
        low, high = answers_interval(won, lost, 50)
        assert low < (won - lost) / 50 < high
        assert (high < 0) == (sign_test(won, lost) <= 0.025), (won, lost)
        assert (low > 0) == (sign_test(lost, won) <= 0.025), (won, lost)


@pytest.mark.parametrize(("margin", "sign"), [(-0.2, 1), (0.2, 1), (0.2, -1), (-0.2, -1)])
def test_the_margin_test_keeps_its_level_whatever_changes_both_ways(
    margin: float, sign: float
) -> None:
    """At a true difference of exactly the margin, 12 answers are called at most 5% of the time."""
    count = 12
    for both in (0.0, 0.1, 0.25, 0.4):
        shares = [both + max(margin, 0), both + max(-margin, 0)]
        chance = 0.0
        for won, lost in itertools.product(range(count + 1), repeat=2):
            if won + lost <= count and margin_test(won, lost, count, margin, sign) <= 0.05:
                cell = [won, lost, count - won - lost]
                chance += stats.multinomial.pmf(cell, count, [*shares, 1 - sum(shares)])
        assert chance <= 0.05 + 1e-9


def test_the_interval_of_a_mean_is_students() -> None:
    samples = np.random.default_rng(5).normal(2, 1, 7)
    expected = stats.ttest_1samp(samples, 0).confidence_interval()
    assert mean_interval(samples) == pytest.approx((expected.low, expected.high))


def test_the_bootstrap_of_a_ratio_is_bca_and_knows_what_does_not_vary() -> None:
    def ratio(new: np.ndarray, old: np.ndarray, axis: int = -1) -> np.ndarray:
        return new.mean(axis=axis) / old.mean(axis=axis)

    random = np.random.default_rng(1)
    old = random.exponential(size=30)
    new = old * random.uniform(0.8, 1.0, 30)
    low, high = bootstrap_interval([new, old], ratio)
    assert low < new.mean() / old.mean() < high and high - low < 0.1
    assert bootstrap_interval([old * 0.9, old], ratio) == pytest.approx((0.9, 0.9))
    zeros = np.asarray([1.0] + [0.0] * 7)
    assert bootstrap_interval([np.ones(8), zeros], ratio)[1] == math.inf
