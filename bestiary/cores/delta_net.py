"""Memory that overwrites: store the difference between what is told and what is known."""

from dataclasses import dataclass

from torch import Tensor

from bestiary.cores.base import Core
from bestiary.cores.fast_weights import FastCore, FastLayer, FastWeights
from bestiary.ops import fastweights
from bestiary.ops.fastweights.loops import FeatureMap, feature_map
from bestiary.types import State


class DeltaNetLayer(FastLayer):
    rule = "delta_net"

    def __init__(self, cfg: "DeltaNet") -> None:
        super().__init__(cfg, per_head=3 * cfg.lanes + 1, strengths=1, beta_bias=cfg.beta_bias)
        self.phi = cfg.feature_map

    def remember(self, asked: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        y, W = fastweights.delta_net(asked, is_first, memory[0], self.phi, self.bptt)
        return y, (W,)

    def told(self, asked: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, _, beta = asked.split([self.lanes, self.lanes, self.lanes, 1], -1)
        return feature_map(self.phi, q), feature_map(self.phi, k), beta.sigmoid()


@dataclass(frozen=True)
class DeltaNet(FastWeights):
    """A matrix per head, corrected at each key by as much as it was wrong."""

    feature_map: FeatureMap = "elu"
    """of queries and keys"""
    beta_bias: float | None = None
    """first bias of the write strength's logit; None: no bias"""

    def build(self, input_width: int) -> Core:
        return FastCore(input_width, self, [DeltaNetLayer(self) for _ in range(self.layers)])
