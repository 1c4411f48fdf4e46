"""Optimisers as numbers. RMSProp comes in two dialects that are not the same algorithm."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bestiary.errors import UserError


class TensorflowRmsProp(torch.optim.Optimizer):
    """m <- alpha m + (1 - alpha) g^2, m_0 = 1;  b <- momentum b + lr g / sqrt(m + eps);  p <- p - b.

    Centred: m - c^2 in place of m, where c <- alpha c + (1 - alpha) g, c_0 = 0: a variance in place of a square.
    PyTorch's version starts m at 0 and adds epsilon outside the root, so its epsilon is another number.
    """

    def __init__(self, params: Any, lr: float, alpha: float, eps: float, momentum: float, centred: bool) -> None:
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum, "centred": centred})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["square_avg"] = torch.ones_like(p)
                    state["momentum_buffer"] = torch.zeros_like(p)
                m, b = state["square_avg"], state["momentum_buffer"]
                m.mul_(group["alpha"]).addcmul_(p.grad, p.grad, value=1 - group["alpha"])
                if group.get("centred"):  # not in checkpoints of 0.1
                    c = state.setdefault("grad_avg", torch.zeros_like(p))
                    m = m.addcmul(c.lerp_(p.grad, 1 - group["alpha"]), c, value=-1)
                b.mul_(group["momentum"]).addcdiv_(p.grad, (m + group["eps"]).sqrt_(), value=group["lr"])
                p.sub_(b)


class LrSchedule:
    """Learning rates that fall in a line to a share of them, or nothing, over a budget; None: that stay."""

    def __init__(self, optimizer: torch.optim.Optimizer, budget: float | None, last: float = 0.0) -> None:
        self.optimizer = optimizer
        self.last = last
        self.budget = None if budget is None else max(1.0, budget)
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def at(self, spent: float) -> None:
        spent = 0.0 if self.budget is None else min(1.0, spent / self.budget)
        share = 1 - (1 - self.last) * spent
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share


def parameters(module: nn.Module | list[dict[str, Any]]) -> Any:
    """All of a module, or the groups given, each of which may have a rate of its own."""
    return module.parameters() if isinstance(module, nn.Module) else module


@dataclass(frozen=True)
class _Rates:
    lr: float

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise UserError(f"optimizer.lr={self.lr} must be positive")


@dataclass(frozen=True)
class RmsProp(_Rates):
    """PyTorch's RMSProp: epsilon outside the root (MonoBeast, PolyBeast)."""

    lr: float = 4.8e-4
    alpha: float = 0.99
    eps: float = 0.01
    momentum: float = 0.0
    centred: bool = False
    """by the variance of gradients instead of their squares"""

    def build(self, module: nn.Module | list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(
            parameters(module),
            lr=self.lr,
            alpha=self.alpha,
            eps=self.eps,
            momentum=self.momentum,
            centered=self.centred,
        )


@dataclass(frozen=True)
class RmsPropTf(_Rates):
    """TensorFlow's RMSProp: epsilon inside the root, second moment starts at one (the IMPALA paper)."""

    lr: float = 6e-4
    alpha: float = 0.99
    eps: float = 0.01
    momentum: float = 0.0
    centred: bool = False
    """by the variance of gradients instead of their squares"""

    def build(self, module: nn.Module | list[dict[str, Any]]) -> torch.optim.Optimizer:
        return TensorflowRmsProp(parameters(module), self.lr, self.alpha, self.eps, self.momentum, self.centred)


@dataclass(frozen=True)
class Adam(_Rates):
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def build(self, module: nn.Module | list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters(module), lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weights that shrink by themselves, in proportion to the learning rate."""

    weight_decay: float = 1e-4

    def build(self, module: nn.Module | list[dict[str, Any]]) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(
            parameters(module),
            lr=self.lr,
            betas=betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )


OptimizerConfig = RmsProp | RmsPropTf | Adam | AdamW
