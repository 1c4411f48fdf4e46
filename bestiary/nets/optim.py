"""Optimizer settings, TensorFlow's variant of RMSProp, and the learning rate schedule."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bestiary.errors import UserError


class TensorflowRmsProp(torch.optim.Optimizer):
    """RMSProp (Tieleman & Hinton 2012) as in TensorFlow.

    m <- alpha m + (1 - alpha) g^2, m_0 = 1;  b <- momentum b + lr g / sqrt(m + eps);  p <- p - b.
    Centred (Graves 2013): the variance m - c^2 in place of m, where c <- alpha c + (1 - alpha) g, c_0 = 0.
    PyTorch's RMSProp starts with m_0 = 0 and adds epsilon outside the root, so its epsilon has another scale.
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
    """Linear learning rate decay from lr to last * lr over a budget of steps; budget None: constant rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, budget: float | None, last: float = 0.0) -> None:
        self.optimizer = optimizer
        self.last = last
        self.budget = None if budget is None else max(1.0, budget)
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def at(self, spent: float) -> None:
        """Set the learning rates for `spent` of the budget."""
        spent = 0.0 if self.budget is None else min(1.0, spent / self.budget)
        factor = 1 - (1 - self.last) * spent
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor


def parameters(module: nn.Module | list[dict[str, Any]]) -> Any:
    """The parameters of a module, or the given parameter groups, which may have learning rates of their own."""
    return module.parameters() if isinstance(module, nn.Module) else module


@dataclass(frozen=True)
class _LearningRate:
    lr: float
    """learning rate"""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise UserError(f"optimizer.lr={self.lr} must be positive")


@dataclass(frozen=True)
class RmsProp(_LearningRate):
    """RMSProp as in PyTorch: epsilon is added outside the root (MonoBeast, PolyBeast)."""

    lr: float = 4.8e-4
    """learning rate (TorchBeast: 4.8e-4)"""
    alpha: float = 0.99
    """smoothing constant of the squared gradients (TorchBeast: 0.99)"""
    eps: float = 0.01
    """epsilon, added outside the root (TorchBeast: 0.01)"""
    momentum: float = 0.0
    """momentum factor; 0: none"""
    centred: bool = False
    """centred RMSProp: normalise by the variance of the gradients instead of their second moment (Graves 2013)"""

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
class RmsPropTf(_LearningRate):
    """RMSProp as in TensorFlow: epsilon inside the root, second moment starts at one (the IMPALA paper)."""

    lr: float = 6e-4
    """learning rate (IMPALA: 6e-4)"""
    alpha: float = 0.99
    """smoothing constant of the squared gradients (IMPALA: 0.99)"""
    eps: float = 0.01
    """epsilon, added inside the root (IMPALA: 0.01)"""
    momentum: float = 0.0
    """momentum factor; 0: none (IMPALA: 0)"""
    centred: bool = False
    """centred RMSProp: normalise by the variance of the gradients instead of their second moment (Graves 2013)"""

    def build(self, module: nn.Module | list[dict[str, Any]]) -> torch.optim.Optimizer:
        return TensorflowRmsProp(parameters(module), self.lr, self.alpha, self.eps, self.momentum, self.centred)


@dataclass(frozen=True)
class Adam(_LearningRate):
    """Adam (Kingma & Ba 2015)."""

    lr: float = 1e-3
    """learning rate"""
    beta1: float = 0.9
    """decay rate of the first moment of the gradients"""
    beta2: float = 0.999
    """decay rate of the second moment of the gradients"""
    eps: float = 1e-8
    """epsilon, added outside the root (R2D2: 1e-3)"""

    def build(self, module: nn.Module | list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters(module), lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps)


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    weight_decay: float = 1e-4
    """decoupled weight decay: per update, weights shrink by lr * weight_decay"""

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
