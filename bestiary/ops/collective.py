"""Sums over the learners of one run: the interface through which a loss is written once for one learner or several.

Each learner holds a part of the batch. A loss is a sum over that part, divided by a count that all learners share, so
gradients and metrics add up. With a single learner every operation returns its argument.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

Tree = TypeVar("Tree")


class Moments(NamedTuple):
    """Count, mean and standard deviation (sample; 0 for a single number)."""

    number: int
    mean: Tensor
    std: Tensor


def moments(x: Tensor) -> Moments:
    return Moments(len(x), x.mean(), x.std() if len(x) > 1 else x.new_zeros(()))


class Collective:
    """What a learner needs from the others. All learners make the same calls in the same order."""

    rank = 0
    size = 1

    @property
    def fraction(self) -> float:
        """1 / size: a quantity that all learners share, times this, adds up to itself."""
        return 1 / self.size

    def all_reduce_sum(self, parts: Tree) -> Tree:
        """The sum over all learners of every tensor of a tree; no gradient flows through it."""
        raise NotImplementedError

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The maximum over all learners."""
        raise NotImplementedError

    def batch_fraction(self, count: float) -> float:
        """This learner's fraction of a count: its mean times this adds up to the mean over all learners."""
        raise NotImplementedError

    def moments(self, x: Tensor) -> Moments:
        """Moments of the numbers [N] of all learners."""
        raise NotImplementedError

    def all_reduce_gradients(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Sum gradients in place, and return the sum of the losses."""
        raise NotImplementedError


class SingleProcess(Collective):
    """One learner: its part is the whole."""

    def all_reduce_sum(self, parts: Tree) -> Tree:
        return parts

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x

    def batch_fraction(self, count: float) -> float:
        return 1.0

    def moments(self, x: Tensor) -> Moments:
        return moments(x)

    def all_reduce_gradients(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
        return loss


SINGLE_PROCESS = SingleProcess()
