"""The sum tree against a list of weights that is searched from the left."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bestiary.replay.sum_tree import FANOUT, SumTree

CAPACITIES = [1, 2, 7, 8, 9, 64, 65, 1000]  # full and partly filled levels, one level and several
compiles_first = settings(deadline=None, max_examples=60)  # the first call may have to compile


def tree_of(weights: Any) -> SumTree:
    tree = SumTree(len(weights))
    tree.rebuild(np.array(weights, np.float64))
    return tree


def some_weights(capacity: int, seed: int = 0, zeros: float = 0.3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weights = rng.random(capacity) * (rng.random(capacity) >= zeros)
    weights[rng.integers(capacity)] = 0.5  # at least one slot can be sampled
    return weights


def slot_of(weights: list[float], point: float) -> int:
    for slot, weight in enumerate(weights):
        if point < weight:
            return slot
        point -= weight
    raise AssertionError("the point lies behind the last weight")


class Constant:
    """A random generator that always returns the same number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self, n: int) -> np.ndarray:
        return np.full(n, self.number)


LOWEST: Any = Constant(0.0)
HIGHEST: Any = Constant(np.nextafter(1.0, 0.0))


# -- against a list ------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn, weights: st.SearchStrategy[float]) -> tuple[int, list[list[tuple[int, float]]]]:
    """A capacity and calls of `set`: slots with weights, in any order, some more than once."""
    capacity = draw(st.sampled_from(CAPACITIES))
    return capacity, draw(st.lists(st.lists(st.tuples(st.integers(0, capacity - 1), weights), max_size=40), max_size=8))


@compiles_first
@given(batches(st.integers(0, 1000).map(float) | st.just(0.0)), st.randoms(use_true_random=False))
def test_the_tree_equals_a_list(operations, random):
    """Integers, whose sums are exact: everything must be equal."""
    capacity, calls = operations
    tree, naive = SumTree(capacity), [0.0] * capacity
    for call in calls:
        tree.set(np.array([slot for slot, _ in call], np.int64), np.array([weight for _, weight in call], np.float64))
        for slot, weight in call:
            naive[slot] = weight
        tree.check_valid()
        total = sum(naive)
        assert tree.total == total
        assert tree.leaves().tolist() == naive
        slots = [random.randrange(capacity) for _ in range(10)]
        assert tree.weights(np.array(slots)).tolist() == [naive[slot] for slot in slots]
        if total:
            borders = [point for point in np.cumsum([0.0, *naive]) if point < total]
            points = random.sample(borders, min(20, len(borders))) + [random.random() * total for _ in range(20)]
            assert tree.find(np.array(points)).tolist() == [slot_of(naive, point) for point in points]


@compiles_first
@given(batches(st.floats(0.0, 1e300) | st.sampled_from([0.0, 5e-324, 1e-300, 0.1, 1.0, 1e16])))
def test_rounding_never_leads_to_a_slot_of_weight_zero(operations):
    """From the smallest float to nearly the largest: points at every boundary, and next to it."""
    capacity, calls = operations
    tree, naive = SumTree(capacity), np.zeros(capacity)
    for call in calls:
        for slot, weight in call:
            naive[slot] = weight
        tree.set(np.array([slot for slot, _ in call], np.int64), np.array([weight for _, weight in call], np.float64))
        tree.check_valid()
        total = math.fsum(naive)
        assert tree.total == pytest.approx(total, rel=1e-14, abs=0)
        if not total:
            continue
        ends = np.cumsum(naive)
        points = np.sort(np.concatenate([ends, np.nextafter(ends, 0), np.nextafter(ends, np.inf), [0.0, tree.total]]))
        slots = tree.find(points)
        assert ((slots >= 0) & (slots < capacity)).all()
        assert (naive[slots] > 0).all()
        assert (np.diff(slots) >= 0).all()
        assert (ends[slots] - naive[slots] <= points + 1e-12 * total).all()
        assert (ends[slots] >= np.minimum(points, total) - 1e-12 * total).all()


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_new_tree_is_empty(capacity):
    tree = SumTree(capacity)
    tree.check_valid()
    assert len(tree) == tree.capacity == capacity
    assert tree.total == 0.0
    assert tree.leaves().tolist() == [0.0] * capacity


def test_the_last_weight_counts_if_a_slot_is_set_twice_in_a_call():
    tree = SumTree(1000)
    tree.set(np.array([7, 999, 7, 0, 7]), np.array([1.0, 2.0, 3.0, 4.0, 0.5]))
    assert tree.weights(np.array([7, 999, 0])).tolist() == [0.5, 2.0, 4.0]
    assert tree.total == 6.5
    tree.check_valid()


def test_rounding_errors_do_not_accumulate():
    """Large weights come and go; sums updated by differences would keep their rounding errors."""
    rng = np.random.default_rng(0)
    tree, naive = SumTree(1000), np.zeros(1000)
    for _ in range(1000):
        slots, weights = rng.integers(1000, size=100), 10.0 ** rng.uniform(-8, 8, 100)
        tree.set(slots, weights)
        for slot, weight in zip(slots, weights, strict=True):
            naive[slot] = weight
    assert tree.total == pytest.approx(math.fsum(naive), rel=1e-12, abs=0)
    for slot in rng.permutation(1000):
        naive[slot] = rng.uniform(1e-8, 1e-7)
        tree.set(np.array([slot]), naive[slot : slot + 1])
    tree.check_valid()
    assert tree.total == pytest.approx(math.fsum(naive), rel=1e-12, abs=0)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_tree_rebuilt_from_its_leaves_is_equal_bit_for_bit(capacity):
    rng = np.random.default_rng(capacity)
    tree = SumTree(capacity)
    for _ in range(50):
        tree.set(rng.integers(capacity, size=20), rng.random(20))
    again = SumTree(capacity)
    again.rebuild(tree.leaves())
    assert again._nodes.tobytes() == tree._nodes.tobytes()
    for a, b in zip(
        tree.sample(100, np.random.default_rng(1)), again.sample(100, np.random.default_rng(1)), strict=True
    ):
        assert a.tobytes() == b.tobytes()


def test_leaves_are_a_copy():
    tree = tree_of([1.0, 2.0])
    leaves = tree.leaves()
    leaves[:] = 9.0
    assert tree.leaves().tolist() == [1.0, 2.0]
    tree.set(np.array([0]), np.array([5.0]))
    assert leaves.tolist() == [9.0, 9.0]


# -- sampling ------------------------------------------------------------------------------------------------------


def test_slots_are_sampled_in_proportion_to_their_weights():
    """Batches of one, which are independent: Pearson's statistic against its quantile.

    34 slots have a weight, so 33 degrees of freedom: of the chi-square distribution a thousandth lies above 63.87,
    a thousandth below 13.43 (inverse of the incomplete gamma function): too even would be wrong as well.
    """
    weights = np.where(np.arange(100) % 3 == 0, 1.0 + np.arange(100) % 10, 0.0)
    tree, rng = tree_of(weights), np.random.default_rng(0)
    sampled = np.concatenate([tree.sample(1, rng)[0] for _ in range(20_000)])
    counts = np.bincount(sampled, minlength=100)
    assert not counts[weights == 0].any()
    possible = weights > 0
    assert possible.sum() == 34
    expected = 20_000 * weights[possible] / weights.sum()
    assert 13.43 < ((counts[possible] - expected) ** 2 / expected).sum() < 63.87


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("n", [1, 2, 3, 100, 512])
def test_every_stratum_gives_one_sample(capacity, n):
    weights = some_weights(capacity, seed=n)
    tree, rng = tree_of(weights), np.random.default_rng(0)
    part, ends = tree.total / n, np.cumsum(weights)
    for _ in range(10):
        slots, sampled = tree.sample(n, rng)
        assert slots.shape == sampled.shape == (n,)
        assert slots.dtype == np.int64
        assert (sampled == weights[slots]).all()
        assert (sampled > 0).all()
        # the interval of the i-th slot and the i-th stratum overlap
        assert (ends[slots] > part * np.arange(n) - 1e-12).all()
        assert (ends[slots] - sampled < part * (np.arange(n) + 1) + 1e-12).all()
        # a slot is sampled once per stratum inside its interval, and at most once more at each boundary
        assert (abs(np.bincount(slots, minlength=capacity) - weights / part) < 2 + 1e-9).all()


def test_points_are_uniform_within_their_stratum():
    """Four strata of 250 equal slots each: positions within them are uniform and independent."""
    tree, rng = tree_of(np.ones(1000)), np.random.default_rng(0)
    slots = np.stack([tree.sample(4, rng)[0] for _ in range(5000)])
    assert (slots // 250 == np.arange(4)).all()
    for part in (slots % 250).T:
        assert part.min() == 0
        assert part.max() == 249
        assert abs(part.mean() - 124.5) < 5  # its standard error is 250 / sqrt(12 * 5000) = 1.02
    correlation = np.asarray(np.corrcoef(slots.T))[np.triu_indices(4, 1)]
    assert (abs(correlation) < 0.08).all()  # a standard error is 1 / sqrt(5000) = 0.014


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_with_one_positive_weight_only_that_slot_is_sampled(capacity):
    for slot in {0, capacity // 2, capacity - 1}:
        for weight in (5e-324, 1e-300, 0.1, 1.0, 1e300):
            tree = SumTree(capacity)
            tree.set(np.array([slot]), np.array([weight]))
            for rng in (LOWEST, HIGHEST, np.random.default_rng(0)):
                slots, weights = tree.sample(33, rng)
                assert set(slots.tolist()) == {slot}
                assert set(weights.tolist()) == {weight}


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("rng", [LOWEST, HIGHEST], ids=["lowest", "highest"])
def test_extreme_random_numbers_find_slots_of_positive_weight(capacity, rng):
    for seed in range(20):
        weights = some_weights(capacity, seed, zeros=0.8)
        slots, sampled = tree_of(weights).sample(512, rng)
        assert (sampled > 0).all()
        assert (sampled == weights[slots]).all()
        possible = np.flatnonzero(weights)
        assert slots[0] == possible[0] or rng is HIGHEST
        assert slots[-1] == possible[-1] or rng is LOWEST


def test_samples_depend_on_the_generator_alone():
    tree = tree_of(some_weights(1000))
    first, same, other = (tree.sample(64, np.random.default_rng(seed))[0].tolist() for seed in (0, 0, 1))
    assert first == same
    assert first != other


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_an_empty_batch_is_allowed(capacity):
    tree = tree_of(np.ones(capacity))
    empty = np.zeros(0, np.int64)
    assert tree.find(np.zeros(0)).tolist() == []
    assert [part.tolist() for part in tree.sample(0, np.random.default_rng(0))] == [[], []]
    assert tree.weights(empty).tolist() == []
    tree.set(empty, np.zeros(0))
    assert tree.leaves().tolist() == [1.0] * capacity


# -- edge cases----------------------------------------------------------------------------------------------------


def test_a_boundary_belongs_to_the_slot_that_begins_there():
    tree = tree_of([0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 4.0, 0.0])
    points = np.array([0.0, np.nextafter(1.0, 0), 1.0, np.nextafter(3.0, 0), 3.0, np.nextafter(7.0, 0), 7.0])
    before = points.copy()
    assert tree.find(points).tolist() == [1, 1, 4, 4, 9, 9, 9]
    assert (points == before).all()


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_points_outside_count_as_the_nearest_point_inside(capacity):
    weights = some_weights(capacity, zeros=0.8)
    tree, possible = tree_of(weights), np.flatnonzero(weights)
    low, high = possible[0], possible[-1]
    points = np.array([0.0, -0.0, -1.0, -np.inf, tree.total, np.nextafter(tree.total, np.inf), 1e308, np.inf])
    assert tree.find(points).tolist() == [low] * 4 + [high] * 4
    assert weights[tree.find(np.array([np.nan]))[0]] > 0


def test_a_weight_too_small_to_change_the_sum_is_harmless():
    for weights in ([1.0, 1e-30], [1e-30, 1.0], [1e16, 0.0, 1.0, 0.0], [1e-30] * FANOUT + [1.0] + [1e-30] * FANOUT):
        tree = tree_of(weights)
        tree.check_valid()
        points = np.array([0.0, np.nextafter(tree.total, 0), tree.total])
        assert (tree.weights(tree.find(points)) > 0).all()


def test_a_point_rounded_to_the_end_of_its_interval_stays_in_it():
    """Two ties: 1.5 units + 5 is rounded to 2 units above 5, and one unit above 5, less 1.5 units, to 5."""
    unit = np.spacing(5.0)
    point = 5.0 + unit
    assert 1.5 * unit + 5.0 > point  # it lies in the second interval
    assert point - 1.5 * unit == 5.0  # relative to its start, at the end
    weights = np.zeros(1000)
    for slot in (FANOUT, FANOUT**2, FANOUT**3):  # their paths separate one level higher each time
        weights[:] = 0.0
        weights[0], weights[slot] = 1.5 * unit, 5.0
        assert tree_of(weights).find(np.array([point])).tolist() == [slot]


def test_the_largest_weights_have_a_finite_total():
    for capacity in CAPACITIES:
        largest = np.finfo(np.float64).max / 2 / capacity
        tree = tree_of(np.full(capacity, largest))
        tree.check_valid()
        assert np.isfinite(tree.total)
        assert tree.find(np.array([0.0, tree.total])).tolist() == [0, capacity - 1]


# -- invalid arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "weight", "sentence"),
    [
        (3, np.nan, r"slot 3 cannot have weight nan: slots are 0 to 999, weights 0 to 9\.0e\+304"),
        (3, np.inf, r"slot 3 cannot have weight inf"),
        (3, -np.inf, r"slot 3 cannot have weight -inf"),
        (3, -1e-300, r"slot 3 cannot have weight -1e-300"),
        (3, 1e305, r"slot 3 cannot have weight 1e\+305"),
        (-1, 1.0, r"slot -1 cannot have weight 1\.0"),
        (1000, 1.0, r"slot 1000 cannot have weight 1\.0: slots are 0 to 999"),
        (2**62, 1.0, r"slot 4611686018427387904 cannot"),
    ],
)
@pytest.mark.parametrize("place", [0, 5, 9])
def test_an_invalid_weight_leaves_the_tree_unchanged(slot, weight, sentence, place):
    tree = tree_of(some_weights(1000))
    before = tree._nodes.tobytes()
    slots, weights = np.arange(100, 110), np.full(10, 7.0)
    slots[place], weights[place] = slot, weight
    with pytest.raises(ValueError, match=sentence):
        tree.set(slots, weights)
    assert tree._nodes.tobytes() == before
    tree.check_valid()


def test_slots_and_weights_must_have_one_length():
    tree = tree_of([1.0, 2.0])
    with pytest.raises(ValueError, match="2 slots cannot have 1 weights"):
        tree.set(np.array([0, 1]), np.array([3.0]))
    with pytest.raises(ValueError, match="2 slots cannot have 3 weights"):
        tree.rebuild(np.ones(3))
    assert tree.leaves().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("slot", [-1, 9])
def test_weights_of_missing_slots_are_refused(slot):
    with pytest.raises(ValueError, match="slots are 0 to 8"):
        SumTree(9).weights(np.array([0, slot]))


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_an_empty_tree_cannot_be_sampled(capacity):
    tree = SumTree(capacity)
    for _ in range(2):
        with pytest.raises(ValueError, match="all weights are 0"):
            tree.sample(3, np.random.default_rng(0))
        with pytest.raises(ValueError, match="all weights are 0"):
            tree.find(np.array([0.0]))
        tree.set(np.array([0]), np.array([1.0]))
        tree.set(np.array([0]), np.array([0.0]))


def test_a_tree_has_at_least_one_slot():
    with pytest.raises(ValueError, match="capacity=0 must be at least 1"):
        SumTree(0)


@pytest.mark.parametrize("number", [np.nan, -1.0, 0.125, np.inf])
@pytest.mark.parametrize("capacity", [63, 65])
def test_a_tree_with_a_wrong_number_is_invalid(capacity, number):
    """Every node in turn: sums, leaves and unused nodes."""
    for node in range(len(SumTree(capacity)._nodes)):
        tree = tree_of(np.ones(capacity))
        tree._nodes[node] = number
        with pytest.raises(AssertionError):
            tree.check_valid()


def test_consistent_sums_of_invalid_weights_are_invalid():
    negative, unused, childless = tree_of(np.ones(5)), tree_of(np.ones(64)), tree_of(np.ones(65))
    negative._nodes[2] = -1.0
    unused.capacity = 63
    childless._nodes[[7, FANOUT * (7 + 1)]] = 1.0  # a grandchild of the root, after all nodes with leaves
    for tree in (negative, unused, childless):
        with pytest.raises(AssertionError):
            tree.check_valid()
