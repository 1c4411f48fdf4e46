"""Categorical policies given by logits, epsilon-greedy action selection, and reward clipping."""

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
    """KL(p || q) = sum_a p log(p / q) in nats; terms with p = 0 are 0: [..., A] -> [...]"""
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def sample(logits: Tensor, rng: torch.Generator) -> Tensor:
    """Sample one action per batch entry: [B, A] -> [B], as the minimum of exponential variables with rates pi."""
    pi = logits.softmax(-1)
    return (pi / torch.empty_like(pi).exponential_(generator=rng)).argmax(-1)


def epsilon_greedy(q: Tensor, epsilon: Tensor, rng: torch.Generator, legal: Tensor | None = None) -> Tensor:
    """argmax of q [B, A], or with probability epsilon [B] a uniformly random action; legal: [K] allowed actions."""
    noise = torch.rand(2, len(q), generator=rng, device=q.device)
    random_action = (noise[0] * (q.shape[-1] if legal is None else len(legal))).long()
    random_action = random_action if legal is None else legal[random_action]
    return torch.where(noise[1] < epsilon, random_action, q.argmax(-1))


def clip_reward(reward: Tensor, mode: RewardClip) -> Tensor:
    """abs_one: clamp to [-1, 1]. soft_asymmetric: 5 tanh if positive, 0.3 tanh if negative (IMPALA, DMLab-30)."""
    if mode == "abs_one":
        return reward.clamp(-1, 1)
    if mode == "soft_asymmetric":
        squashed = reward.tanh()
        return torch.where(squashed < 0, 0.3 * squashed, 5.0 * squashed)
    return reward
