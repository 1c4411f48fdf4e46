"""Transitions between time steps: every line of the table of boundaries in docs/trajectory.md, and invariants."""

import pytest
import torch
from torch import Tensor

from bestiary.types import Spec, TimeStep, Transitions, transitions

GAMMA = 0.75  # exact in binary, so discounts can be compared with ==


def steps(is_first: list[int], is_terminal: list[int], reward: list[float] | None = None) -> TimeStep:
    """The time steps of one stream."""
    T = len(is_first)
    return TimeStep(
        obs=torch.zeros(T, 1, 2),
        prev_action=torch.zeros(T, 1, dtype=torch.int64),
        reward=torch.tensor(reward or [0.0] * T)[:, None],
        is_first=torch.tensor(is_first, dtype=torch.bool)[:, None],
        is_terminal=torch.tensor(is_terminal, dtype=torch.bool)[:, None],
    )


def column(x: Tensor) -> list:
    return x[:, 0].tolist()


def valid_and_discount(m: Transitions) -> list[tuple[bool, float]]:
    """(valid, discount) of each transition; the discount of an invalid one means nothing."""
    return [(v, d if v else 0.0) for v, d in zip(column(m.valid), column(m.discount), strict=True)]


def test_an_ordinary_transition_is_valid_and_discounted():
    assert valid_and_discount(transitions(steps([0, 0], [0, 0]), GAMMA)) == [(True, GAMMA)]


def test_a_transition_leads_from_the_first_step_of_an_episode():
    assert valid_and_discount(transitions(steps([1, 0, 0], [0, 0, 0]), GAMMA)) == [(True, GAMMA), (True, GAMMA)]


def test_a_termination_is_a_valid_transition_with_discount_0():
    assert valid_and_discount(transitions(steps([0, 0], [0, 1]), GAMMA)) == [(True, 0.0)]


def test_a_time_limit_bootstraps_from_the_real_last_observation():
    # steps: within the episode, the last observation of the episode, the first of the next
    m = transitions(steps([0, 0, 1], [0, 0, 0]), GAMMA)
    assert valid_and_discount(m) == [(True, GAMMA), (False, 0.0)]


def test_no_transition_leads_from_one_episode_into_the_next():
    assert column(transitions(steps([0, 1], [0, 0]), GAMMA).valid) == [False]
    assert column(transitions(steps([0, 1], [1, 0]), GAMMA).valid) == [False]


def test_a_lost_life_ends_the_value_but_not_the_episode():
    # the step after the terminal one is not is_first: the episode and the recurrent state continue
    m = transitions(steps([0, 0, 0, 0], [0, 1, 0, 0]), GAMMA)
    assert valid_and_discount(m) == [(True, 0.0), (True, GAMMA), (True, GAMMA)]


def test_padding_is_a_run_of_one_step_episodes():
    m = transitions(steps([0, 1, 1, 1], [0, 0, 0, 0]), GAMMA)
    assert column(m.valid) == [False, False, False]


def test_terminal_padding_has_no_valid_transition_either():
    m = transitions(steps([0, 1, 1], [0, 1, 1]), GAMMA)
    assert column(m.valid) == [False, False]


def test_the_discount_of_an_invalid_transition_is_0():
    # returns multiply by the discount, so that nothing of the next episode enters
    m = transitions(steps([0, 1, 0, 1, 1], [0, 0, 0, 0, 0]), GAMMA)
    assert column(m.discount) == [0.0, GAMMA, 0.0, 0.0]


def test_termination_truncation_lost_lives_and_padding_in_one_stream():
    is_first = [1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 1]
    is_terminal = [
        0,
        0,
        1,
        0,
        0,
        0,
        0,
        1,
        0,
        0,
        0,
    ]  # termination in step 2, truncation after step 5, a lost life in step 7
    m = transitions(steps(is_first, is_terminal), GAMMA)
    assert column(m.valid) == [True, True, False, True, True, False, True, True, False, False]
    assert column(m.discount) == [GAMMA, 0, 0, GAMMA, GAMMA, 0, 0, GAMMA, 0, 0]


def test_the_reward_of_a_transition_is_that_of_its_next_step():
    m = transitions(steps([1, 0, 0], [0, 0, 1], reward=[0.0, 2.0, -3.0]), GAMMA)
    assert column(m.reward) == [2.0, -3.0]


def test_streams_are_independent():
    parts = [steps([0, 0, 1], [0, 0, 0]), steps([1, 0, 0], [0, 1, 0]), steps([1, 1, 1], [0, 0, 0])]
    together = transitions(TimeStep(*(torch.cat(xs, 1) for xs in zip(*parts, strict=True))), GAMMA)
    for b, part in enumerate(parts):
        alone = transitions(part, GAMMA)
        for whole, single in zip(together, alone, strict=True):
            assert torch.equal(whole[:, b], single[:, 0])


def test_one_step_makes_no_transition():
    assert all(x.shape == (0, 1) for x in transitions(steps([1], [0]), GAMMA))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_discount_has_the_precision_of_the_reward(dtype):
    step = steps([0, 0], [0, 0])
    m = transitions(step._replace(reward=step.reward.to(dtype)), 0.997)
    assert m.discount.dtype == dtype
    assert m.discount.item() == torch.tensor(0.997, dtype=dtype).item()


def test_observations_with_three_axes_are_images():
    assert Spec("a", (1, 84, 84), torch.uint8, 6).is_image
    assert not Spec("b", (4,), torch.float32, 2).is_image
