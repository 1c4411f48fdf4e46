"""What every memory promises."""

from typing import Protocol

from torch import Tensor, nn

from bestiary.types import State


class Core(nn.Module):
    """Memory: [T, B, D] -> [T, B, width], forgetting wherever is_first.

    The contract, tested for every core: one chunk = two chunks = row by row, in outputs, states and
    gradients; memory is empty exactly at `is_first`; batch rows do not mix; every parameter is trained.
    """

    width: int  # of the output

    def initial_state(self, batch_size: int) -> State:
        raise NotImplementedError

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        raise NotImplementedError


class CoreConfig(Protocol):
    """A memory is a frozen dataclass of numbers that builds a Core."""

    def build(self, input_width: int) -> Core: ...
