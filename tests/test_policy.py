"""Categorical policies and reward clipping, by numbers derived by hand."""

import math

import pytest
import torch

from bestiary.ops.policy import clip_reward, entropy, log_prob, sample

# softmax of these is (1/2, 1/3, 1/6): logits are only known up to a constant
LOGITS = torch.tensor([math.log(3.0), math.log(2.0), 0.0], dtype=torch.float64)
PROBABILITIES = [1 / 2, 1 / 3, 1 / 6]


def test_log_prob_is_the_logarithm_of_the_probability():
    for action, p in enumerate(PROBABILITIES):
        assert log_prob(LOGITS, torch.tensor(action)).item() == pytest.approx(math.log(p), rel=1e-14)


def test_log_prob_does_not_see_a_constant_added_to_the_logits():
    action = torch.tensor([0, 1, 2])
    shifted = log_prob(LOGITS.expand(3, 3) + torch.tensor([[-7.0], [0.0], [1000.0]]), action)
    torch.testing.assert_close(shifted.exp(), torch.tensor(PROBABILITIES, dtype=torch.float64))


def test_log_prob_selects_each_entrys_own_action_in_any_shape():
    logits = torch.randn(4, 3, 5, dtype=torch.float64)
    action = torch.randint(5, (4, 3))
    out = log_prob(logits, action)
    assert out.shape == (4, 3)
    for t in range(4):
        for b in range(3):
            weights = [math.exp(x) for x in logits[t, b].tolist()]
            assert out[t, b].item() == pytest.approx(math.log(weights[action[t, b]] / sum(weights)), rel=1e-12)


def test_log_prob_pushes_towards_the_action_and_away_from_the_others():
    logits = LOGITS.clone().requires_grad_()
    log_prob(logits, torch.tensor(1)).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([-1 / 2, 1 - 1 / 3, -1 / 6], dtype=torch.float64))


def test_entropy_by_hand():
    # 1/2 log 2 + 1/3 log 3 + 1/6 log 6 = 2/3 log 2 + 1/2 log 3
    assert entropy(LOGITS).item() == pytest.approx(2 / 3 * math.log(2) + math.log(3) / 2, rel=1e-14)


def test_entropy_is_largest_for_the_uniform_policy():
    assert entropy(torch.zeros(2, 7, dtype=torch.float64)).tolist() == pytest.approx([math.log(7)] * 2)


def test_entropy_of_a_deterministic_policy_is_zero_with_finite_gradient():
    logits = torch.tensor([1000.0, 0.0, -1000.0], requires_grad=True)
    value = entropy(logits)
    value.backward()
    assert value.item() == 0.0
    assert torch.isfinite(logits.grad).all()


def test_entropy_has_the_right_gradient():
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entropy, logits)


def test_sample_has_the_frequencies_of_the_policy():
    n = 60_000
    sampled = sample(LOGITS.expand(n, 3), torch.Generator().manual_seed(1))
    assert sampled.shape == (n,)
    for action, p in enumerate(PROBABILITIES):
        five_sigma = 5 * math.sqrt(p * (1 - p) / n)
        assert (sampled == action).double().mean().item() == pytest.approx(p, abs=five_sigma)


def test_sample_uses_each_batch_entrys_own_policy():
    certain = torch.full((4, 4), -1000.0).fill_diagonal_(1000.0)
    assert sample(certain, torch.Generator().manual_seed(0)).tolist() == [0, 1, 2, 3]


def test_sample_depends_on_its_generator_and_on_nothing_else():
    logits = torch.zeros(50, 9)
    first = sample(logits, torch.Generator().manual_seed(5))
    torch.rand(3)  # advances the global random stream
    assert torch.equal(first, sample(logits, torch.Generator().manual_seed(5)))
    assert not torch.equal(first, sample(logits, torch.Generator().manual_seed(6)))


REWARDS = torch.tensor([-100.0, -1.0, -0.25, 0.0, 0.25, 1.0, 100.0], dtype=torch.float64)


def test_abs_one_clamps_to_the_unit_interval():
    assert clip_reward(REWARDS, "abs_one").tolist() == [-1.0, -1.0, -0.25, 0.0, 0.25, 1.0, 1.0]


def test_soft_asymmetric_is_tanh_with_smaller_negative_rewards():
    # tanh(1) = (e^2 - 1) / (e^2 + 1), tanh(1/4) = (e^(1/2) - 1) / (e^(1/2) + 1)
    one = (math.e**2 - 1) / (math.e**2 + 1)
    quarter = (math.e**0.5 - 1) / (math.e**0.5 + 1)
    expected = [-0.3, -0.3 * one, -0.3 * quarter, 0.0, 5 * quarter, 5 * one, 5.0]
    assert clip_reward(REWARDS, "soft_asymmetric").tolist() == pytest.approx(expected, rel=1e-14)


def test_none_does_not_change_rewards():
    assert torch.equal(clip_reward(REWARDS, "none"), REWARDS)
