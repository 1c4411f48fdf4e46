"""Estimates of return from rows of experience. Time is axis 0, batch axis 1."""

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    targets: Tensor  # [T, B] v_s
    advantages: Tensor  # [T, B] rho_s (r_s + gamma v_{s+1} - V(x_s))


def accumulate(x: Tensor, keep: Tensor) -> Tensor:
    """y_t = x_t + keep_t y_{t+1}, nothing coming after the last row, [T, ...]: in log2(T) steps instead of T.

    Before each step y_t covers `span` rows, and keep_t is what becomes of the rows after them.
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

    log_rho, discount, reward, value: [T, B]; bootstrap: [B], the value of the row after the last.
    Where `valid` is false there is no move: the target is the value itself, which is what the move
    before it bootstraps from when an episode was cut by a time limit.
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
    """Watkins's Q(lambda): targets of the moves of a chunk, [T, B].

    next_value: [T, B], the value of the row each move leads to; greedy: [T, B], whether the action there was the best.
    What lies behind an action that was not the best says nothing of the best, so the trace is cut there. It is cut as
    well where the row led to is the last of its episode or of the chunk.
    """
    ahead = torch.cat([valid[1:] & greedy[:-1], torch.zeros_like(valid[:1])])
    keep = trace_decay * ahead.to(next_value.dtype)
    return accumulate(reward + discount * (1 - keep) * next_value, discount * keep)


def lambda_returns(reward: Tensor, discount: Tensor, valid: Tensor, next_value: Tensor, trace_decay: float) -> Tensor:
    """TD(lambda): G_t = r_t + discount_t ((1 - lambda) V_t+1 + lambda G_t+1), [T, B]; after the last move G is V."""
    return watkins_q_lambda(reward, discount, valid, next_value, torch.ones_like(valid), trace_decay)


class NStep(NamedTuple):
    """n moves ahead: a target is reward + discount * the value of the row reached."""

    reward: Tensor  # [L, B] discounted, of all moves on the way
    discount: Tensor  # [L, B] of what lies behind them; 0 where that is nothing
    row: Tensor  # [L, B] the row reached

    def target(self, value: Tensor) -> Tensor:
        """value: [L, B], of the rows reached."""
        return self.reward + self.discount * value


@torch.no_grad()
def n_step(reward: Tensor, discount: Tensor, valid: Tensor, n: int, length: int | None = None) -> NStep:
    """Where the first `length` moves of a chunk (None: all) lead in n moves.

    An episode that is over before has fewer; where it was cut by a time limit, its last row is reached. So it is at the
    end of the chunk: from its last n - 1 moves on, less than n lie ahead.
    """
    length = len(reward) if length is None else length
    total, factor = torch.zeros_like(reward[:length]), torch.ones_like(reward[:length])
    row = torch.arange(length, device=reward.device)[:, None].repeat(1, reward.shape[1])
    going = torch.ones_like(valid[:length])
    for k in range(min(n, len(reward))):
        there = min(length, len(reward) - k)  # moves that have a k-th after them
        going[there:] = False
        going[:there] &= valid[k : k + there]
        on = going[:there]
        total[:there] += torch.where(on, factor[:there] * reward[k : k + there], 0)
        factor[:there] *= torch.where(on, discount[k : k + there], 1)
        row += going
    return NStep(total, factor, row)
