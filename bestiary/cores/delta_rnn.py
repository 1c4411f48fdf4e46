"""Two memories that overwrite: one answers the input, the other answers the last answer."""

from dataclasses import dataclass

from torch import Tensor

from bestiary.cores.base import Core
from bestiary.cores.fast_weights import FastCore, FastLayer, FastWeights
from bestiary.ops import fastweights
from bestiary.ops.fastweights.loops import FeatureMap, feature_map
from bestiary.types import State


class DeltaRnnLayer(FastLayer):
    rule = "delta_rnn"

    def __init__(self, cfg: "DeltaRnn") -> None:
        super().__init__(cfg, per_head=5 * cfg.lanes + 2, strengths=2, beta_bias=cfg.beta_bias)
        self.phi = cfg.feature_map

    def memories(self, batch_size: int) -> State:
        (W,) = super().memories(batch_size)
        return W, W.clone(), W.new_zeros(batch_size, self.heads, self.lanes)

    def remember(self, asked: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        W, R, last = memory
        y, W, R = fastweights.delta_rnn(asked, is_first, W, R, last, self.phi, self.bptt)
        return y, (W, R, y[-1])

    def told(self, asked: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, _, _, _, beta = asked.split([self.lanes] * 5 + [2], -1)
        return feature_map(self.phi, q), feature_map(self.phi, k), beta.sigmoid()


@dataclass(frozen=True)
class DeltaRnn(FastWeights):
    """A recurrent network whose weights, input and recurrent alike, are written as it runs."""

    feature_map: FeatureMap = "softmax"
    """of queries and keys"""
    beta_bias: float | None = None
    """first bias of both write strengths' logits; None: no bias"""

    def build(self, input_width: int) -> Core:
        return FastCore(input_width, self, [DeltaRnnLayer(self) for _ in range(self.layers)])
