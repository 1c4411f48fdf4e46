"""Feedforward core: the identity, without memory."""

from dataclasses import dataclass

from torch import Tensor

from bestiary.cores.base import Core
from bestiary.ops.program import Program
from bestiary.types import State


class FfCore(Core):
    """y = x, with an empty state."""

    def __init__(self, input_width: int) -> None:
        super().__init__()
        self.width = input_width

    def initial_state(self, batch_size: int) -> State:
        return ()

    def compile_to(self, program: Program, x: int) -> int:
        return x

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        return x, state


@dataclass(frozen=True)
class Ff:
    """Feedforward: the output is the input, no memory; the baseline that must fail on a memory task."""

    def build(self, input_width: int) -> Core:
        return FfCore(input_width)
