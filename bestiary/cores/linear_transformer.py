"""Linear Transformer (Katharopoulos et al. 2020, Transformers are RNNs): attention without softmax as fast weights.

W <- W + phi(k) v^T,    y = W^T phi(q)
"""

from dataclasses import dataclass

from torch import Tensor

from bestiary.cores.base import Core
from bestiary.cores.fast_weights import FastWeightConfig, FastWeightCore, FastWeightLayer
from bestiary.ops import fastweights
from bestiary.ops.fastweights.loops import FeatureMap, feature_map
from bestiary.types import State


class LinearTransformerLayer(FastWeightLayer):
    rule = "linear_transformer"

    def __init__(self, cfg: "LinearTransformer") -> None:
        super().__init__(cfg, per_head=3 * cfg.head_dim)
        self.phi = cfg.feature_map

    def apply_rule(self, projected: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        y, W = fastweights.linear_transformer(projected, is_first, memory[0], self.phi, self.bptt)
        return y, (W,)

    def mapped_qk_beta(self, projected: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, _ = projected.chunk(3, -1)
        return feature_map(self.phi, q), feature_map(self.phi, k), None


@dataclass(frozen=True)
class LinearTransformer(FastWeightConfig):
    """Linear Transformer (Katharopoulos et al. 2020): linear attention with the additive update W += k v^T."""

    feature_map: FeatureMap = "elu"
    """feature map phi of queries and keys: (ELU + 1) / sum, softmax, or SiLU / L2 norm"""

    def build(self, input_width: int) -> Core:
        return FastWeightCore(input_width, self, [LinearTransformerLayer(self) for _ in range(self.layers)])
