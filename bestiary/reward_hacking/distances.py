"""Distances between policies: divergences of action distributions, and the difference of the states they visit."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bestiary.ops import policy

GRID = 8  # height and width in cells to which images are averaged
CONSTANT = 1e-6  # relative to its mean: a feature that varies less is constant up to rounding


# -- divergences of two action distributions, each given by logits [..., A] -> [...] -----------------------------------


def kl(logits: Tensor, other: Tensor) -> Tensor:
    """sum_a p log(p / q) in nats, clamped at 0 against rounding."""
    return policy.kl(logits.double(), other.double()).clamp(min=0)


def jensen_shannon(logits: Tensor, other: Tensor) -> Tensor:
    """KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2, in nats: from 0 to log 2. The divergence, not its root."""
    p, q = logits.double().softmax(-1), other.double().softmax(-1)
    both = (p + q).clamp(min=torch.finfo(p.dtype).tiny)  # p / m = 2 p / (p + q), also where both are 0
    return 0.5 * (torch.xlogy(p, 2 * p / both) + torch.xlogy(q, 2 * q / both)).sum(-1).clamp(min=0)


def hellinger(logits: Tensor, other: Tensor) -> Tensor:
    """||sqrt p - sqrt q||_2 / sqrt 2: from 0 to 1."""
    root_p, root_q = ((x.double().log_softmax(-1) / 2).exp() for x in (logits, other))
    return (root_p - root_q).norm(dim=-1) / 2**0.5


DIVERGENCES = {"kl": kl, "js": jensen_shannon, "hellinger": hellinger}


# -- state visitation --------------------------------------------------------------------------------------------------


def observation_features(obs: Tensor) -> Tensor:
    """[N, ...] -> [N, F]: vectors unchanged, images averaged to 8 x 8 cells."""
    obs = obs.float()
    if obs.dim() == 4:
        obs = F.adaptive_avg_pool2d(obs, (min(GRID, obs.shape[2]), min(GRID, obs.shape[3])))
    return obs.flatten(1)


class RunningMoments:
    """Running mean and standard deviation of each feature."""

    def __init__(self) -> None:
        self.count = 0
        self.total = self.squares = np.zeros(())

    def add(self, features: Tensor) -> None:
        """[N, F]"""
        x = features.cpu().double().numpy()
        self.count += len(x)
        self.total, self.squares = self.total + x.sum(0), self.squares + (x * x).sum(0)

    @property
    def mean(self) -> NDArray[np.float64]:
        return self.total / self.count

    @property
    def std(self) -> NDArray[np.float64]:
        return np.sqrt(np.maximum(self.squares / self.count - self.mean**2, 0))


def visitation_distances(tested: RunningMoments, reference: RunningMoments) -> dict[str, float]:
    """Differences of feature means and standard deviations, in units of the pooled standard deviation.

    Each is the root mean square over features; constant features contribute 0. The means of two sets are at most 2
    apart, even if neither set varies.
    """
    means, stds = tested.mean - reference.mean, tested.std - reference.std
    pooled = np.sqrt((tested.std**2 + reference.std**2) / 2 + means**2 / 4)
    varies = pooled > CONSTANT * np.maximum(abs(tested.mean), abs(reference.mean))
    unit = np.where(varies, pooled, np.inf)
    return {"visitation_mean": _rms(means / unit), "visitation_std": _rms(stds / unit)}


def _rms(x: NDArray[np.float64]) -> float:
    return float(np.sqrt((x**2).mean()))
