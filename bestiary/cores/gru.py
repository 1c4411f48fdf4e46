"""Gated recurrent unit (Cho et al. 2014).

r, z = sigmoid(W x + U h + b),    n = tanh(W x + b + r (U h + b')),    h <- (1 - z) n + z h
"""

from dataclasses import dataclass

import torch
from torch import nn

from bestiary.cores.base import Core
from bestiary.cores.rnn import GatedConfig, GatedCore


@dataclass(frozen=True)
class Gru(GatedConfig):
    """GRU (Cho et al. 2014): reset and update gates, one state, three quarters of an LSTM's weights."""

    def build(self, input_width: int) -> Core:
        core = GatedCore(nn.GRU(input_width, self.hidden or input_width, self.layers), 1, self.bptt)
        if self.init == "orthogonal":
            core.init_orthogonal()
        if self.chrono is not None:
            with torch.no_grad():
                for bias_ih, bias_hh in core.biases():
                    bias_hh.zero_()
                    bias_ih.zero_()
                    _, update_gate, _ = bias_ih.chunk(3)  # reset, update, new
                    update_gate.copy_(core.chrono_bias(self.chrono))
        return core
