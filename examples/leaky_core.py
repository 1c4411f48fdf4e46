"""A memory of your own: units that leak, each at a rate it learns.

bestiary doctor core examples/leaky_core.py:Leaky
bestiary train recall --plugin examples/leaky_core.py core:leaky --core.units 64
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import bestiary
from bestiary.cores.base import Core
from bestiary.types import State


class LeakyCore(Core):
    def __init__(self, units: int, input_width: int) -> None:
        super().__init__()
        self.width = units  # of the output
        self.write = nn.Linear(input_width, units)
        self.leak = nn.Parameter(torch.linspace(-2, 4, units))

    def initial_state(self, batch_size: int) -> State:
        return (self.leak.new_zeros(batch_size, self.width),)  # every leaf begins with the batch

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        keep, (h,) = self.leak.sigmoid(), state
        outputs = []
        for row, new in zip(self.write(x).unbind(), is_first.unbind(), strict=True):
            h = torch.where(new[:, None], 0, h) * keep + row * (1 - keep)  # forget where an episode starts
            outputs.append(h)
        return torch.stack(outputs).tanh(), (h,)


@dataclass(frozen=True)
class Leaky:
    """Leaky integrators: each unit forgets at a rate of its own."""

    units: int = 64

    def build(self, input_width: int) -> Core:
        return LeakyCore(self.units, input_width)


bestiary.register(core=Leaky)
