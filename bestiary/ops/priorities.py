"""What prioritized replay computes: how surprising a sequence was, and how to weigh what is drawn too often."""

import torch
from torch import Tensor


def sequence_priority(error: Tensor, valid: Tensor, eta: float) -> Tensor:
    """[T, B] -> [B]: between the largest error of a sequence (eta = 1) and their mean (eta = 0).

    Where nothing is valid there is no surprise.
    """
    error = torch.where(valid, error.abs(), 0)
    return eta * error.amax(0) + (1 - eta) * error.sum(0) / valid.sum(0).clamp(min=1)


def importance(share: Tensor, count: int, beta: float) -> Tensor:
    """(count x share)^-beta over its largest, [B]: what was likely to be drawn counts less, and nothing more than once.

    share: each item's part of all priorities; count: items there are.
    """
    weight = (count * share) ** -beta
    return weight / weight.max()
