"""Recall and Catch: their rules, and their use as Gymnasium environments."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from bestiary.config.registration import NAMES
from bestiary.envs import Catch, Recall
from bestiary.envs.catch import CatchEnv
from bestiary.envs.recall import RecallEnv
from bestiary.seeding import TRAIN

IDS = [f"bestiary/{name}-v0" for name in NAMES]


def returns(env, play, episodes: int) -> np.ndarray:
    """Scores of whole episodes in a vector environment; `play` maps observations [B, ...] to actions [B]."""
    obs, _ = env.reset(seed=0)
    score, scores = np.zeros(env.num_envs), []
    while len(scores) < episodes:
        obs, reward, terminated, truncated, _ = env.step(play(obs))
        score += reward
        ended = terminated | truncated
        scores += score[ended].tolist()
        score[ended] = 0.0
    return np.array(scores)


# -- Recall -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delay", "cues"), [(1, 2), (4, 3), (10, 4)])
def test_recall_shows_a_cue_once_and_asks_for_it_delay_steps_later(delay: int, cues: int):
    env = RecallEnv(3, delay, cues)
    obs, _ = env.reset(seed=7)
    for _ in range(4):  # episodes
        cue = obs.argmax(1)
        assert (obs == np.eye(cues + 1)[cue]).all()
        assert (cue < cues).all()
        for t in range(1, delay + 1):
            obs, reward, terminated, truncated, _ = env.step(cue)
            assert (obs[:, :cues] == 0).all()
            assert (obs[:, cues] == (t == delay)).all()
            assert not (reward.any() or terminated.any() or truncated.any())
        answer = np.array([cue[0], (cue[1] + 1) % cues, cue[2]])  # the second is wrong
        obs, reward, terminated, truncated, _ = env.step(answer)
        assert reward.tolist() == [1.0, 0.0, 1.0]
        assert terminated.all()
        assert not truncated.any()
        assert (obs == 0).all()
        obs, *_ = env.step(answer)


class Rememberer:
    """Keeps the cue of the first step until the question."""

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        shown = obs[:, :-1].any(1)
        self.cue = np.where(shown, obs.argmax(1), getattr(self, "cue", 0))
        return self.cue


def test_memory_always_scores_one_in_recall():
    assert (returns(RecallEnv(8, delay=6, cues=5), Rememberer(), 100) == 1).all()


def test_guessing_in_recall_scores_one_over_cues():
    rng = np.random.default_rng(0)
    scores = returns(RecallEnv(200, delay=1, cues=4), lambda obs: rng.integers(0, 4, len(obs)), 10_000)
    assert set(scores) == {0.0, 1.0}
    assert scores.mean() == pytest.approx(1 / 4, abs=0.02)


def test_no_constant_answer_is_better_than_another_in_recall():
    for answer in range(4):
        scores = returns(RecallEnv(200, delay=1, cues=4), lambda obs, a=answer: np.full(len(obs), a), 10_000)
        assert scores.mean() == pytest.approx(1 / 4, abs=0.02)


def test_a_cue_tells_nothing_of_the_next_one_nor_of_its_neighbours():
    env = RecallEnv(400, delay=1, cues=4)
    obs, _ = env.reset(seed=0)
    cues = []
    for _ in range(30):
        cues.append(obs.argmax(1))
        for _ in range(3):
            obs, *_ = env.step(np.zeros(400, np.int64))
    table = np.array(cues)  # [episode, environment]
    for one, other in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        pairs = np.bincount((4 * one + other).ravel(), minlength=16) / one.size
        assert pairs == pytest.approx(np.full(16, 1 / 16), abs=0.01)


@pytest.mark.parametrize("wrong", [{"delay": 0}, {"delay": -3}, {"cues": 1}, {"cues": 0}])
def test_recall_refuses_impossible_settings(wrong: dict):
    with pytest.raises(ValueError, match=f"at least .*{next(iter(wrong.values()))}"):
        Recall(**wrong)
    with pytest.raises(ValueError, match="recall needs"):
        gymnasium.make("bestiary/Recall-v0", **wrong)


# -- Catch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (5, 4), (10, 5)])
def test_catch_is_a_ball_that_falls_onto_a_paddle(rows: int, columns: int):
    """The rules written for one environment, against the rules for a batch."""
    env, rng = CatchEnv(4, rows, columns), np.random.default_rng(1)
    obs, _ = env.reset(seed=5)
    results = set()
    for _ in range(25):  # episodes
        ball = [int(board[0, 0].argmax()) for board in obs]  # the column in which it appears
        paddle = [columns // 2] * 4
        for row in range(rows):
            for i in range(4):
                board = np.zeros((1, rows, columns), np.uint8)
                board[0, row, ball[i]] = board[0, rows - 1, paddle[i]] = 255
                assert (obs[i] == board).all()
            if row == rows - 1:
                break
            action = rng.integers(0, 3, 4)
            obs, reward, terminated, truncated, _ = env.step(action)
            paddle = [min(max(p + a - 1, 0), columns - 1) for p, a in zip(paddle, action.tolist(), strict=True)]
            landed = row + 1 == rows - 1
            caught = [(1.0 if p == b else -1.0) if landed else 0.0 for p, b in zip(paddle, ball, strict=True)]
            assert reward.tolist() == caught
            assert terminated.tolist() == [landed] * 4
            assert not truncated.any()
        results |= set(caught)
        obs, *_ = env.step(action)
    assert results == {-1.0, 1.0}


def follow(obs: np.ndarray) -> np.ndarray:
    """Moves towards the ball and stays when under it; the action of a reset step does not matter."""
    action = np.ones(len(obs), np.int64)
    for i, (board,) in enumerate(obs):
        (paddle,), balls = np.flatnonzero(board[-1])[:1], np.argwhere(board[:-1])
        if len(balls):
            action[i] = 1 + np.sign(balls[0, 1] - paddle)
    return action


def test_following_the_ball_always_catches_it():
    assert (returns(CatchEnv(8), follow, 100) == 1).all()


def test_a_random_policy_catches_one_ball_per_column():
    rng = np.random.default_rng(0)
    scores = returns(CatchEnv(200), lambda obs: rng.integers(0, 3, len(obs)), 10_000)
    assert set(scores) == {-1.0, 1.0}
    assert scores.mean() == pytest.approx(2 / 5 - 1, abs=0.03)  # wherever the paddle is, the ball is there in 1 of 5


@pytest.mark.parametrize("wrong", [{"rows": 1}, {"rows": 0}, {"columns": 1}, {"columns": -2}])
def test_catch_refuses_impossible_settings(wrong: dict):
    with pytest.raises(ValueError, match=f"at least 2x2, not .*{next(iter(wrong.values()))}"):
        Catch(**wrong)
    with pytest.raises(ValueError, match="catch needs"):
        gymnasium.make("bestiary/Catch-v0", **wrong)


def test_arguments_that_do_not_exist_are_refused():
    with pytest.raises(TypeError, match="cue"):
        gymnasium.make("bestiary/Recall-v0", cue=3)


# -- Gymnasium --------------------------------------------------------------------------------------------------


def test_importing_bestiary_registers_its_gymnasium_ids():
    lines = [
        "import bestiary.envs",
        "import gymnasium",
        *(f"gymnasium.make({name!r}).reset()" for name in IDS),
        *(f"bestiary.envs.Gym({name!r}).make(1, 0, {TRAIN}, 1).reset()" for name in IDS),
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", IDS)
def test_gymnasiums_checker_accepts_every_environment(name: str):
    check_env(gymnasium.make(name).unwrapped)


def test_make_vec_returns_our_own_vector_environment():
    env = gymnasium.make_vec("bestiary/Recall-v0", num_envs=6, delay=5)
    assert isinstance(env.unwrapped, RecallEnv)
    assert (env.num_envs, env.unwrapped.delay) == (6, 5)
    assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    obs, _ = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    board = gymnasium.make_vec("bestiary/Catch-v0", num_envs=2, rows=4, columns=3)
    assert isinstance(board.unwrapped, CatchEnv)
    assert board.reset(seed=0)[0].shape == (2, 1, 4, 3)


@pytest.mark.parametrize("num_envs", [1, 2, 7])
@pytest.mark.parametrize("name", IDS)
def test_an_environment_has_the_same_episodes_whatever_the_batch_size(name: str, num_envs: int):
    seed, rng = 11, np.random.default_rng(0)
    batch = gymnasium.make_vec(name, num_envs=num_envs)
    alone = [gymnasium.make(name) for _ in range(num_envs)]
    obs = batch.reset(seed=seed)[0]
    expected_obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(alone)])
    ended, episodes = np.zeros(num_envs, bool), 0
    assert (obs == expected_obs).all()
    while episodes < 5 * num_envs:
        action = rng.integers(0, batch.single_action_space.n, num_envs)
        obs, reward, terminated, truncated, _ = batch.step(action)
        for i, env in enumerate(alone):
            if ended[i]:
                first_obs, _ = env.reset()
                expected = (first_obs, 0.0, False, False)
            else:
                expected = env.step(action[i])[:4]
            assert (obs[i] == expected[0]).all()
            assert (reward[i], terminated[i], truncated[i]) == expected[1:]
        ended = terminated | truncated
        episodes += ended.sum()


def test_a_list_of_seeds_seeds_each_environment():
    env = RecallEnv(3, cues=50)
    by_list = env.reset(seed=[4, 5, 6])[0]
    assert (by_list == env.reset(seed=4)[0]).all()
    assert (env.reset(seed=[6, 5, 4])[0] == by_list[::-1]).all()


def test_a_reset_without_a_seed_starts_the_next_episodes():
    env = RecallEnv(1, cues=1000)
    first = env.reset(seed=0)[0].argmax()
    assert len({int(env.reset()[0].argmax()) for _ in range(10)} | {int(first)}) == 11
    assert env.reset(seed=0)[0].argmax() == first


@pytest.mark.parametrize("name", IDS)
def test_the_step_after_the_end_only_resets(name: str):
    """NEXT_STEP autoreset: the action is ignored, reward and flags are zero, the observation is the new first one."""
    first_rows = []
    for last_action in (0, 1):
        env = gymnasium.make_vec(name, num_envs=2)
        first, _ = env.reset(seed=3)
        terminated = np.zeros(2, bool)
        while not terminated.any():
            last, _, terminated, _, _ = env.step(np.zeros(2, np.int64))
        assert (last != first).any()
        obs, reward, terminated, truncated, _ = env.step(np.full(2, last_action))
        assert reward.tolist() == [0.0, 0.0]
        assert not (terminated.any() or truncated.any())
        first_rows.append(obs)
    assert (first_rows[0] == first_rows[1]).all()
