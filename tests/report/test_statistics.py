"""Each test and interval against scipy, a slow obvious version, or values worked by hand."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.report.statistics import (
    answers_interval,
    documents_needed,
    holm,
    mean_interval,
    noticeable_loss,
    other_documents_interval,
    sign_flip_test,
    sign_test,
    tarone,
    z_test,
)
from moecache_lab.claims.statistics import accepted_interval, margin_test, mean_test

stats = pytest.importorskip("scipy.stats")


def slow_sign_flip(losses: list[float]) -> float:
    """Enumerate every pattern of signs, in exact arithmetic."""
    integers = [round(x * 1024) for x in losses]
    sums = [
        sum(s * x for s, x in zip(signs, integers, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(integers))
    ]
    return sum(s >= sum(integers) for s in sums) / len(sums)


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
        (documents_needed, (0.0, 0.1), "must be shares"),
        (documents_needed, (0.1, 1.5), "must be shares"),
        (partial(documents_needed, power=1.0), (0.1, 0.1), "power=1 must lie between"),
    ],
)
def test_what_is_no_count_chance_or_loss_is_refused(test: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        test(*given)


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


def test_a_loss_is_noticeable_where_four_cases_of_five_reach_the_alarm() -> None:
    """At 1% seven losses alarm: 2^-7 < 0.01 < 2^-6."""
    for documents in (7, 10, 24, 200):
        share = noticeable_loss(documents, 0.01)
        assert share is not None
        assert stats.binom.sf(6, documents, share) == pytest.approx(0.8)
    assert noticeable_loss(7, 0.01) == pytest.approx(0.8 ** (1 / 7))
    assert noticeable_loss(6, 0.01) is None


def test_the_normal_test_is_scipys() -> None:
    assert z_test(1.7, 1.0) == pytest.approx(stats.norm.sf(1.7))
    assert (z_test(0.0, 0.0), z_test(0.1, 0.0)) == (1.0, 0.0)


def slow_score(won: int, lost: int, count: int, margin: float) -> float:
    """Tango's statistic, with the likelihood of the shares maximised numerically."""
    unchanged = count - won - lost

    def unlikely(share_lost: float) -> float:
        shares = (share_lost + margin, share_lost, 1 - margin - 2 * share_lost)
        counted = zip((won, lost, unchanged), shares, strict=True)
        return -sum(n * math.log(max(p, 1e-300)) for n, p in counted if n)

    low, high = max(0.0, -margin), (1 - margin) / 2
    grid = np.linspace(low, high, 200_001)
    share = float(grid[np.argmin([unlikely(p) for p in grid[::100]]) * 100])
    near = np.linspace(max(low, share - 0.01), min(high, share + 0.01), 20_001)
    share = float(near[np.argmin([unlikely(p) for p in near])])
    variance = count * (2 * share + margin - margin**2)
    return (won - lost - count * margin) / math.sqrt(variance)


@pytest.mark.parametrize(
    ("won", "lost", "count"), [(3, 5, 100), (0, 0, 40), (1, 7, 21), (9, 2, 30), (0, 12, 12)]
)
def test_the_margin_test_and_the_interval_are_tangos(won: int, lost: int, count: int) -> None:
    for margin in (-0.3, -0.05, 0.1):
        z = slow_score(won, lost, count, margin)
        assert margin_test(won, lost, count, margin, 1) == pytest.approx(stats.norm.sf(z), abs=1e-3)
        assert margin_test(won, lost, count, margin, -1) == pytest.approx(
            stats.norm.cdf(z), abs=1e-3
        )
    low, high = answers_interval(won, lost, count)
    assert -1 <= low <= (won - lost) / count <= high <= 1
    for end, z in ((low, 1.96), (high, -1.96)):
        if abs(end) < 1:
            assert slow_score(won, lost, count, end) == pytest.approx(z, abs=0.01)


def test_without_a_change_the_interval_is_known_and_at_margin_0_the_test_is_the_sign_test() -> None:
    """The limit is z^2 / (n + z^2): 8.8 points of 40 answers."""
    low, high = answers_interval(0, 0, 40)
    assert -low == high == pytest.approx(1.96**2 / (40 + 1.96**2), abs=1e-5)
    assert margin_test(1, 8, 50, 0, -1) == sign_test(1, 8) == margin_test(8, 1, 50, 0, 1)


def test_halls_statistic_by_hand() -> None:
    """Samples 0, 0, 3: mean 1, spread sqrt(2), skewness 0.7071; u = 1 / sqrt(3) = 0.57735.

    sqrt(3) (0.57735 + 0.2357 x 0.33333 + 0.018519 x 0.19245) + 0.7071 / (6 sqrt(3)) = 1.21029.
    """
    assert mean_test(np.asarray([0.0, 0.0, 3.0])) == pytest.approx(stats.t.sf(1.21029, 2), abs=1e-5)
    assert mean_test(np.full(5, 0.1)) == 0 and mean_test(np.full(5, -0.1)) == 1
    assert mean_test(np.zeros(5)) == 1


@given(st.lists(st.integers(-50, 50), min_size=3, max_size=40), st.floats(-3, 3))
def test_an_interval_holds_what_the_test_does_not_reject(values: list[int], shift: float) -> None:
    samples = np.asarray(values, dtype=np.float64)
    figure = float(samples.mean())
    low, high = accepted_interval(figure, lambda bound: samples - bound)
    assert low <= figure <= high
    if low == high:
        assert np.ptp(samples) <= 1e-9 * np.abs(samples).max()
        return
    for end, sign in ((low, 1), (high, -1)):
        assert mean_test(sign * (samples - end)) == pytest.approx(0.025, abs=1e-6)
    inside = figure + shift * (high - figure) / 4
    if figure < inside < high:
        assert mean_test(inside - samples) > 0.025


def test_the_interval_of_symmetric_samples_is_students() -> None:
    samples = np.asarray([1.0, 2.0, 3.0, 4.0, 5.0])
    expected = stats.ttest_1samp(samples, 0).confidence_interval()
    bounds = accepted_interval(3.0, lambda bound: samples - bound)
    assert mean_interval(samples) == pytest.approx(bounds)
    assert bounds == pytest.approx((expected.low, expected.high))


def test_the_interval_of_a_ratio_is_fiellers_and_may_have_no_end() -> None:
    random = np.random.default_rng(1)
    old = random.exponential(size=40)
    new = old * random.uniform(0.8, 1.0, 40)
    low, high = accepted_interval(new.mean() / old.mean(), lambda bound: new - bound * old)
    assert low < new.mean() / old.mean() < high and high - low < 0.1
    equal = accepted_interval(0.9, lambda bound: old * 0.9 - bound * old)
    assert equal == pytest.approx((0.9, 0.9))
    zeros = np.asarray([1.0] + [0.0] * 7)
    assert accepted_interval(8.0, lambda bound: np.ones(8) - bound * zeros)[1] == math.inf


@pytest.mark.parametrize(
    ("loss", "changed", "documents"),
    [
        # z of 5% 1.644854, of 80% 0.841621.
        # (1.644854 sqrt(.2) + 0.841621 sqrt(.2 - .0025))^2 / .0025 = 1.109623^2 / .0025 = 492.5
        (0.05, 0.2, 493),
        # (1.644854 x .3 + 0.841621 sqrt(.09 - .0009))^2 / .0009 = .744674^2 / .0009 = 616.2
        (0.03, 0.09, 617),
        # Every change is a loss: (1.644854 x .1 + 0.841621 sqrt(.0099))^2 / .0001 = 616.2
        (0.01, 0.01, 617),
        # At least the loss must change.
        (0.01, 0.0, 617),
    ],
)
def test_documents_needed_are_those_worked_by_hand(
    loss: float, changed: float, documents: int
) -> None:
    assert documents_needed(loss, changed) == pytest.approx(documents, abs=1)


def test_the_interval_of_other_documents_is_worked_by_hand() -> None:
    won, lost, answers = 4, 49, 200
    low, high = answers_interval(won, lost, answers)
    # 53 of 200 changed, -.225: 1.96 sqrt((.265 - .050625) / 1000) = .028697.
    expected = (
        -0.225 - math.sqrt((-0.225 - low) ** 2 + 0.028697**2),
        -0.225 + math.sqrt((high + 0.225) ** 2 + 0.028697**2),
    )
    assert other_documents_interval(won, lost, answers, 1000) == pytest.approx(expected, abs=1e-5)
    assert other_documents_interval(0, 5, 5, 10)[0] == -1.0


@pytest.mark.parametrize(("won", "lost", "answers"), [(0.02, 0.07, 50), (0.1, 0.1, 200)])
def test_it_holds_what_other_documents_show(won: float, lost: float, answers: int) -> None:
    random = np.random.default_rng(0)
    held = 0
    shares = (won, lost, 1 - won - lost)
    for here, there in zip(
        random.multinomial(answers, shares, 400), random.multinomial(1000, shares, 400), strict=True
    ):
        low, high = other_documents_interval(int(here[0]), int(here[1]), answers, 1000)
        held += low <= (there[0] - there[1]) / 1000 <= high
    assert 0.93 < held / 400 <= 1
