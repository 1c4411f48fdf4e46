"""Categorical policies given by logits, and the rewards they are shown."""

from typing import Literal

import torch
from torch import Tensor

RewardClip = Literal["abs_one", "soft_asymmetric", "none"]


def log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """log pi(action): [..., A], [...] -> [...]"""
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    """-sum_a pi log pi: [..., A] -> [...]"""
    log_pi = logits.log_softmax(-1)
    return -(log_pi.exp() * log_pi).sum(-1)


def kl(logits: Tensor, other: Tensor) -> Tensor:
    """sum_a p log(p / q) in nats: 0 where p has no weight, infinite where only q has none: [..., A] -> [...]"""
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def sample(logits: Tensor, rng: torch.Generator) -> Tensor:
    """One action per row: [B, A] -> [B]. The first of A exponential clocks with rates pi to ring."""
    pi = logits.softmax(-1)
    return (pi / torch.empty_like(pi).exponential_(generator=rng)).argmax(-1)


def epsilon_greedy(q: Tensor, epsilon: Tensor, rng: torch.Generator, legal: Tensor | None = None) -> Tensor:
    """The best of [B, A], or with probability epsilon [B] any action; legal: [K], the actions there are."""
    lots = torch.rand(2, len(q), generator=rng, device=q.device)
    anything = (lots[0] * (q.shape[-1] if legal is None else len(legal))).long()
    anything = anything if legal is None else legal[anything]
    return torch.where(lots[1] < epsilon, anything, q.argmax(-1))


def clip_reward(reward: Tensor, mode: RewardClip) -> Tensor:
    """abs_one: clamp to [-1, 1]. soft_asymmetric: squash, and mind losses less (IMPALA's DMLab runs)."""
    if mode == "abs_one":
        return reward.clamp(-1, 1)
    if mode == "soft_asymmetric":
        squashed = reward.tanh()
        return torch.where(squashed < 0, 0.3 * squashed, 5.0 * squashed)
    return reward
