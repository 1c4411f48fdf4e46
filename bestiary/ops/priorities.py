"""Priorities of sequences and importance sampling weights of prioritized replay."""

import torch
from torch import Tensor


def sequence_priority(td_error: Tensor, valid: Tensor, eta: float) -> Tensor:
    """[T, B] -> [B]: eta max |TD error| + (1 - eta) mean |TD error| (Kapturowski et al. 2019).

    A sequence without a valid transition has priority 0.
    """
    error = torch.where(valid, td_error.abs(), 0)
    return eta * error.amax(0) + (1 - eta) * error.sum(0) / valid.sum(0).clamp(min=1)


def importance_weights(probability: Tensor, count: int, beta: float) -> Tensor:
    """w_i = (N P(i))^-beta / max_j w_j, [B] (Schaul et al. 2016, section 3.4).

    probability: P(i) of the sampled items; count: N, the number of items; the maximum is over the batch.
    """
    weight = (count * probability) ** -beta
    return weight / weight.max()
