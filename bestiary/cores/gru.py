"""Memory behind two gates: each unit learns how much of the past to keep and how much of it to consult."""

from dataclasses import dataclass

import torch
from torch import nn

from bestiary.cores.base import Core
from bestiary.cores.rnn import Gated, GatedCore


@dataclass(frozen=True)
class Gru(Gated):
    """Gated recurrent unit: an LSTM's idea with one state and fewer weights."""

    def build(self, input_width: int) -> Core:
        core = GatedCore(nn.GRU(input_width, self.hidden or input_width, self.layers), 1, self.bptt)
        if self.init == "orthogonal":
            core.orthogonal()
        if self.chrono is not None:
            with torch.no_grad():
                for from_input, from_itself in core.biases():
                    from_itself.zero_()
                    from_input.zero_()
                    _, keep, _ = from_input.chunk(3)  # reset, update, new
                    keep.copy_(core.time_constants(self.chrono))
        return core
