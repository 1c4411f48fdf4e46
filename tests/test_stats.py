"""Summaries of scores, by hand and by long-known formulas."""

from itertools import product

import numpy as np
import pytest

from bestiary.ops.stats import bootstrap_interval, iqm, stratified_bootstrap, summary


def test_the_interquartile_mean_of_four_is_the_mean_of_the_middle_two():
    assert iqm([1000.0, 3.0, 1.0, -1000.0]) == pytest.approx(2.0)


def test_the_interquartile_mean_of_eight_is_the_mean_of_the_middle_four():
    assert iqm([9, 1, 8, 2, 7, 3, 6, -50]) == pytest.approx((2 + 3 + 6 + 7) / 4)


def test_edges_count_by_their_share_when_four_does_not_divide():
    # of three, the middle half spans 0.75 to 2.25: a quarter of the first, the second, a quarter of the third
    assert iqm([0.0, 10.0, 40.0]) == pytest.approx((0.25 * 0 + 10 + 0.25 * 40) / 1.5)
    # of five, 1.25 to 3.75: three quarters of the second and fourth
    assert iqm([-99, 0, 4, 12, 99]) == pytest.approx((0.75 * 0 + 4 + 0.75 * 12) / 2.5)


def test_one_score_is_its_own_interquartile_mean():
    assert iqm([7.5]) == pytest.approx(7.5)
    assert iqm([1.0, 2.0]) == pytest.approx(1.5)


def test_the_interquartile_mean_of_n_equals_that_of_every_score_four_times():
    rng = np.random.default_rng(0)
    for n in range(1, 14):
        x = rng.normal(size=n)
        fourfold = np.sort(np.repeat(x, 4))  # 4n scores: the middle 2n, no fractions needed
        assert iqm(x) == pytest.approx(fourfold[n : 3 * n].mean())


def test_the_interquartile_mean_does_not_mind_order_or_outliers():
    x = np.arange(20.0)
    assert iqm(np.random.default_rng(1).permutation(x)) == pytest.approx(iqm(x))
    assert iqm([*x[:-1], 1e12]) == pytest.approx(iqm(x))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_the_interquartile_mean_can_be_taken_along_any_axis(axis):
    x = np.random.default_rng(2).normal(size=(5, 6, 7))
    np.testing.assert_allclose(iqm(x, axis), np.apply_along_axis(iqm, axis, x))


def test_the_interval_of_equal_scores_is_a_point():
    assert bootstrap_interval([3.0] * 10) == (3.0, 3.0)


def test_the_interval_is_that_of_the_normal_law_for_many_scores():
    x = np.random.default_rng(3).normal(5, 2, 400)
    low, high = bootstrap_interval(x)
    half = 1.96 * x.std() / np.sqrt(len(x))
    assert low == pytest.approx(x.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(x.mean() + half, abs=0.1 * half)


def test_a_higher_level_gives_a_wider_interval():
    x = np.random.default_rng(4).exponential(size=30)
    low, high = bootstrap_interval(x, level=0.5)
    lower, higher = bootstrap_interval(x, level=0.99)
    assert lower < low < x.mean() < high < higher


def test_the_interval_of_two_scores_is_known_exactly():
    # resamples of (0, 1) have means 0, 1/2, 1 with chances 1/4, 1/2, 1/4
    assert bootstrap_interval([0.0, 1.0], level=0.95) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], level=0.4) == (0.5, 0.5)


def test_the_same_scores_give_the_same_interval():
    x = np.random.default_rng(5).normal(size=12)
    np.random.seed(1)
    first = bootstrap_interval(x)
    np.random.seed(2)
    assert bootstrap_interval(x) == first


@pytest.mark.parametrize("statistic", [np.mean, iqm])
def test_the_stratified_interval_is_that_of_all_resamples(statistic):
    """Few enough scores to list every way to draw each group from itself; more draws than ways come close."""
    groups = [[0.0, 1.0, 5.0], [10.0, 12.0]]
    ways = [list(product(group, repeat=len(group))) for group in groups]  # 27 and 4
    every = [float(statistic([*a, *b], axis=0)) for a, b in product(*ways)]
    for level in (0.5, 0.9):
        low, high = stratified_bootstrap(groups, statistic, resamples=50_000, level=level)
        below, above = np.quantile(every, [(1 - level) / 2, (1 + level) / 2])
        assert (low, high) == pytest.approx((below, above), abs=0.1)


def test_groups_are_not_mixed():
    low, high = stratified_bootstrap([[1.0] * 4, [7.0] * 4], np.mean)
    assert low == high == 4.0
    low, high = stratified_bootstrap([[1.0] * 4 + [7.0] * 4], np.mean)
    assert low < 4.0 < high


def test_every_entry_of_a_curve_gets_the_interval_it_would_get_alone():
    curves = np.random.default_rng(6).normal(size=(2, 5, 3))  # tasks, seeds, entries
    low, high = stratified_bootstrap(list(curves), iqm)
    for i in range(3):
        assert (low[i], high[i]) == pytest.approx(stratified_bootstrap(list(curves[:, :, i]), iqm))


def test_one_group_is_the_plain_bootstrap():
    x = np.random.default_rng(7).normal(size=9)
    assert stratified_bootstrap([x], np.mean, 10_000) == bootstrap_interval(x)
    resampled_means = x[np.random.default_rng(0).integers(0, 9, (10_000, 9))].mean(1)
    assert bootstrap_interval(x) == tuple(np.quantile(resampled_means, [0.025, 0.975]))


def test_a_summary_by_hand():
    s = summary([4.0, 1.0, 3.0, 2.0, 10.0])
    assert s["n"] == 5
    assert s["mean"] == pytest.approx(4.0)
    assert s["median"] == 3.0
    assert s["min"] == 1.0
    assert s["max"] == 10.0
    assert s["std"] == pytest.approx(np.sqrt((9 + 4 + 1 + 0 + 36) / 5))
    assert s["iqm"] == pytest.approx((0.75 * 2 + 3 + 0.75 * 4) / 2.5)
    assert (s["ci95_low"], s["ci95_high"]) == bootstrap_interval([4.0, 1.0, 3.0, 2.0, 10.0])
    assert s["ci95_low"] <= s["mean"] <= s["ci95_high"]


def test_a_summary_holds_plain_numbers():
    assert {type(v) for v in summary([1, 2, 3]).values()} == {int, float}
