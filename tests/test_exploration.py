"""Explorers: fixed numbers per environment, and count-based exploration."""

import io
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from bestiary.algos.exploration import CountBasedExploration, FixedExploration
from bestiary.ops.policy import epsilon_greedy
from bestiary.types import TimeStep


def step_of(obs: Tensor, prev_action: list[int] | None = None) -> TimeStep:
    B = len(obs)
    none = torch.zeros(B, dtype=torch.bool)
    action = torch.tensor(prev_action) if prev_action is not None else torch.zeros(B, dtype=torch.int64)
    return TimeStep(obs, action, torch.zeros(B), none, none)


def test_a_fixed_explorer_returns_the_same_numbers_at_every_step():
    explorer = FixedExploration(torch.tensor([0.0, 0.25, 1.0]))
    for obs in (torch.zeros(3, 2), torch.randn(3, 2)):
        assert explorer(step_of(obs)).tolist() == [0.0, 0.25, 1.0]
    explorer.load_state_dict(explorer.state_dict())
    assert explorer(step_of(obs)).tolist() == [0.0, 0.25, 1.0]


def one(value: float) -> Tensor:
    return torch.tensor([[value, 0.0]])


def first_step(obs: Tensor) -> TimeStep:
    return step_of(obs)._replace(is_first=torch.ones(len(obs), dtype=torch.bool))


def test_what_an_episode_shows_often_is_explored_less():
    """A corridor of ten equal steps is explored as much in total as its first step, and as the junction."""
    explorer = CountBasedExploration(0.4)
    for _ in range(50):
        epsilons = [explorer(first_step(one(1.0))).item()]
        epsilons += [explorer(step_of(one(0.0))).item() for _ in range(10)]
        epsilons += [explorer(step_of(one(7.0))).item()]
    assert epsilons[0] == epsilons[-1] == pytest.approx(0.4)
    assert sum(epsilons[1:-1]) == pytest.approx(0.4, rel=0.02)


def test_rare_observations_are_explored_at_most_at_the_full_scale():
    explorer = CountBasedExploration(0.4)
    for _ in range(9):
        explorer(first_step(one(1.0)))
    assert explorer(step_of(one(5.0))).item() == pytest.approx(0.4)


def test_first_steps_are_counted_apart_from_steps_after_action_zero():
    explorer = CountBasedExploration(1.0)
    for _ in range(20):
        explorer(step_of(one(0.0), [0]))
    assert explorer(first_step(one(0.0))).item() == 1.0  # seen once in one episode
    assert explorer(step_of(one(0.0), [0])).item() == pytest.approx(1 / 21)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_observations_are_counted_together_with_the_previous_action(dtype):
    """Against a dictionary: images or vectors of few values, so that each repeats often."""
    rng = torch.Generator().manual_seed(1)
    explorer, seen, episodes = CountBasedExploration(0.9), Counter(), 0
    for _ in range(200):
        obs = torch.randint(3, (4, 1, 2, 2), generator=rng).to(dtype)
        action = torch.randint(2, (4,), generator=rng)
        first = torch.rand(4, generator=rng) < 0.02
        epsilons = explorer(step_of(obs, action.tolist())._replace(is_first=first))
        episodes += int(first.sum())
        before = torch.where(first, -1, action).tolist()
        keys = [(tuple(o.flatten().tolist()), a) for o, a in zip(obs, before, strict=True)]
        seen.update(keys)  # all environments are counted before any number is returned
        assert epsilons.tolist() == pytest.approx([0.9 * min(1, episodes / seen[k]) for k in keys], rel=1e-6)
    assert len(seen) > 100 and 4 < episodes < 40


def test_environments_share_their_counts_within_a_step():
    explorer = CountBasedExploration(0.6)
    explorer(first_step(one(9.0)))
    assert explorer(step_of(torch.tensor([[1.0], [2.0], [1.0], [1.0]]))).tolist() == pytest.approx([0.2, 0.6, 0.2, 0.2])


def test_a_small_difference_in_any_entry_is_another_observation():
    explorer = CountBasedExploration(1.0)
    image = torch.full((1, 3, 5, 5), 204, dtype=torch.uint8)
    explorer(first_step(image))
    explorer(step_of(image))
    assert explorer(step_of(image)).item() == 0.5
    for place in range(75):
        changed = image.clone()
        changed.view(-1)[place] += 1
        assert explorer(step_of(changed)).item() == 1.0
    swapped = image.clone()
    swapped.view(-1)[0], swapped.view(-1)[1] = 203, 205  # the same set of values
    assert explorer(step_of(swapped)).item() == 1.0


def test_many_observations_hardly_ever_share_a_bucket():
    count = 4_000
    # corridors and rooms: similar observations of few values
    codes = torch.arange(count)[:, None] // (4 ** torch.arange(6)) % 4
    for obs in (codes.float(), codes.to(torch.uint8), torch.rand(count, 3)):
        explorer = CountBasedExploration(1.0)
        explorer(step_of(obs))
        # expected collisions: count^2 / 2 pairs in 2^20 buckets, about 8
        assert np.count_nonzero(explorer.counts) > count - 40


@pytest.mark.parametrize("empty", [True, False])
def test_counts_are_saved_and_restored(empty):
    explorer, other = CountBasedExploration(0.7), CountBasedExploration(0.7)
    steps = [step_of(torch.randint(3, (4, 3)).float())._replace(is_first=torch.rand(4) < 0.1) for _ in range(30)]
    for r in [] if empty else steps[:20]:
        explorer(r)
    for r in steps[5:9]:
        other(r)  # is replaced by the loaded state
    file = io.BytesIO()
    torch.save(explorer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for r in steps[20:]:
        assert torch.equal(explorer(r), other(r))


def test_an_empty_state_resets_all_counts():
    explorer = CountBasedExploration(0.7)
    for _ in range(3):
        explorer(step_of(one(1.0)))
    explorer.load_state_dict({})
    assert explorer(first_step(one(1.0))).item() == pytest.approx(0.7)


# -- epsilon-greedy ------------------------------------------------------------------------------------------------


def test_epsilon_zero_takes_the_greedy_action():
    q = torch.randn(1000, 5)
    assert torch.equal(epsilon_greedy(q, torch.zeros(1000), torch.Generator().manual_seed(0)), q.argmax(-1))


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("actions", [2, 3, 18])
def test_random_actions_are_uniform(epsilon, actions):
    n = 40_000
    q = torch.zeros(n, actions)
    q[:, 1] = 1.0
    chosen = epsilon_greedy(q, torch.full((n,), epsilon), torch.Generator().manual_seed(2))
    for action in range(actions):
        p = epsilon / actions + (1 - epsilon) * (action == 1)
        assert (chosen == action).double().mean().item() == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / n))


def test_each_environment_has_its_own_epsilon():
    n = 20_000
    q = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(n, 4)
    epsilon = torch.tensor([0.0, 0.4]).repeat(n // 2)
    best = epsilon_greedy(q, epsilon, torch.Generator().manual_seed(3)) == 3
    assert best[0::2].all()
    assert best[1::2].double().mean().item() == pytest.approx(0.7, abs=5 * math.sqrt(0.21 / (n / 2)))


def test_random_numbers_come_from_the_generator_alone():
    q, epsilon = torch.randn(50, 9), torch.full((50,), 0.8)
    first = epsilon_greedy(q, epsilon, torch.Generator().manual_seed(5))
    torch.rand(3)
    assert torch.equal(first, epsilon_greedy(q, epsilon, torch.Generator().manual_seed(5)))
    assert not torch.equal(first, epsilon_greedy(q, epsilon, torch.Generator().manual_seed(6)))
