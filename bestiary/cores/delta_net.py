"""Delta Net (Schlag, Irie & Schmidhuber 2021, Linear Transformers Are Secretly Fast Weight Programmers).

W <- W + beta phi(k) (v - W^T phi(k))^T,    y = W^T phi(q)
"""

from dataclasses import dataclass

from torch import Tensor

from bestiary.cores.base import Core
from bestiary.cores.fast_weights import FastWeightConfig, FastWeightCore, FastWeightLayer
from bestiary.ops import fastweights
from bestiary.ops.fastweights.loops import FeatureMap, feature_map
from bestiary.types import State


class DeltaNetLayer(FastWeightLayer):
    rule = "delta_net"

    def __init__(self, cfg: "DeltaNet") -> None:
        super().__init__(cfg, per_head=3 * cfg.head_dim + 1, strengths=1, beta_bias=cfg.beta_bias)
        self.phi = cfg.feature_map

    def apply_rule(self, projected: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        y, W = fastweights.delta_net(projected, is_first, memory[0], self.phi, self.bptt)
        return y, (W,)

    def mapped_qk_beta(self, projected: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, _, beta = projected.split([self.head_dim, self.head_dim, self.head_dim, 1], -1)
        return feature_map(self.phi, q), feature_map(self.phi, k), beta.sigmoid()


@dataclass(frozen=True)
class DeltaNet(FastWeightConfig):
    """Delta Net (Schlag et al. 2021): fast weights written by the delta rule, W += beta k (v - W^T k)^T."""

    feature_map: FeatureMap = "elu"
    """feature map phi of queries and keys: (ELU + 1) / sum, softmax, or SiLU / L2 norm"""
    beta_bias: float | None = None
    """initial value of a learned bias of the write strength logit; None: no bias (as published)"""

    def build(self, input_width: int) -> Core:
        return FastWeightCore(input_width, self, [DeltaNetLayer(self) for _ in range(self.layers)])
