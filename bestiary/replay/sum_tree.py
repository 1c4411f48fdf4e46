"""A sum tree for sampling in proportion to priority (Schaul et al. 2016), in compiled code.

Each node has eight children, which fill one cache line: a search among a million slots waits for memory seven times,
where a binary tree would wait twenty times.
"""

import numpy as np
from numpy.typing import NDArray

from bestiary.ops.jit import compiler

FANOUT = 8
LINE = 64  # bytes of a cache line
ROOT = -1  # the root has this index, but no memory
LARGEST = float(np.finfo(np.float64).max) / 2
compiled = compiler()

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Nodes are stored level by level, the root's children first: the children of node p begin at (p + 1) * FANOUT.


@compiled
def sum_of_children(nodes: Floats, p: int) -> float:
    # from left to right, as a search adds them up, so that both get the same rounded sums
    total = 0.0
    for child in range((p + 1) * FANOUT, (p + 2) * FANOUT):
        total += nodes[child]
    return total


@compiled
def write(nodes: Floats, first_leaf: int, capacity: int, slots: Ints, weights: Floats) -> int:
    """Set leaves and the sums above them; -1. If a weight is invalid, nothing is set and its index is returned.

    A batch goes through the tree level by level, here and in `search`: nodes of one level do not depend on each other.
    """
    for i in range(len(slots)):
        # NaN fails both comparisons; and the sum of all weights must stay finite
        if not (0 <= slots[i] < capacity and 0.0 <= weights[i] <= LARGEST / capacity):
            return i
    touched = slots + first_leaf
    for i in range(len(touched)):
        nodes[touched[i]] = weights[i]
    count = len(touched)
    while count and touched[0] >= FANOUT:
        kept = 0
        for i in range(count):
            parent = touched[i] // FANOUT - 1
            if kept and touched[kept - 1] == parent:  # sampled or added slots are sorted
                continue
            nodes[parent] = sum_of_children(nodes, parent)
            touched[kept] = parent
            kept += 1
        count = kept
    return -1


@compiled
def inside(point: float, weight: float) -> float:
    """The nearest point in [0, weight)."""
    if not point > 0.0:
        return 0.0
    return point if point < weight else np.nextafter(weight, 0.0)


@compiled
def search(nodes: Floats, first_leaf: int, total: float, points: Floats) -> Ints:
    """The slots whose intervals contain the points; never a slot of weight 0, however sums are rounded.

    At every node on the way 0 <= point < weight, and the weight equals the last of the children's ends bit for bit. So
    some child ends after the point, and the first that does has a positive weight.
    """
    at = np.full(len(points), ROOT)
    rest = np.empty(len(points))  # the point, relative to the start of the node's interval
    for i in range(len(points)):
        rest[i] = inside(points[i], total)
    ends = np.zeros(1 + FANOUT)  # ends of the children's intervals, after the 0 where the first begins
    while len(at) and at[0] < first_leaf:
        for i in range(len(at)):
            point, first = rest[i], (at[i] + 1) * FANOUT
            for child in range(FANOUT):
                ends[1 + child] = ends[child] + nodes[first + child]
            passed = 0
            for child in range(FANOUT):  # without `break`, which branch prediction would often miss
                passed += ends[1 + child] <= point
            at[i] = first + passed
            rest[i] = inside(point - ends[passed], nodes[first + passed])
    for i in range(len(at)):
        at[i] -= first_leaf
    return at


@compiled
def search_stratified(nodes: Floats, first_leaf: int, total: float, uniform: Floats) -> tuple[Ints, Floats]:
    n = len(uniform)
    points = np.empty(n)
    for i in range(n):
        points[i] = (i + uniform[i]) / n * total
    slots = search(nodes, first_leaf, total, points)
    weights = np.empty(n)
    for i in range(n):
        weights[i] = nodes[first_leaf + slots[i]]
    return slots, weights


class SumTree:
    """Weights of `capacity` slots, all 0 at first. It has no lock: threads that share it must take turns.

    Every write recomputes its sums from the children, so the sums depend on the weights alone: rounding errors never
    accumulate, and a tree that is rebuilt from its weights is equal bit for bit.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self.capacity = capacity
        self._first_leaf, width = 0, FANOUT
        while width < capacity:
            self._first_leaf += width
            width *= FANOUT
        size = self._first_leaf + -(-capacity // FANOUT) * FANOUT
        memory = np.zeros(size + LINE // 8)
        begin = -memory.ctypes.data % LINE // 8  # so that siblings share a cache line
        self._nodes = memory[begin : begin + size]

    def __len__(self) -> int:
        return self.capacity

    @property
    def total(self) -> float:
        return sum_of_children(self._nodes, ROOT)

    def weights(self, slots: Ints) -> Floats:
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.capacity:
            raise ValueError(f"slots are 0 to {self.capacity - 1}, not {slots.min()} to {slots.max()}")
        return self._nodes[self._first_leaf + slots]

    def set(self, slots: Ints, weights: Floats) -> None:
        """If a slot occurs more than once, its last weight counts."""
        if len(slots) != len(weights):
            raise ValueError(f"{len(slots)} slots cannot have {len(weights)} weights")
        refused = write(self._nodes, self._first_leaf, self.capacity, slots, weights)
        if refused >= 0:
            raise ValueError(
                f"slot {slots[refused]} cannot have weight {weights[refused]}: slots are 0 to {self.capacity - 1}, "
                f"weights 0 to {LARGEST / self.capacity:.1e}"
            )

    def find(self, points: Floats) -> Ints:
        """The slots whose intervals contain these points, where slot i's interval has the length of its weight.

        A point outside of all intervals counts as the nearest point inside.
        """
        return search(self._nodes, self._first_leaf, self._positive_total(), points)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        """Stratified sampling: slots and their weights, one from each of n equal parts of the total, in order."""
        return search_stratified(self._nodes, self._first_leaf, self._positive_total(), rng.random(n))

    def _positive_total(self) -> float:
        total = self.total
        if total == 0.0:
            raise ValueError("nothing can be sampled: all weights are 0")
        return total

    def leaves(self) -> Floats:
        """The weights of all slots, for a checkpoint."""
        return self._nodes[self._first_leaf : self._first_leaf + self.capacity].copy()

    def rebuild(self, leaves: Floats) -> None:
        """Set the weights of all slots."""
        self.set(np.arange(self.capacity), leaves)

    def check_valid(self) -> None:
        """Check that every sum is that of its children, and that unused nodes are 0."""
        sums = self._nodes.reshape(-1, FANOUT).sum(1)
        assert np.isfinite(self._nodes).all()
        assert (self._nodes >= 0).all()
        parents = self._nodes[: len(sums) - 1]
        assert (abs(parents - sums[1:]) <= 1e-14 * parents).all()
        assert not self._nodes[len(parents) : self._first_leaf].any()
        assert not self._nodes[self._first_leaf + self.capacity :].any()
