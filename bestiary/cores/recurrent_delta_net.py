"""A Delta Net that hears itself: its last answer shifts what it asks, tells and how strongly."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bestiary.cores.base import Core
from bestiary.cores.fast_weights import FastCore, FastLayer, FastWeights
from bestiary.ops import fastweights
from bestiary.ops.fastweights.loops import FeatureMap, Recurrence, feature_map
from bestiary.types import State


class RecurrentDeltaNetLayer(FastLayer):
    rule = "recurrent_delta_net"

    def __init__(self, cfg: "RecurrentDeltaNet") -> None:
        H, D = cfg.heads, cfg.lanes
        super().__init__(cfg, per_head=3 * D + 1, strengths=1, beta_bias=cfg.beta_bias)
        self.phi = cfg.feature_map
        self.heard_q, self.heard_k, self.heard_v = (nn.Parameter(torch.randn(H, D, D) / D**0.5) for _ in range(3))
        self.heard_beta = nn.Parameter(torch.randn(H, D) / D**0.5)

    def memories(self, batch_size: int) -> State:
        return *super().memories(batch_size), self.slow.weight.new_zeros(batch_size, self.heads, self.lanes)

    def remember(self, asked: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        heard = Recurrence(self.heard_q, self.heard_k, self.heard_v, self.heard_beta)
        W, last = memory
        y, W = fastweights.recurrent_delta_net(asked, heard, is_first, W, last, self.phi, self.bptt)
        return y, (W, y[-1])

    def own_weights(self) -> tuple[Tensor, ...]:
        return self.heard_q, self.heard_k, self.heard_v, self.heard_beta

    def told(self, asked: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, _, beta = asked.split([self.lanes, self.lanes, self.lanes, 1], -1)
        u = torch.cat([torch.zeros_like(y[:1]), y[:-1]]).tanh()
        q, k = (x + torch.einsum("tbhi,hij->tbhj", u, r) for x, r in ((q, self.heard_q), (k, self.heard_k)))
        beta = (beta + torch.einsum("tbhi,hi->tbh", u, self.heard_beta)[..., None]).sigmoid()
        return feature_map(self.phi, q), feature_map(self.phi, k), beta


@dataclass(frozen=True)
class RecurrentDeltaNet(FastWeights):
    """Delta Net whose queries, keys, values and write strength also depend on its previous output."""

    feature_map: FeatureMap = "softmax"
    """of queries and keys"""
    beta_bias: float | None = None
    """first bias of the write strength's logit; None: no bias"""

    def build(self, input_width: int) -> Core:
        return FastCore(input_width, self, [RecurrentDeltaNetLayer(self) for _ in range(self.layers)])
