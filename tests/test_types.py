"""Rows become moves: every line of the boundary table of the design, and what holds for all of them."""

import pytest
import torch
from torch import Tensor

from bestiary.types import Spec, TimeStep, Transitions, transitions

GAMMA = 0.75  # exact in binary, so discounts can be compared with ==


def rows(is_first: list[int], is_terminal: list[int], reward: list[float] | None = None) -> TimeStep:
    """One stream, told row by row."""
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


def told(m: Transitions) -> list[tuple[bool, float]]:
    """(valid, discount) of each move; where there is no move its discount means nothing."""
    return [(v, d if v else 0.0) for v, d in zip(column(m.valid), column(m.discount), strict=True)]


def test_an_ordinary_move_is_valid_and_discounted():
    assert told(transitions(rows([0, 0], [0, 0]), GAMMA)) == [(True, GAMMA)]


def test_the_first_row_of_an_episode_can_be_left_like_any_other():
    assert told(transitions(rows([1, 0, 0], [0, 0, 0]), GAMMA)) == [(True, GAMMA), (True, GAMMA)]


def test_a_true_end_is_a_valid_move_beyond_which_nothing_lies():
    assert told(transitions(rows([0, 0], [0, 1]), GAMMA)) == [(True, 0.0)]


def test_a_time_limit_bootstraps_from_the_real_last_observation():
    # rows: in play, the last observation of the episode, the first of the next
    m = transitions(rows([0, 0, 1], [0, 0, 0]), GAMMA)
    assert told(m) == [(True, GAMMA), (False, 0.0)]


def test_the_last_row_of_an_episode_does_not_lead_into_the_next():
    assert column(transitions(rows([0, 1], [0, 0]), GAMMA).valid) == [False]
    assert column(transitions(rows([0, 1], [1, 0]), GAMMA).valid) == [False]


def test_a_lost_life_ends_value_but_not_the_game():
    # the row after the terminal one is not is_first: the game and the memory go on
    m = transitions(rows([0, 0, 0, 0], [0, 1, 0, 0]), GAMMA)
    assert told(m) == [(True, 0.0), (True, GAMMA), (True, GAMMA)]


def test_padding_is_a_run_of_one_row_episodes():
    m = transitions(rows([0, 1, 1, 1], [0, 0, 0, 0]), GAMMA)
    assert column(m.valid) == [False, False, False]


def test_padding_stays_without_moves_even_if_marked_terminal():
    m = transitions(rows([0, 1, 1], [0, 1, 1]), GAMMA)
    assert column(m.valid) == [False, False]


def test_nothing_is_carried_over_where_there_is_no_move():
    # returns multiply by the discount: it must be 0 at a border, or the next episode would leak in
    m = transitions(rows([0, 1, 0, 1, 1], [0, 0, 0, 0, 0]), GAMMA)
    assert column(m.discount) == [0.0, GAMMA, 0.0, 0.0]


def test_a_whole_story_of_ends_limits_lives_and_padding():
    is_first = [1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 1]
    is_terminal = [0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0]  # a true end in row 2, a limit after row 5, a life in row 7
    m = transitions(rows(is_first, is_terminal), GAMMA)
    assert column(m.valid) == [True, True, False, True, True, False, True, True, False, False]
    assert column(m.discount) == [GAMMA, 0, 0, GAMMA, GAMMA, 0, 0, GAMMA, 0, 0]


def test_the_reward_of_a_move_is_told_by_the_row_it_leads_to():
    m = transitions(rows([1, 0, 0], [0, 0, 1], reward=[0.0, 2.0, -3.0]), GAMMA)
    assert column(m.reward) == [2.0, -3.0]


def test_streams_do_not_look_at_each_other():
    parts = [rows([0, 0, 1], [0, 0, 0]), rows([1, 0, 0], [0, 1, 0]), rows([1, 1, 1], [0, 0, 0])]
    collective = transitions(TimeStep(*(torch.cat(xs, 1) for xs in zip(*parts, strict=True))), GAMMA)
    for b, part in enumerate(parts):
        alone = transitions(part, GAMMA)
        for whole, single in zip(collective, alone, strict=True):
            assert torch.equal(whole[:, b], single[:, 0])


def test_one_row_tells_of_no_move():
    assert all(x.shape == (0, 1) for x in transitions(rows([1], [0]), GAMMA))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_discount_has_the_precision_of_the_reward(dtype):
    step = rows([0, 0], [0, 0])
    m = transitions(step._replace(reward=step.reward.to(dtype)), 0.997)
    assert m.discount.dtype == dtype
    assert m.discount.item() == torch.tensor(0.997, dtype=dtype).item()


def test_three_axes_make_a_picture():
    assert Spec("a", (1, 84, 84), torch.uint8, 6).is_image
    assert not Spec("b", (4,), torch.float32, 2).is_image
