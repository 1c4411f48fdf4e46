"""LunarLander: dense and sparse rewards, time limits, and its backends (Gymnasium, also in processes, and envpool)."""

import multiprocessing
import os
import re
import signal
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.files import through_a_file
from helpers.rollouts import continue_rollout, different_fields, random_actions, roll_out
from helpers.settings import configure
from torch import Tensor

from bestiary import tree
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.config.extras import available
from bestiary.envs import LunarLander
from bestiary.envs.env_batch import EnvBatch
from bestiary.envs.gym import GymEnvBatch, SubprocessVectorEnv
from bestiary.presets import preset
from bestiary.runtime import Local
from bestiary.runtime.start import start
from bestiary.seeding import EVAL, TRAIN
from bestiary.types import Episode, TimeStep

SEED = 3
MISSING = {extra for extra in ("box2d", "envpool") if not available(extra)}
box2d = pytest.mark.skipif("box2d" in MISSING, reason="needs the extra box2d")
envpool = pytest.mark.skipif(bool(MISSING), reason="needs the extra envpool")  # that extra includes box2d
both = pytest.mark.parametrize(
    "backend", [pytest.param("gymnasium", marks=box2d), pytest.param("envpool", marks=envpool)]
)


def play(env_batch: EnvBatch, action: Tensor) -> tuple[TimeStep, list[list[Episode]]]:
    """The time steps [T+1, B] and the episodes that ended with each; unlike a rollout, no states are saved."""
    steps, ended = [env_batch.reset()], [[]]
    for chosen in action:
        step, episodes = env_batch.step(chosen)
        steps.append(step)
        ended.append(episodes)
    return tree.stack(steps), ended


def steps_of(
    cfg: LunarLander, action: Tensor, seed: int = SEED, stream: int = TRAIN, threads: int = 1
) -> tuple[TimeStep, list[list[Episode]]]:
    with closing(cfg.make(action.shape[1], seed, stream, threads)) as env_batch:
        return play(env_batch, action)


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit": 0}, ["env.limit=0", "between 1 and 1000"]),
        ({"limit": 1001}, ["env.limit=1001", "between 1 and 1000"]),
        ({"processes": True, "backend": "envpool"}, ["env.processes", "gymnasium", "threads"]),
        ({"backend": "gymnasum"}, ["'gymnasum'", "did you mean gymnasium?"]),
        ({"backend": "numpy"}, ["'numpy'", "gymnasium, envpool"]),
    ],
    ids=["no-steps", "too-many-steps", "processes-and-pool", "misspelt", "unknown"],
)
def test_invalid_settings_are_refused_in_one_sentence(settings: dict, words: list[str]):
    with pytest.raises(ValueError, match=re.escape(words[0])) as refusal:
        LunarLander(**settings)
    sentence = str(refusal.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("backend", "module", "extra"), [("gymnasium", "Box2D", "box2d"), ("envpool", "envpool", "envpool")]
)
def test_a_missing_extra_is_named(backend: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    for loaded in [m for m in sys.modules if m.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ValueError, match=re.escape(f'pip install "bestiary[{extra}]"')):
        LunarLander(backend=backend).make(1, 0, TRAIN, 1)


@envpool
def test_training_in_envpool_requires_box2d_for_its_evaluations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    with pytest.raises(ValueError, match=re.escape('pip install "bestiary[box2d]"')):
        LunarLander(backend="envpool").make(1, 0, TRAIN, 1)


def test_evaluations_use_the_published_environment():
    assert LunarLander(sparse=True, limit=300, backend="envpool").for_evaluation() == LunarLander(sparse=True)
    assert LunarLander(processes=True).for_evaluation() == LunarLander()


# -- rewards, termination and truncation -----------------------------------------------------------------------


@both
@pytest.mark.parametrize("limit", [None, 60], ids=["whole", "limited"])
def test_the_sparse_reward_is_the_dense_return_at_the_last_step(backend: str, limit: int | None):
    action = random_actions(4, 400, 3)
    dense, ended = steps_of(LunarLander(backend=backend, limit=limit), action)
    sparse, ended_sparse = steps_of(LunarLander(backend=backend, limit=limit, sparse=True), action)
    assert different_fields(dense, sparse) == ["reward"]
    assert ended_sparse == ended
    last = torch.zeros_like(sparse.is_first)
    for t, episodes in enumerate(ended):
        for episode in episodes:
            last[t - 1, episode.slot] = True
            expected = dense.reward[t - 1 - episode.steps : t, episode.slot].double().sum().item()
            assert episode.score == pytest.approx(expected, abs=1e-3)
            assert sparse.reward[t - 1, episode.slot].item() == np.float32(episode.score)
    assert last.sum() >= 6
    assert (sparse.reward != 0).equal(last)


@both
def test_a_time_limit_truncates_and_does_not_terminate(backend: str):
    cfg, action = LunarLander(backend=backend, limit=30), random_actions(4, 100, 3)
    with closing(cfg.make(3, SEED, TRAIN, 1)) as env_batch:
        assert env_batch.spec.horizon == 30
        steps, ended = play(env_batch, action)
    assert steps.is_first.nonzero()[:, 0].unique().tolist() == [0, 31, 62, 93]
    assert steps.is_first.sum() == 4 * 3
    assert not steps.is_terminal.any()
    episodes = [e for episodes in ended for e in episodes]
    assert {(e.steps, e.truncated) for e in episodes} == {(30, True)}
    assert len(episodes) == 9


@both
def test_a_crash_terminates_even_at_the_time_limit(backend: str):
    """Without an engine the lander falls in the same way, whatever the limit."""
    action = torch.zeros(150, 1, dtype=torch.int64)
    steps, ended = steps_of(LunarLander(backend=backend), action)
    fall = next(e for episodes in ended for e in episodes)
    assert steps.is_terminal[fall.steps, 0]
    assert steps.reward[fall.steps, 0] == -100
    assert not fall.truncated
    for limit, crashed in ((fall.steps, True), (fall.steps - 1, False)):
        steps, ended = steps_of(LunarLander(backend=backend, limit=limit), action)
        first = next(e for episodes in ended for e in episodes)
        assert first.steps == limit
        assert first.truncated is not crashed
        assert steps.is_terminal[limit, 0].item() is crashed
        assert steps.is_first[limit + 1, 0]


@both
def test_the_default_time_limit_is_a_thousand_steps(backend: str):
    """A hovering lander reaches it."""
    with closing(LunarLander(backend=backend).make(1, SEED, TRAIN, 1)) as env_batch:
        assert (env_batch.spec.obs_shape, env_batch.spec.num_actions, env_batch.spec.horizon) == ((8,), 4, 1000)
        step, episodes, count = env_batch.reset(), [], 0
        while not episodes:
            x, y, vx, vy, angle, spin = step.obs[0, :6].tolist()
            lean = float(np.clip(0.5 * x + vx, -0.4, 0.4))  # towards the landing pad
            turn, lift = 0.5 * (lean - angle) - spin, 0.5 * (0.7 - y - vy)
            engine = 2 if lift > max(abs(turn), 0.05) else 3 if turn < -0.05 else 1 if turn > 0.05 else 0
            step, episodes = env_batch.step(torch.tensor([engine]))
            count += 1
    assert count == 1001
    assert (episodes[0].steps, episodes[0].truncated) == (1000, True)


@envpool
def test_envpool_has_the_dynamics_of_gymnasium():
    """First episodes of 64 slots, always the same engine: mean scores and lengths agree within four standard errors."""
    for engine in (0, 1, 3):
        scores_and_lengths = []
        for backend in ("gymnasium", "envpool"):
            _, ended = steps_of(LunarLander(backend=backend), torch.full((200, 64), engine))
            first = {e.slot: e for episodes in reversed(ended) for e in episodes}
            scores_and_lengths.append(np.array([(first[slot].score, first[slot].steps) for slot in range(64)]))
        gym, envpool = scores_and_lengths
        error = np.sqrt((gym.var(0) + envpool.var(0)) / 64)
        assert (np.abs(gym.mean(0) - envpool.mean(0)) < 4 * error).all(), engine
        assert (error < 0.07 * np.abs(gym.mean(0))).all()  # small enough for the comparison to mean something


# -- seeds ------------------------------------------------------------------------------------------------------


@both
def test_slots_seeds_and_streams_have_different_initial_states(backend: str):
    opening = torch.zeros(0, 8, dtype=torch.int64)
    addresses = [(0, TRAIN), (1, TRAIN), (0, EVAL), (0, 64 + EVAL)]
    starts = [steps_of(LunarLander(backend=backend), opening, *address)[0].obs[0] for address in addresses]
    assert len(torch.cat(starts).unique(dim=0)) == 8 * len(addresses)


@both
def test_equal_seeds_give_equal_rollouts_bit_for_bit(backend: str):
    cfg, action = LunarLander(backend=backend), random_actions(4, 200, 3)
    steps, ended = steps_of(cfg, action)
    assert steps.is_first.sum() > 3
    with closing(cfg.make(3, SEED, TRAIN, 2)) as env_batch:
        for _ in range(2):  # a reset repeats the rollout
            again, ended_again = play(env_batch, action)
            assert different_fields(steps, again) == []
            assert ended_again == ended
    alone, _ = steps_of(cfg, action[:, :1])
    assert different_fields(alone, tree.map(lambda x: x[:, :1], steps)) == []


# -- resuming ---------------------------------------------------------------------------------------------------


@box2d
@pytest.mark.parametrize(
    "cfg",
    [LunarLander(), LunarLander(sparse=True, limit=70), LunarLander(sparse=True, processes=True)],
    ids=["dense", "sparse-limited", "sparse-processes"],
)
def test_a_saved_environment_resumes_within_an_episode(cfg: LunarLander):
    action = random_actions(4, 250, 3)
    with closing(cfg.make(3, SEED, TRAIN, 2)) as env_batch:
        rollout = roll_out(env_batch, action)
    ended = rollout.ends()[0]
    for at in (40, ended, ended + 1, 120):
        with closing(cfg.make(3, SEED, TRAIN, 2)) as env_batch:
            env_batch.load_state_dict(through_a_file(rollout.saved[at]))
            ahead = continue_rollout(env_batch, action[at:])
        assert different_fields(ahead.steps, tree.narrow(rollout.steps, 0, at + 1, 250 - at)) == [], at
        assert ahead.episodes == rollout.episodes[at + 1 :], at
        assert sum(map(len, ahead.episodes)) > 3


def experiment(cfg: LunarLander) -> Experiment:
    small, few = configure(preset("cartpole").algo, unroll=25, batch_size=3), Evaluation(episodes=0)
    return replace(preset("cartpole"), env=cfg, algo=small, runtime=Local(envs=3, threads=1), evaluation=few)


@both
def test_a_resumed_run_continues_saved_episodes_or_begins_new_ones(backend: str):
    planned = experiment(LunarLander(backend=backend))
    with closing(start(planned)) as run, closing(start(planned)) as resumed:
        progress = iter(run)
        for _ in range(2):
            next(progress)
        state = through_a_file(run.state_dict())
        resumed.load_state_dict(run.weights(), state)
        assert (resumed.steps, resumed.learner.updates) == (run.steps, run.learner.updates) == (150, 2)
        trajectory, _ = resumed.actor.unroll()
        if backend == "gymnasium":
            assert not trajectory.step.is_first[0].any()
            assert different_fields(trajectory.step, run.actor.unroll()[0].step) == []
        else:
            assert trajectory.step.is_first[0].all()
            with closing(planned.env.make(3, planned.seed, TRAIN, 1)) as env_batch:
                starts = torch.cat([env_batch.reset().obs, trajectory.step.obs[0]])
            assert len(starts.unique(dim=0)) == 6  # with seeds that were not used before


@envpool
def test_envpool_cannot_be_saved():
    with closing(LunarLander(backend="envpool").make(1, 0, TRAIN, 1)) as env_batch:
        env_batch.reset()
        assert not env_batch.resumable
        with pytest.raises(NotImplementedError):
            env_batch.state_dict()


# -- envpool's time steps ---------------------------------------------------------------------------------------------


@envpool
def test_envpool_begins_an_episode_after_the_last_step():
    """Compared with the pool's own step counter."""
    action = random_actions(4, 300, 3)
    with closing(LunarLander(backend="envpool", limit=90).make(3, SEED, TRAIN, 1)) as env_batch:
        env_batch.reset()
        pool, outputs = env_batch.pool, []  # type: ignore[attr-defined]
        step = pool.step
        pool.step = lambda chosen: outputs.append(step(chosen)) or outputs[-1]
        steps = tree.stack([env_batch.step(chosen)[0] for chosen in action])
    obs, reward, terminated, truncated, info = zip(*outputs, strict=True)
    elapsed = torch.from_numpy(np.stack([i["elapsed_step"] for i in info]))
    ended = torch.from_numpy(np.stack(terminated) | np.stack(truncated))
    assert np.stack(truncated).any()
    assert np.stack(terminated).any()
    assert steps.is_first.sum() >= 6
    assert steps.is_first.equal(elapsed == 0)
    assert steps.is_first[1:].equal(ended[:-1])
    assert steps.obs.equal(torch.from_numpy(np.stack(obs)))
    assert steps.reward.equal(torch.from_numpy(np.stack(reward)))
    assert (steps.reward[steps.is_first] == 0).all()
    assert (steps.prev_action[steps.is_first] == 0).all()
    assert (steps.obs[steps.is_first][:, 1] > 1.3).all()  # high above the ground


@envpool
def test_envpools_earlier_time_steps_do_not_change():
    with closing(LunarLander(backend="envpool").make(2, SEED, TRAIN, 1)) as env_batch:
        seen = [env_batch.reset()]
        copies = [seen[0].obs.clone()]
        for chosen in random_actions(4, 20, 2):
            seen.append(env_batch.step(chosen)[0])
            copies.append(seen[-1].obs.clone())
    assert all(step.obs.equal(copy) for step, copy in zip(seen, copies, strict=True))


# -- processes --------------------------------------------------------------------------------------------------


def workers(env_batch: EnvBatch) -> list[multiprocessing.Process]:
    assert isinstance(env_batch, GymEnvBatch)
    assert isinstance(env_batch.env, SubprocessVectorEnv)
    return [process for process, _ in env_batch.env.workers]


@box2d
@pytest.mark.parametrize(("threads", "shares"), [(1, 1), (2, 2), (9, 5)])
def test_environments_in_processes_give_the_same_rollout(threads: int, shares: int):
    action = random_actions(4, 120, 5)
    local, ended = steps_of(LunarLander(), action)
    with closing(LunarLander(processes=True).make(5, SEED, TRAIN, threads)) as env_batch:
        shared = workers(env_batch)
        assert len(shared) == shares
        remote, remote_ended = play(env_batch, action)
    assert different_fields(local, remote) == []
    assert ended == remote_ended
    assert not any(process.is_alive() for process in shared)


@box2d
@pytest.mark.timeout(60)
def test_a_dead_process_is_reported_at_every_step():
    with closing(LunarLander(processes=True).make(4, SEED, TRAIN, 2)) as env_batch:
        env_batch.reset()
        victim, other = workers(env_batch)
        os.kill(victim.pid, signal.SIGKILL)  # type: ignore[arg-type]
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"environment worker process has died \(exit code -9\)"):
                env_batch.step(torch.zeros(4, dtype=torch.int64))
        assert other.is_alive()
    assert not other.is_alive()
    env_batch.close()  # a second time


@box2d
def test_ctrl_c_does_not_reach_the_environment_processes():
    """A terminal sends it to all processes, and the run still has to reach a safe point."""
    with closing(LunarLander(processes=True).make(2, SEED, TRAIN, 1)) as env_batch:
        env_batch.reset()
        (process,) = workers(env_batch)
        os.kill(process.pid, signal.SIGINT)  # type: ignore[arg-type]
        step, _ = env_batch.step(torch.zeros(2, dtype=torch.int64))
        assert process.is_alive()
        assert not step.is_first.any()
