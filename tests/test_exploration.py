"""How much each slot explores: always the same, or less the better it knows what it sees."""

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


def row(obs: Tensor, prev_action: list[int] | None = None) -> TimeStep:
    B = len(obs)
    none = torch.zeros(B, dtype=torch.bool)
    action = torch.tensor(prev_action) if prev_action is not None else torch.zeros(B, dtype=torch.int64)
    return TimeStep(obs, action, torch.zeros(B), none, none)


def test_a_fixed_explorer_says_the_same_of_every_row():
    explorer = FixedExploration(torch.tensor([0.0, 0.25, 1.0]))
    for obs in (torch.zeros(3, 2), torch.randn(3, 2)):
        assert explorer(row(obs)).tolist() == [0.0, 0.25, 1.0]
    explorer.load_state_dict(explorer.state_dict())
    assert explorer(row(obs)).tolist() == [0.0, 0.25, 1.0]


def one(value: float) -> Tensor:
    return torch.tensor([[value, 0.0]])


def opening(obs: Tensor) -> TimeStep:
    return row(obs)._replace(is_first=torch.ones(len(obs), dtype=torch.bool))


def test_what_an_episode_shows_often_is_explored_less_each_time():
    """A corridor of ten steps: as much in all of it as at its beginning, and as at the junction."""
    explorer = CountBasedExploration(0.4)
    for _ in range(50):
        told = [explorer(opening(one(1.0))).item()]
        told += [explorer(row(one(0.0))).item() for _ in range(10)]
        told += [explorer(row(one(7.0))).item()]
    assert told[0] == told[-1] == pytest.approx(0.4)
    assert sum(told[1:-1]) == pytest.approx(0.4, rel=0.02)


def test_what_few_episodes_show_is_explored_no_more_than_what_all_do():
    explorer = CountBasedExploration(0.4)
    for _ in range(9):
        explorer(opening(one(1.0)))
    assert explorer(row(one(5.0))).item() == pytest.approx(0.4)


def test_the_row_that_opens_an_episode_is_not_one_that_the_first_action_led_to():
    explorer = CountBasedExploration(1.0)
    for _ in range(20):
        explorer(row(one(0.0), [0]))
    assert explorer(opening(one(0.0))).item() == 1.0  # seen once in one episode
    assert explorer(row(one(0.0), [0])).item() == pytest.approx(1 / 21)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_observations_and_the_actions_that_led_to_them_are_counted_apart(dtype):
    """Against a dictionary: pictures or vectors of few values, so that each is seen again and again."""
    rng = torch.Generator().manual_seed(1)
    explorer, seen, episodes = CountBasedExploration(0.9), Counter(), 0
    for _ in range(200):
        obs = torch.randint(3, (4, 1, 2, 2), generator=rng).to(dtype)
        action = torch.randint(2, (4,), generator=rng)
        first = torch.rand(4, generator=rng) < 0.02
        told = explorer(row(obs, action.tolist())._replace(is_first=first))
        episodes += int(first.sum())
        before = torch.where(first, -1, action).tolist()
        keys = [(tuple(o.flatten().tolist()), a) for o, a in zip(obs, before, strict=True)]
        seen.update(keys)  # slots that see the same in one row all count before any is told
        assert told.tolist() == pytest.approx([0.9 * min(1, episodes / seen[k]) for k in keys], rel=1e-6)
    assert len(seen) > 100 and 4 < episodes < 40


def test_slots_that_see_the_same_at_once_know_it_from_each_other():
    explorer = CountBasedExploration(0.6)
    explorer(opening(one(9.0)))
    assert explorer(row(torch.tensor([[1.0], [2.0], [1.0], [1.0]]))).tolist() == pytest.approx([0.2, 0.6, 0.2, 0.2])


def test_a_small_difference_anywhere_is_a_difference():
    explorer = CountBasedExploration(1.0)
    picture = torch.full((1, 3, 5, 5), 204, dtype=torch.uint8)
    explorer(opening(picture))
    explorer(row(picture))
    assert explorer(row(picture)).item() == 0.5
    for place in range(75):
        changed = picture.clone()
        changed.view(-1)[place] += 1
        assert explorer(row(changed)).item() == 1.0
    swapped = picture.clone()
    swapped.view(-1)[0], swapped.view(-1)[1] = 203, 205  # the same bytes in all
    assert explorer(row(swapped)).item() == 1.0


def test_many_observations_hardly_ever_share_a_place():
    count = 4_000
    codes = torch.arange(count)[:, None] // (4 ** torch.arange(6)) % 4  # corridors and rooms: few values, much alike
    for obs in (codes.float(), codes.to(torch.uint8), torch.rand(count, 3)):
        explorer = CountBasedExploration(1.0)
        explorer(row(obs))
        # by chance count^2 / 2 pairs meet in 2^20 places: about 8
        assert np.count_nonzero(explorer.counts) > count - 40


@pytest.mark.parametrize("empty", [True, False])
def test_what_was_counted_is_saved_and_restored(empty):
    explorer, other = CountBasedExploration(0.7), CountBasedExploration(0.7)
    rows = [row(torch.randint(3, (4, 3)).float())._replace(is_first=torch.rand(4) < 0.1) for _ in range(30)]
    for r in [] if empty else rows[:20]:
        explorer(r)
    for r in rows[5:9]:
        other(r)  # what was there before is replaced
    file = io.BytesIO()
    torch.save(explorer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for r in rows[20:]:
        assert torch.equal(explorer(r), other(r))


def test_nothing_saved_means_nothing_seen():
    explorer = CountBasedExploration(0.7)
    for _ in range(3):
        explorer(row(one(1.0)))
    explorer.load_state_dict({})
    assert explorer(opening(one(1.0))).item() == pytest.approx(0.7)


# -- what an action is ---------------------------------------------------------------------------------------------


def test_without_epsilon_the_best_action_is_taken():
    q = torch.randn(1000, 5)
    assert torch.equal(epsilon_greedy(q, torch.zeros(1000), torch.Generator().manual_seed(0)), q.argmax(-1))


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("actions", [2, 3, 18])
def test_any_action_is_as_likely_as_another_when_chance_decides(epsilon, actions):
    n = 40_000
    q = torch.zeros(n, actions)
    q[:, 1] = 1.0
    drawn = epsilon_greedy(q, torch.full((n,), epsilon), torch.Generator().manual_seed(2))
    for action in range(actions):
        p = epsilon / actions + (1 - epsilon) * (action == 1)
        assert (drawn == action).double().mean().item() == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / n))


def test_each_slot_has_its_own_epsilon():
    n = 20_000
    q = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(n, 4)
    epsilon = torch.tensor([0.0, 0.4]).repeat(n // 2)
    best = epsilon_greedy(q, epsilon, torch.Generator().manual_seed(3)) == 3
    assert best[0::2].all()
    assert best[1::2].double().mean().item() == pytest.approx(0.7, abs=5 * math.sqrt(0.21 / (n / 2)))


def test_chance_comes_from_the_generator_alone():
    q, epsilon = torch.randn(50, 9), torch.full((50,), 0.8)
    first = epsilon_greedy(q, epsilon, torch.Generator().manual_seed(5))
    torch.rand(3)
    assert torch.equal(first, epsilon_greedy(q, epsilon, torch.Generator().manual_seed(5)))
    assert not torch.equal(first, epsilon_greedy(q, epsilon, torch.Generator().manual_seed(6)))
