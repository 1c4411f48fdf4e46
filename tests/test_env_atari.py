"""Atari: names of games, raw scores, single frames, lives, time limits, and the settings of the literature."""

import json
from contextlib import closing
from importlib.resources import files

import numpy as np
import pytest
import torch
from ale_py import Action
from ale_py.vector_env import AtariVectorEnv
from helpers.rollouts import Rollout, continue_rollout, different_fields, random_actions, roll_out

from bestiary.envs import Atari
from bestiary.envs.atari import rom_name
from bestiary.envs.env_batch import EnvBatch
from bestiary.seeding import TRAIN, derive
from bestiary.types import TimeStep

SCORES = json.loads(files("bestiary.envs").joinpath("atari_scores.json").read_text())


def make(env: Atari, num_envs: int = 1, seed: int = 0) -> EnvBatch:
    return env.make(num_envs, seed, TRAIN, 1)


def rollout_of(env: Atari, steps: int, num_envs: int = 1, seed: int = 0) -> Rollout:
    """A rollout of a random policy; equal arguments mean equal actions."""
    with closing(make(env, num_envs, seed)) as env_batch:
        return roll_out(env_batch, random_actions(env_batch.spec.num_actions, steps, num_envs, seed))


# -- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "rom"),
    [
        ("Pong", "pong"),
        ("pong", "pong"),
        ("PongNoFrameskip-v4", "pong"),
        ("PongDeterministic-v4", "pong"),
        ("Pong-v0", "pong"),
        ("ALE/Pong-v5", "pong"),
        ("MsPacman", "ms_pacman"),
        ("ms_pacman", "ms_pacman"),
        ("mspacman", "ms_pacman"),
        ("ALE/MsPacman-v5", "ms_pacman"),
        ("UpNDown", "up_n_down"),
        ("Riverraid", "riverraid"),
        ("Jamesbond", "jamesbond"),
    ],
)
def test_a_game_has_many_names(typed: str, rom: str):
    assert rom_name(typed) == rom


def test_every_game_of_the_literature_is_found_with_its_actions():
    wrong = {}
    for game, row in SCORES.items():
        with closing(make(Atari(game))) as env_batch:
            if (env_batch.spec.name, env_batch.spec.num_actions) != (game, row["actions_ale_py"]):
                wrong[game] = env_batch.spec
    assert len(SCORES) > 60
    assert wrong == {}


@pytest.mark.parametrize(
    ("typed", "meant"), [("Brekout", "Breakout"), ("MsPackman-v5", "MsPacman"), ("ALE/Pang-v5", "Pong")]
)
def test_a_misspelt_game_is_refused_with_the_nearest_names(typed: str, meant: str):
    with pytest.raises(ValueError, match=f"no Atari game '{typed}': did you mean .*{meant}") as refusal:
        make(Atari(typed))
    assert "\n" not in str(refusal.value)


def test_an_unknown_game_is_refused_with_a_hint_at_the_list():
    with pytest.raises(ValueError, match="no Atari game 'xyzzyxyzzy': see `bestiary list games`"):
        make(Atari("xyzzyxyzzy"))


@pytest.mark.parametrize(
    "wrong", [{"sticky": 1.0}, {"sticky": -0.1}, {"frame_skip": 0}, {"time_limit_frames": 0}, {"noop_max": -1}]
)
def test_impossible_numbers_are_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("_", "-")):
        Atari(**wrong)


# -- observations and rewards -----------------------------------------------------------------------------------


def test_scores_are_raw():
    rollout = rollout_of(Atari("MsPacman"), 150)
    assert rollout.steps.reward.max() == 10  # a dot of the maze; a clipped reward would be 1


@pytest.fixture(scope="module")
def frames() -> Rollout:
    return rollout_of(Atari("Breakout", noop_max=0), 30, num_envs=2, seed=4)


def test_an_observation_is_a_single_frame(frames: Rollout):
    """Equals the newest frame of a stack of four from the same emulator."""
    assert frames.spec.obs_shape == (1, 84, 84)
    stacked = AtariVectorEnv("breakout", 2, stack_num=4, noop_max=1, reward_clipping=False, num_threads=1)
    obs, _ = stacked.reset(seed=np.array([derive(4, TRAIN, slot, 0) for slot in range(2)]))
    for t, frame in enumerate(frames.steps.obs):
        if t > 0:
            obs, *_ = stacked.step(frames.action[t - 1].numpy())
        assert frame.equal(torch.from_numpy(obs[:, -1:]))
    stacked.close()


def test_images_contain_moving_objects(frames: Rollout):
    assert frames.steps.obs.float().std(dim=(2, 3, 4)).min() > 1
    assert not frames.steps.obs[10].equal(frames.steps.obs[11])


@pytest.mark.parametrize("skip", [1, 4])
def test_a_step_is_as_many_frames_as_the_frame_skip(skip: int):
    rollout = rollout_of(Atari("Pong", frame_skip=skip, time_limit_frames=48), 48 // skip + 1)
    ((step, episode),) = rollout.finished(0)
    assert step == 48 // skip + 1
    assert (episode.steps, episode.frames) == (48 // skip, 48)
    assert rollout.spec.frames_per_step == skip


# -- lives ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lives() -> Rollout:
    return rollout_of(Atari("Breakout", life_loss=True), 420, num_envs=2)


@pytest.fixture(scope="module")
def games() -> Rollout:
    return rollout_of(Atari("Breakout", life_loss=False), 420, num_envs=2)


def spans(rollout: Rollout, slot: int) -> list[tuple[int, int, tuple[float, ...], float]]:
    """(first step, last step, life returns, score) of each full game of a slot."""
    starts = rollout.steps.is_first[:, slot].nonzero().flatten().tolist()
    reports = rollout.finished(slot)
    assert [step for step, _ in reports] == starts[1:]
    return [(a, step - 1, e.life_returns, e.score) for a, (step, e) in zip(starts, reports, strict=False)]


def test_a_lost_life_is_terminal_but_the_game_goes_on(lives: Rollout):
    for slot in range(2):
        assert spans(lives, slot)
        for first, last, _, _ in spans(lives, slot):
            terminal = first + lives.steps.is_terminal[first : last + 1, slot].nonzero().flatten()
            assert len(terminal) == 5  # Breakout gives five balls
            assert terminal[-1] == last
            assert not lives.steps.is_first[terminal[:-1] + 1, slot].any()


def test_a_game_scores_the_sum_of_its_lives(lives: Rollout):
    scores = []
    for slot in range(2):
        for first, last, returns, score in spans(lives, slot):
            terminal = (first + lives.steps.is_terminal[first : last + 1, slot].nonzero().flatten()).tolist()
            cuts = zip([first, *terminal], terminal, strict=False)
            by_hand = [lives.steps.reward[a + 1 : b + 1, slot].sum().item() for a, b in cuts]
            assert list(returns) == by_hand
            assert score == sum(by_hand)
            scores.append(score)
    assert max(scores) > 0


def test_without_life_loss_only_the_end_of_the_game_is_terminal(games: Rollout):
    assert games.steps.is_terminal.sum() >= 2
    assert games.steps.is_terminal[:-1].equal(games.steps.is_first[1:])


def test_life_loss_changes_what_is_terminal_and_nothing_else(lives: Rollout, games: Rollout):
    assert different_fields(lives.steps, games.steps) == ["is_terminal"]
    assert lives.episodes == games.episodes  # the episode statistics have the lives either way
    assert all(len(e.life_returns) == 5 for ended in games.episodes for e in ended)


def test_every_recorded_life_ends_with_a_terminal_step():
    """Bank Heist counts down to zero with one life still to play, so its counter says 0 long before the end."""
    rollout = rollout_of(Atari("BankHeist"), 700)
    first, last, returns, _ = spans(rollout, 0)[0]
    assert len(returns) == 5
    assert rollout.steps.is_terminal[first : last + 1, 0].sum() == 5


def test_a_game_without_lives_is_one_life():
    rollout = rollout_of(Atari("Pong"), 1150)
    ((_, episode),) = rollout.finished(0)
    assert episode.life_returns == (episode.score,)
    assert -21 <= episode.score < -10
    assert not episode.truncated
    assert rollout.steps.is_terminal.sum() == 1


# -- games of one life ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single() -> Rollout:
    return rollout_of(Atari("Breakout", one_life=True), 420, num_envs=2)


def test_a_game_of_one_life_ends_with_it_and_the_next_has_all_lives_again(single: Rollout):
    left = torch.tensor([state["lives"] for state in single.saved])  # [T+1, B]
    ends = single.steps.is_terminal
    assert ends[:-1].equal(single.steps.is_first[1:])
    for slot in range(2):
        assert len(spans(single, slot)) >= 5
        for first, last, returns, score in spans(single, slot):
            assert left[first:last, slot].tolist() == [5] * (last - first)
            assert left[last, slot] == 4
            assert returns == (score,) == (single.steps.reward[first + 1 : last + 1, slot].sum().item(),)
    assert not any(e.truncated for ended in single.episodes for e in ended)


def test_the_one_life_is_the_first_of_the_whole_game(single: Rollout, lives: Rollout):
    for slot in range(2):
        lost = int(lives.steps.is_terminal[:, slot].nonzero()[0])
        assert single.steps.obs[: lost + 1, slot].equal(lives.steps.obs[: lost + 1, slot])
        assert spans(single, slot)[0][1] == lost
        assert single.finished(slot)[0][1].score == spans(lives, slot)[0][2][0]


def test_with_one_life_the_life_loss_setting_makes_no_difference(single: Rollout):
    either = rollout_of(Atari("Breakout", one_life=True, life_loss=False), 420, num_envs=2)
    assert different_fields(either.steps, single.steps) == []
    assert either.episodes == single.episodes


def test_a_game_without_lives_is_the_same_with_one():
    whole, one = (rollout_of(Atari("Pong", one_life=x, time_limit_frames=120), 80) for x in (False, True))
    assert different_fields(whole.steps, one.steps) == []


@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_games_of_one_life_continue_exactly_wherever_they_were_saved(sticky: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bestiary.envs.atari.GAMES_PER_SEED", 2)  # so that a new seed occurs as well
    env = Atari("Breakout", one_life=True, sticky=sticky)
    rollout = rollout_of(env, 130, num_envs=2)
    at = spans(rollout, 0)[1][1]  # the last step of the second game
    for t in (at - 1, at, at + 1):
        with closing(make(env, 2)) as env_batch:
            env_batch.load_state_dict(rollout.saved[t])
            rest = continue_rollout(env_batch, rollout.action[t : t + 40])
        assert different_fields(rest.steps, TimeStep(*(x[t + 1 : t + 41] for x in rollout.steps))) == []
        assert rest.episodes == rollout.episodes[t + 1 : t + 41]


def test_a_life_lost_at_the_time_limit_is_terminal_and_not_truncated(single: Rollout):
    last = spans(single, 0)[0][1]
    cut = rollout_of(Atari("Breakout", one_life=True, time_limit_frames=4 * last), 200, num_envs=2)
    step, episode = cut.finished(0)[0]
    assert (step, episode.steps, episode.truncated) == (last + 1, last, False)
    assert cut.steps.is_terminal[last, 0]
    assert cut.steps.obs[last + 1, 0].equal(single.steps.obs[last + 1, 0])  # the next game, not the one after it


# -- time limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("life_loss", [True, False])
def test_a_time_limit_truncates_a_game_and_is_not_terminal(life_loss: bool):
    rollout = rollout_of(Atari("Pong", time_limit_frames=60, life_loss=life_loss), 35, num_envs=2)
    assert not rollout.steps.is_terminal.any()
    assert rollout.steps.is_first.all(1).nonzero().flatten().tolist() == [0, 16, 32]
    reported = [e for ended in rollout.episodes for e in ended]
    assert len(reported) == 4
    assert all(e.truncated and (e.steps, e.frames) == (15, 60) for e in reported)


def test_games_of_the_shortest_allowed_time_limit_are_told_apart():
    """The next game may have nearly as many no-ops as this one has frames: it must still count as a new game."""
    with pytest.raises(ValueError, match="time-limit-frames=38 must be longer than the no-ops"):
        Atari("Pong", time_limit_frames=38)
    rollout = rollout_of(Atari("Pong", time_limit_frames=39), 34)
    assert rollout.steps.is_first[:, 0].nonzero().flatten().tolist() == [0, 11, 22, 33]


# -- settings ---------------------------------------------------------------------------------------------------


def opposite_rollouts(env: Atari, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Observations of the same game under two opposite policies: always RIGHT, always LEFT."""
    with closing(make(env)) as env_batch:
        return tuple(roll_out(env_batch, torch.full((steps, 1), a)).steps.obs for a in (2, 3))  # type: ignore


def test_sticky_actions_repeat_the_previous_action():
    right, left = opposite_rollouts(Atari("Pong", sticky=0.0), 12)
    assert not right.equal(left)
    right, left = opposite_rollouts(Atari("Pong", sticky=0.9999), 12)  # no-op repeats forever
    assert right.equal(left)


def test_sticky_actions_depend_on_the_seed():
    plain, sticky, again = (rollout_of(Atari("Pong", sticky=p), 40).steps.obs for p in (0.0, 0.25, 0.25))
    assert not plain.equal(sticky)
    assert sticky.equal(again)


def test_full_actions_are_all_eighteen_with_the_same_meaning():
    used = [Action.NOOP, Action.FIRE, Action.RIGHT, Action.LEFT, Action.RIGHTFIRE, Action.LEFTFIRE]  # by Pong
    full = torch.tensor([a.value for a in used])
    with closing(make(Atari("Pong"))) as few, closing(make(Atari("Pong", full_actions=True))) as all_of_them:
        assert (few.spec.num_actions, all_of_them.spec.num_actions) == (6, 18)
        assert few.spec.legal is None
        assert np.flatnonzero(all_of_them.spec.legal).tolist() == full.tolist()
        action = random_actions(6, 60, 1)
        a, b = roll_out(few, action), roll_out(all_of_them, full[action])
    assert different_fields(a.steps, b.steps) == ["prev_action"]


def no_op_frames(env: Atari, num_envs: int) -> list[int]:
    """The emulator's frame counter at the first action of each game."""
    with closing(make(env, num_envs)) as env_batch:
        env_batch.reset()
        return env_batch._clock.tolist()


def test_games_start_after_a_random_number_of_no_ops():
    idle = no_op_frames(Atari("Freeway", noop_max=30), 9)
    assert 1 <= min(idle) < 10
    assert 20 < max(idle) <= 30
    assert len(set(idle)) >= 6
    assert set(no_op_frames(Atari("Freeway", noop_max=2), 6)) == {1, 2}  # never none, and the maximum is reached


def test_games_can_start_without_no_ops():
    assert no_op_frames(Atari("Freeway", noop_max=0), 1) == [0]
    assert no_op_frames(Atari("Breakout", noop_max=0), 1) == [1]  # one frame to press FIRE
    assert no_op_frames(Atari("Breakout", noop_max=0, fire_reset=False), 1) == [0]


def test_fire_reset_serves_the_first_ball():
    """Breakout waits for FIRE: without it the ball does not start, with it a life is lost soon."""
    for fire, ended in ((True, True), (False, False)):
        with closing(make(Atari("Breakout", fire_reset=fire))) as env_batch:
            assert roll_out(env_batch, torch.zeros(60, 1, dtype=torch.int64)).steps.is_terminal.any() == ended
