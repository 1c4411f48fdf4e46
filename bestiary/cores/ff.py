"""No memory: what is not in the observation is not known."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from bestiary.cores.base import Core
from bestiary.ops.program import Program
from bestiary.types import State

if TYPE_CHECKING:
    pass


class FfCore(Core):
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
    """Feedforward: no memory, the baseline every memory task must defeat."""

    def build(self, input_width: int) -> Core:
        return FfCore(input_width)
