"""Any Gymnasium environment: unsupported ones are refused; the time steps are those of the single environments."""

import re
import sys
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from helpers.rollouts import IMAGE_ENV, random_actions, roll_out

from bestiary.envs import Gym
from bestiary.seeding import EVAL, TRAIN, derive


class Toy(gymnasium.Env):
    """An environment with the spaces that a test needs; it raises an error on request."""

    def __init__(self, observation: str = "vector", action: str = "two", breaks_at: int = 10**9) -> None:
        self.observation_space = {
            "vector": Box(-1, 1, (2,), np.float64),
            "dict": Dict({"a": Box(-1, 1, (2,), np.float64)}),
            "discrete": Discrete(5),
            "matrix": Box(-1, 1, (3, 3), np.float32),
            "channels-first": Box(0, 255, (3, 6, 8), np.uint8),
            "float-image": Box(0, 1, (6, 8, 1), np.float64),
        }[observation]
        self.action_space = {
            "two": Discrete(2),
            "continuous": Box(-1, 1, (1,), np.float32),
            "several": MultiDiscrete([2, 3]),
            "from-one": Discrete(2, start=1),
        }[action]
        self.breaks_at = breaks_at

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.t += 1
        if self.t >= self.breaks_at:
            raise ArithmeticError("the toy broke")
        return self.observation_space.sample(), 1.0, False, False, {}


gymnasium.register("toys/Toy-v0", entry_point=Toy)


def make(id: str = "toys/Toy-v0", num_envs: int = 1, stream: int = TRAIN, processes: bool = False, **kwargs: Any):
    return Gym(id, kwargs, processes).make(num_envs, 0, stream, 1)


# -- refusals ---------------------------------------------------------------------------------------------------


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)  # as if it were not installed
    for module in [m for m in sys.modules if m.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ValueError, match=re.escape('pip install "bestiary[box2d]"')):
        make("LunarLander-v3")


@pytest.mark.parametrize(
    ("id", "kwargs", "words"),
    [
        ("CartPol-v1", {}, ["'CartPol-v1'", "did you mean CartPole-v1"]),
        ("MountainCar-v7", {}, ["'MountainCar-v7'", "MountainCar-v0"]),
        ("LunarLander-v2", {}, ["'LunarLander-v2'", "LunarLander-v3"]),
        ("toys/Tyo-v0", {}, ["'toys/Tyo-v0'", "toys/Toy-v0"]),
        ("zzz/Nothing-v0", {}, ["'zzz/Nothing-v0'", "zzz"]),
        ("no such thing", {}, ["'no such thing'"]),
        ("", {}, ["''"]),
        ("no_such_module:Toy-v0", {}, ["no_such_module"]),
        ("Pendulum-v1", {}, ["Pendulum-v1", "only Discrete"]),
        ("toys/Toy-v0", {"action": "continuous"}, ["toys/Toy-v0", "only Discrete"]),
        ("toys/Toy-v0", {"action": "several"}, ["MultiDiscrete", "only Discrete"]),
        ("toys/Toy-v0", {"action": "from-one"}, ["from 1", "start at 0"]),
        ("toys/Toy-v0", {"observation": "dict"}, ["Dict", "FlattenObservation"]),
        ("toys/Toy-v0", {"observation": "discrete"}, ["Discrete(5)", "FlattenObservation"]),
        ("toys/Toy-v0", {"observation": "matrix"}, ["(3, 3)", "rank 1"]),
        ("FrozenLake-v1", {}, ["FrozenLake-v1", "Discrete(16)"]),
        ("toys/Toy-v0", {"colour": "red"}, ["toys/Toy-v0", "env.kwargs", "colour"]),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x.values()) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("processes", [False, True], ids=["in-process", "processes"])
def test_unsupported_environments_are_refused_in_one_sentence(id: str, kwargs: dict, words: list[str], processes: bool):
    with pytest.raises(ValueError, match=re.escape(words[0])) as refusal:
        make(id, processes=processes, **kwargs)
    sentence = str(refusal.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence


# -- time steps ----------------------------------------------------------------------------------------------------


def to_channels_first(image: np.ndarray) -> np.ndarray:
    return np.moveaxis(image, -1, 0) if image.ndim == 3 and image.shape[-1] in (1, 3) else image


@pytest.mark.parametrize("stream", [TRAIN, EVAL], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("id", "kwargs"),
    [
        ("CartPole-v1", {}),
        (IMAGE_ENV, {}),
        ("toys/Toy-v0", {}),
        ("toys/Toy-v0", {"observation": "channels-first"}),
        ("toys/Toy-v0", {"observation": "float-image"}),
    ],
    ids=["cartpole", "image", "vector", "channels-first", "float-image"],
)
def test_an_env_batch_returns_what_its_environments_return(id: str, kwargs: dict, stream: int):
    """Each slot against a plain environment, seeded by (seed, stream, slot, episode)."""
    with closing(make(id, 2, stream, **kwargs)) as env_batch:
        rollout = roll_out(env_batch, random_actions(env_batch.spec.num_actions, 60, 2))
    for slot in range(2):
        env, episode = gymnasium.make(id, disable_env_checker=True, **kwargs), 0
        obs, reward, terminated, ended = env.reset(seed=derive(0, stream, slot, 0))[0], 0.0, False, False
        for t in range(61):
            if t > 0 and ended:
                episode += 1
                obs, reward, terminated, ended = env.reset(seed=derive(0, stream, slot, episode))[0], 0.0, False, False
            elif t > 0:
                obs, reward, terminated, truncated, _ = env.step(rollout.action[t - 1, slot].item())
                ended = terminated or truncated
            expected = torch.from_numpy(to_channels_first(obs).copy()).to(rollout.spec.obs_dtype)
            assert rollout.steps.obs[t, slot].equal(expected)
            assert rollout.steps.reward[t, slot].item() == pytest.approx(float(reward))
            assert rollout.steps.is_terminal[t, slot].item() == terminated


@pytest.mark.parametrize(
    ("kwargs", "shape", "dtype"),
    [
        ({}, (2,), torch.float32),
        ({"observation": "channels-first"}, (3, 6, 8), torch.uint8),
        ({"observation": "float-image"}, (1, 6, 8), torch.float32),
    ],
    ids=["vector", "channels-first", "float-image"],
)
def test_observations_are_channels_first_and_uint8_or_float32(kwargs: dict, shape: tuple, dtype: torch.dtype):
    with closing(make(**kwargs)) as env_batch:
        assert env_batch.spec.obs_shape == shape
        assert env_batch.spec.obs_dtype == env_batch.reset().obs.dtype == dtype
        assert env_batch.spec.is_image == (len(shape) == 3)
        assert env_batch.spec.num_actions == 2


def test_channels_last_images_become_channels_first():
    with closing(make(IMAGE_ENV)) as env_batch:
        assert env_batch.spec.obs_shape == (3, 6, 8)
        image = env_batch.reset().obs[0]
    env = gymnasium.make(IMAGE_ENV)
    seen, _ = env.reset(seed=derive(0, TRAIN, 0, 0))
    assert image.permute(1, 2, 0).equal(torch.from_numpy(seen))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium also prints the error of a process
@pytest.mark.parametrize("processes", [False, True], ids=["in-process", "processes"])
def test_an_environment_that_breaks_breaks_the_step_with_its_own_error(processes: bool):
    with closing(make(num_envs=2, processes=processes, breaks_at=3)) as env_batch:
        env_batch.reset()
        env_batch.step(torch.zeros(2, dtype=torch.int64))
        env_batch.step(torch.zeros(2, dtype=torch.int64))
        with pytest.raises(ArithmeticError, match="the toy broke"):
            env_batch.step(torch.zeros(2, dtype=torch.int64))


def test_a_time_limit_is_not_terminal():
    with closing(make("MountainCar-v0", 2)) as env_batch:
        rollout = roll_out(env_batch, torch.ones(405, 2, dtype=torch.int64))  # a car that is not pushed never arrives
    assert not rollout.steps.is_terminal.any()
    assert rollout.steps.is_first.any(1).nonzero().flatten().tolist() == [0, 201, 402]
    for slot in range(2):
        for step, episode in rollout.finished(slot):
            assert step in (201, 402)
            assert (episode.steps, episode.score, episode.truncated) == (200, -200.0, True)


def test_a_terminal_step_is_not_truncated():
    with closing(make("CartPole-v1", 2)) as env_batch:
        rollout = roll_out(env_batch, torch.ones(100, 2, dtype=torch.int64))  # always to the right: the pole falls
    assert rollout.steps.is_terminal.sum() >= 10
    assert rollout.steps.is_terminal[:-1].equal(rollout.steps.is_first[1:])
    assert not any(e.truncated for ended in rollout.episodes for e in ended)


def test_worker_processes_give_the_same_rollout():
    rollouts = []
    for processes in (False, True):
        with closing(make("CartPole-v1", 3, processes=processes)) as env_batch:
            rollouts.append(roll_out(env_batch, random_actions(2, 80, 3)))
    in_process, processes = rollouts
    assert all(a.equal(b) for a, b in zip(in_process.steps, processes.steps, strict=True))
    assert in_process.episodes == processes.episodes
    assert in_process.saved == processes.saved
