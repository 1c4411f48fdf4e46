"""Delta RNN (Irie et al. 2021, Going Beyond Linear Transformers with Recurrent Fast Weight Programmers).

Both fast weight matrices, W for the input and R for the last output, are written by the delta rule:

    y_t = W^T phi(q) + R^T softmax(y_{t-1})
"""

from dataclasses import dataclass

from torch import Tensor

from bestiary.cores.base import Core
from bestiary.cores.fast_weights import FastWeightConfig, FastWeightCore, FastWeightLayer
from bestiary.ops import fastweights
from bestiary.ops.fastweights.loops import FeatureMap, feature_map
from bestiary.types import State


class DeltaRnnLayer(FastWeightLayer):
    rule = "delta_rnn"

    def __init__(self, cfg: "DeltaRnn") -> None:
        super().__init__(cfg, per_head=5 * cfg.head_dim + 2, strengths=2, beta_bias=cfg.beta_bias)
        self.phi = cfg.feature_map

    def initial_memory(self, batch_size: int) -> State:
        (W,) = super().initial_memory(batch_size)
        return W, W.clone(), W.new_zeros(batch_size, self.heads, self.head_dim)

    def apply_rule(self, projected: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        W, R, last = memory
        y, W, R = fastweights.delta_rnn(projected, is_first, W, R, last, self.phi, self.bptt)
        return y, (W, R, y[-1])

    def mapped_qk_beta(self, projected: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, _, _, _, beta = projected.split([self.head_dim] * 5 + [2], -1)
        return feature_map(self.phi, q), feature_map(self.phi, k), beta.sigmoid()


@dataclass(frozen=True)
class DeltaRnn(FastWeightConfig):
    """Delta RNN (Irie et al. 2021): a recurrent network whose input and recurrent weights are both fast weights."""

    feature_map: FeatureMap = "softmax"
    """feature map phi of queries and keys: (ELU + 1) / sum, softmax, or SiLU / L2 norm"""
    beta_bias: float | None = None
    """initial value of a learned bias of both write strength logits; None: no bias (as published)"""

    def build(self, input_width: int) -> Core:
        return FastWeightCore(input_width, self, [DeltaRnnLayer(self) for _ in range(self.layers)])
