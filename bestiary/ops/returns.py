"""Return estimators: V-trace, TD(lambda), Watkins's Q(lambda), n-step returns. Time is axis 0, batch axis 1."""

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    targets: Tensor  # [T, B] v_s
    advantages: Tensor  # [T, B] rho_s (r_s + gamma v_{s+1} - V(x_s))


def accumulate(x: Tensor, keep: Tensor) -> Tensor:
    """y_t = x_t + keep_t y_{t+1} with y_T = 0, for [T, ...]: a parallel scan of log2(T) passes.

    Before each pass y_t is the sum over `span` steps, and keep_t is the product of their factors.
    """
    y, span = x, 1
    while span < len(x):
        y = torch.cat([y[:-span] + keep[:-span] * y[span:], y[-span:]])
        keep = torch.cat([keep[:-span] * keep[span:], keep[-span:]])
        span *= 2
    return y


@torch.no_grad()
def vtrace(
    log_rho: Tensor,
    discount: Tensor,
    reward: Tensor,
    value: Tensor,
    bootstrap: Tensor,
    valid: Tensor | None = None,
    clip_rho: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
    trace_decay: float = 1.0,
) -> VTrace:
    """Off-policy corrected value targets and policy-gradient advantages (Espeholt et al. 2018, eq. 1, remark 2).

    log_rho, discount, reward, value: [T, B]; bootstrap: [B], the value of the step after the last.
    Where `valid` is false there is no transition, only a reset: the target is the value itself. The transition before
    it bootstraps from this target if the episode was truncated by a time limit.
    """
    assert log_rho.dim() >= 2 and log_rho.shape == discount.shape == reward.shape == value.shape
    rho = log_rho.exp()
    c = trace_decay * rho.clamp(max=1.0)
    clipped = rho if clip_rho is None else rho.clamp(max=clip_rho)
    pg_clipped = rho if clip_pg_rho is None else rho.clamp(max=clip_pg_rho)

    next_value = torch.cat([value[1:], bootstrap[None]])
    delta = clipped * (reward + discount * next_value - value)
    if valid is not None:
        delta = torch.where(valid, delta, 0)

    targets = value + accumulate(delta, discount * c)
    next_target = torch.cat([targets[1:], bootstrap[None]])
    return VTrace(targets, pg_clipped * (reward + discount * next_target - value))


@torch.no_grad()
def watkins_q_lambda(
    reward: Tensor, discount: Tensor, valid: Tensor, next_value: Tensor, greedy: Tensor, trace_decay: float
) -> Tensor:
    """Watkins's Q(lambda) (Watkins 1989): targets of the transitions of a chunk, [T, B].

    next_value: [T, B], max_a Q of the next step; greedy: [T, B], whether the action taken at the next step is greedy.
    The trace is cut after a non-greedy action, since what follows is not a return of the greedy policy. It is also cut
    at the last step of an episode or of the chunk.
    """
    ahead = torch.cat([valid[1:] & greedy[:-1], torch.zeros_like(valid[:1])])
    keep = trace_decay * ahead.to(next_value.dtype)
    return accumulate(reward + discount * (1 - keep) * next_value, discount * keep)


def lambda_returns(reward: Tensor, discount: Tensor, valid: Tensor, next_value: Tensor, trace_decay: float) -> Tensor:
    """lambda-returns: G_t = r_t + discount_t ((1 - lambda) V_{t+1} + lambda G_{t+1}), [T, B]; at the end G = V."""
    return watkins_q_lambda(reward, discount, valid, next_value, torch.ones_like(valid), trace_decay)


class NStep(NamedTuple):
    """n-step return (Sutton & Barto, ch. 7): reward + discount * value of the bootstrap step."""

    reward: Tensor  # [L, B] discounted sum of the rewards of up to n transitions
    discount: Tensor  # [L, B] product of their discounts; 0 after a terminal step
    bootstrap_step: Tensor  # [L, B] index of the time step whose value completes the return

    def target(self, value: Tensor) -> Tensor:
        """value: [L, B], of the bootstrap steps."""
        return self.reward + self.discount * value


@torch.no_grad()
def n_step(reward: Tensor, discount: Tensor, valid: Tensor, n: int, length: int | None = None) -> NStep:
    """n-step returns of the first `length` transitions of a chunk (None: all).

    A return ends early with its episode; if the episode was truncated, it bootstraps from the last observation. It also
    ends early with the chunk: the last n - 1 transitions have fewer than n ahead.
    """
    length = len(reward) if length is None else length
    total, factor = torch.zeros_like(reward[:length]), torch.ones_like(reward[:length])
    step = torch.arange(length, device=reward.device)[:, None].repeat(1, reward.shape[1])
    active = torch.ones_like(valid[:length])
    for k in range(min(n, len(reward))):
        count = min(length, len(reward) - k)  # transitions that have a k-th one after them
        active[count:] = False
        active[:count] &= valid[k : k + count]
        on = active[:count]
        total[:count] += torch.where(on, factor[:count] * reward[k : k + count], 0)
        factor[:count] *= torch.where(on, discount[k : k + count], 1)
        step += active
    return NStep(total, factor, step)
