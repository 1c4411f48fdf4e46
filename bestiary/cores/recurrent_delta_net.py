"""Recurrent Delta Net (Irie et al. 2021, Going Beyond Linear Transformers with Recurrent Fast Weight Programmers).

A Delta Net whose slow network also gets the last output: with u = tanh(y_{t-1}),

    q += R_q^T u,    k += R_k^T u,    v += R_v^T u,    beta logit += r_beta . u
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bestiary.cores.base import Core
from bestiary.cores.fast_weights import FastWeightConfig, FastWeightCore, FastWeightLayer
from bestiary.ops import fastweights
from bestiary.ops.fastweights.loops import FeatureMap, Recurrence, feature_map
from bestiary.types import State


class RecurrentDeltaNetLayer(FastWeightLayer):
    rule = "recurrent_delta_net"

    def __init__(self, cfg: "RecurrentDeltaNet") -> None:
        H, D = cfg.heads, cfg.head_dim
        super().__init__(cfg, per_head=3 * D + 1, strengths=1, beta_bias=cfg.beta_bias)
        self.phi = cfg.feature_map
        self.R_q, self.R_k, self.R_v = (nn.Parameter(torch.randn(H, D, D) / D**0.5) for _ in range(3))
        self.r_beta = nn.Parameter(torch.randn(H, D) / D**0.5)

    def initial_memory(self, batch_size: int) -> State:
        return *super().initial_memory(batch_size), self.slow.weight.new_zeros(batch_size, self.heads, self.head_dim)

    def apply_rule(self, projected: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        R = Recurrence(self.R_q, self.R_k, self.R_v, self.r_beta)
        W, last = memory
        y, W = fastweights.recurrent_delta_net(projected, R, is_first, W, last, self.phi, self.bptt)
        return y, (W, y[-1])

    def recurrent_weights(self) -> tuple[Tensor, ...]:
        return self.R_q, self.R_k, self.R_v, self.r_beta

    def mapped_qk_beta(self, projected: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, _, beta = projected.split([self.head_dim, self.head_dim, self.head_dim, 1], -1)
        u = torch.cat([torch.zeros_like(y[:1]), y[:-1]]).tanh()
        q, k = (x + torch.einsum("tbhi,hij->tbhj", u, r) for x, r in ((q, self.R_q), (k, self.R_k)))
        beta = (beta + torch.einsum("tbhi,hi->tbh", u, self.r_beta)[..., None]).sigmoid()
        return feature_map(self.phi, q), feature_map(self.phi, k), beta


@dataclass(frozen=True)
class RecurrentDeltaNet(FastWeightConfig):
    """Recurrent Delta Net (Irie et al. 2021): query, key, value and write strength also depend on the last output."""

    feature_map: FeatureMap = "softmax"
    """feature map phi of queries and keys: (ELU + 1) / sum, softmax, or SiLU / L2 norm"""
    beta_bias: float | None = None
    """initial value of a learned bias of the write strength logit; None: no bias (as published)"""

    def build(self, input_width: int) -> Core:
        return FastWeightCore(input_width, self, [RecurrentDeltaNetLayer(self) for _ in range(self.layers)])
