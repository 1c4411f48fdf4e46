"""Draw in proportion to priority: a tree of sums over the slots of a replay, in compiled code.

The tree is wide: the eight children of a node fill one line of the cache, so a search waits for memory seven times in
a million slots where a tree of pairs would wait twenty times.
"""

import numpy as np
from numpy.typing import NDArray

from bestiary.ops.jit import compiler

FANOUT = 8
LINE = 64  # bytes of a cache line
ROOT = -1  # has a place in the counting, none in memory
LARGEST = float(np.finfo(np.float64).max) / 2
compiled = compiler()

# Nodes lie level after level, the root's children first: those of node p begin at (p + 1) * FANOUT.


@compiled
def sum_of_children(nodes, p):
    # from left to right, as a search adds them up: both meet the same rounded sums
    total = 0.0
    for child in range((p + 1) * FANOUT, (p + 2) * FANOUT):
        total += nodes[child]
    return total


@compiled
def write(nodes, first_leaf, capacity, slots, weights):
    """Set leaves and renew the sums above them. If one is refused nothing is set, and its place in the batch returned.

    Batches go through the tree level by level, here and in `search`: nodes of one level do not wait for each other.
    """
    for i in range(len(slots)):
        # not a number is neither above nor below; and all weights together must stay finite
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
            if kept and touched[kept - 1] == parent:  # slots that were drawn or added are in order, siblings together
                continue
            nodes[parent] = sum_of_children(nodes, parent)
            touched[kept] = parent
            kept += 1
        count = kept
    return -1


@compiled
def inside(point, weight):
    """The nearest point in [0, weight)."""
    if not point > 0.0:
        return 0.0
    return point if point < weight else np.nextafter(weight, 0.0)


@compiled
def search(nodes, first_leaf, total, points):
    """The slots in whose intervals the points lie; never one of weight 0, however sums are rounded.

    Of every node on the way 0 <= point < weight, and the weight is to the last bit the last of the ends below. So some
    child ends behind the point, and the first that does has a weight.
    """
    at = np.full(len(points), ROOT)
    rest = np.empty(len(points))  # the point, counted from where the node's interval begins
    for i in range(len(points)):
        rest[i] = inside(points[i], total)
    ends = np.zeros(1 + FANOUT)  # of the children's intervals, behind the 0 where the first begins
    while len(at) and at[0] < first_leaf:
        for i in range(len(at)):
            point, first = rest[i], (at[i] + 1) * FANOUT
            for child in range(FANOUT):
                ends[1 + child] = ends[child] + nodes[first + child]
            passed = 0
            for child in range(FANOUT):  # to the last: a loop left early is one the processor guesses wrong
                passed += ends[1 + child] <= point
            at[i] = first + passed
            rest[i] = inside(point - ends[passed], nodes[first + passed])
    for i in range(len(at)):
        at[i] -= first_leaf
    return at


@compiled
def search_stratified(nodes, first_leaf, total, uniform):
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
    """Weights of `capacity` slots, all 0 at first. Threads that share a tree take turns: there is no lock in it.

    Every write adds its sums up anew, so they depend on the weights alone, not on their history: rounding errors never
    gather, and a tree that is rebuilt from its weights is the same to the last bit.
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
        room = np.zeros(size + LINE // 8)
        begin = -room.ctypes.data % LINE // 8  # so that siblings share a line
        self._nodes = room[begin : begin + size]

    def __len__(self) -> int:
        return self.capacity

    @property
    def total(self) -> float:
        return sum_of_children(self._nodes, ROOT)

    def weights(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.capacity:
            raise ValueError(f"slots are 0 to {self.capacity - 1}, not {slots.min()} to {slots.max()}")
        return self._nodes[self._first_leaf + slots]

    def set(self, slots: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        """Of a slot that occurs more than once the last weight counts."""
        if len(slots) != len(weights):
            raise ValueError(f"{len(slots)} slots cannot have {len(weights)} weights")
        refused = write(self._nodes, self._first_leaf, self.capacity, slots, weights)
        if refused >= 0:
            raise ValueError(
                f"slot {slots[refused]} cannot have weight {weights[refused]}: slots are 0 to {self.capacity - 1}, "
                f"weights 0 to {LARGEST / self.capacity:.1e}"
            )

    def find(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """The slots that hold these points if intervals as long as the weights are laid end to end.

        Points before the first interval or after the last are taken for the nearest inside.
        """
        return search(self._nodes, self._first_leaf, self._positive_total(), points)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Slots and their weights, one from each of n equal parts of the total, in order."""
        return search_stratified(self._nodes, self._first_leaf, self._positive_total(), rng.random(n))

    def _positive_total(self) -> float:
        total = self.total
        if total == 0.0:
            raise ValueError("nothing can be drawn: all weights are 0")
        return total

    def leaves(self) -> NDArray[np.float64]:
        """The weights of all slots: what a checkpoint needs."""
        return self._nodes[self._first_leaf : self._first_leaf + self.capacity].copy()

    def rebuild(self, leaves: NDArray[np.float64]) -> None:
        """Set the weights of all slots."""
        self.set(np.arange(self.capacity), leaves)

    def check_valid(self) -> None:
        """Every sum is that of its children; what no slot uses is 0."""
        sums = self._nodes.reshape(-1, FANOUT).sum(1)
        assert np.isfinite(self._nodes).all()
        assert (self._nodes >= 0).all()
        parents = self._nodes[: len(sums) - 1]
        assert (abs(parents - sums[1:]) <= 1e-14 * parents).all()
        assert not self._nodes[len(parents) : self._first_leaf].any()
        assert not self._nodes[self._first_leaf + self.capacity :].any()
