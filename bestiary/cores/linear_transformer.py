"""Memory that adds up: every row writes its value at its key, and nothing is ever taken away."""

from dataclasses import dataclass

from torch import Tensor

from bestiary.cores.base import Core
from bestiary.cores.fast_weights import FastCore, FastLayer, FastWeights
from bestiary.ops import fastweights
from bestiary.ops.fastweights.loops import FeatureMap, feature_map
from bestiary.types import State


class LinearTransformerLayer(FastLayer):
    rule = "linear_transformer"

    def __init__(self, cfg: "LinearTransformer") -> None:
        super().__init__(cfg, per_head=3 * cfg.lanes)
        self.phi = cfg.feature_map

    def remember(self, asked: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        y, W = fastweights.linear_transformer(asked, is_first, memory[0], self.phi, self.bptt)
        return y, (W,)

    def told(self, asked: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, _ = asked.chunk(3, -1)
        return feature_map(self.phi, q), feature_map(self.phi, k), None


@dataclass(frozen=True)
class LinearTransformer(FastWeights):
    """Attention without the softmax, so that the past fits into one matrix per head."""

    feature_map: FeatureMap = "elu"
    """of queries and keys"""

    def build(self, input_width: int) -> Core:
        return FastCore(input_width, self, [LinearTransformerLayer(self) for _ in range(self.layers)])
