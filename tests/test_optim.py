"""The two variants of RMSProp and Adam, each against its own equations."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bestiary.nets.optim import Adam, RmsProp, RmsPropTf

STEPS = 25
GRADIENTS = np.random.default_rng(7).normal(0, [[1e-3], [0.1], [1.0], [30.0]], (STEPS, 4, 5))


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5))


def walk(cfg: Any, gradients: np.ndarray = GRADIENTS) -> np.ndarray:
    """The parameters after each update with given gradients."""
    module = Weights()
    optimizer = cfg.build(module)
    path = []
    for gradient in gradients:
        module.p.grad = torch.from_numpy(gradient)
        optimizer.step()
        path.append(module.p.detach().numpy().copy())
    return np.stack(path)


def tensorflow_loop(cfg: RmsPropTf) -> np.ndarray:
    p = Weights().p.detach().numpy().copy()
    m, b, c = np.ones_like(p), np.zeros_like(p), np.zeros_like(p)
    path = []
    for g in GRADIENTS:
        m = cfg.alpha * m + (1 - cfg.alpha) * g**2
        c = cfg.alpha * c + (1 - cfg.alpha) * g
        b = cfg.momentum * b + cfg.lr * g / np.sqrt(m - cfg.centred * c**2 + cfg.eps)
        p = p - b
        path.append(p)
    return np.stack(path)


def pytorch_loop(cfg: RmsProp) -> np.ndarray:
    p = Weights().p.detach().numpy().copy()
    m, b, c = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    path = []
    for g in GRADIENTS:
        m = cfg.alpha * m + (1 - cfg.alpha) * g**2
        c = cfg.alpha * c + (1 - cfg.alpha) * g
        b = cfg.momentum * b + g / (np.sqrt(m - cfg.centred * c**2) + cfg.eps)
        p = p - cfg.lr * b
        path.append(p)
    return np.stack(path)


SETTINGS = [
    {},
    {"lr": 0.01, "alpha": 0.9, "eps": 0.1},
    {"lr": 0.003, "alpha": 0.99, "eps": 1e-4, "momentum": 0.7},
    {"lr": 0.003, "alpha": 0.95, "eps": 1e-4, "centred": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tensorflows_rmsprop_follows_its_equations(settings):
    cfg = RmsPropTf(**settings)
    np.testing.assert_allclose(walk(cfg), tensorflow_loop(cfg), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_pytorchs_rmsprop_follows_its_equations(settings):
    cfg = RmsProp(**settings)
    np.testing.assert_allclose(walk(cfg), pytorch_loop(cfg), rtol=1e-12, atol=1e-14)


def test_the_first_tensorflow_step_by_hand():
    # g = 2: m = 3/4 * 1 + 1/4 * 4 = 7/4, and 7/4 + 1/2 = (3/2)^2, so p falls by lr * 2 / (3/2)
    cfg = RmsPropTf(lr=0.3, alpha=0.75, eps=0.5)
    moved = walk(cfg, np.full((1, 4, 5), 2.0))[0] - Weights().p.detach().numpy()
    np.testing.assert_allclose(moved, -0.4, rtol=1e-12)


def test_the_same_settings_differ_between_the_two_rmsprops():
    numbers = {"lr": 6e-4, "alpha": 0.99, "eps": 0.01, "momentum": 0.0}
    start = Weights().p.detach().numpy()
    tensorflow, pytorch = (walk(cfg(**numbers))[0] - start for cfg in (RmsPropTf, RmsProp))
    # a unit gradient at first: lr / sqrt(0.99 + 0.01 + 0.01) against lr / (0.1 + 0.01)
    ratio = pytorch[2] / tensorflow[2]
    assert (ratio > 1.5).all()
    assert not np.allclose(walk(RmsPropTf(**numbers)), walk(RmsProp(**numbers)), rtol=0.01, atol=0)


def test_parameters_without_a_gradient_do_not_change():
    module = Weights()
    optimizer = RmsPropTf(momentum=0.9).build(module)
    optimizer.step()
    assert torch.equal(module.p, Weights().p)
    assert not optimizer.state


def test_the_learning_rate_can_be_changed_between_steps():
    module = Weights()
    optimizer = RmsPropTf(lr=1.0).build(module)
    optimizer.param_groups[0]["lr"] = 0.0
    module.p.grad = torch.ones_like(module.p)
    optimizer.step()
    assert torch.equal(module.p, Weights().p)


@pytest.mark.parametrize(
    "cfg", [RmsPropTf(momentum=0.5), RmsProp(momentum=0.5), Adam()], ids=lambda c: type(c).__name__
)
def test_an_optimizer_resumes_from_its_saved_state(cfg):
    module = Weights()
    optimizer = cfg.build(module)
    for gradient in GRADIENTS[:10]:
        module.p.grad = torch.from_numpy(gradient)
        optimizer.step()

    again = Weights()
    again.load_state_dict(module.state_dict())
    restored = cfg.build(again)
    restored.load_state_dict(optimizer.state_dict())
    for gradient in GRADIENTS[10:]:
        again.p.grad = torch.from_numpy(gradient)
        restored.step()
    assert np.array_equal(again.p.detach().numpy(), walk(cfg)[-1])


def test_adam_follows_its_equations():
    cfg = Adam(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-3)
    p = Weights().p.detach().numpy().copy()
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(GRADIENTS, start=1):
        m = cfg.beta1 * m + (1 - cfg.beta1) * g
        v = cfg.beta2 * v + (1 - cfg.beta2) * g**2
        p = p - cfg.lr * (m / (1 - cfg.beta1**t)) / (np.sqrt(v / (1 - cfg.beta2**t)) + cfg.eps)
    np.testing.assert_allclose(walk(cfg)[-1], p, rtol=1e-10)
