"""`bestiary.load`: the agent of a run as a policy for one's own loop, which acts as an evaluation does."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from helpers.runs import tiny

import bestiary
from bestiary.acting.actor import Actor
from bestiary.algos import Dqn, Udrl
from bestiary.cores import DeltaNet, Lstm
from bestiary.envs import Catch, Gym
from bestiary.errors import UserError
from bestiary.seeding import EVAL, derive, substream
from bestiary.training.run import Run

CARTPOLE = Gym("CartPole-v1")
DELTA_NET = DeltaNet(width=8, heads=2, layers=1, feedforward=8)
EXPERIMENTS = {
    "impala-lstm": tiny(CARTPOLE, seed=3),
    "dqn-delta-net": tiny(CARTPOLE, algo=Dqn(head=(8,)), core=DELTA_NET),
    "udrl-lstm": tiny(CARTPOLE, algo=Udrl(head=(8,)), core=Lstm(hidden=8)),
    "impala-catch": tiny(Catch()),
}
COMMANDS = {"udrl-lstm": (30.0, 40.0)}


def untrained(name: str, path: Path) -> Run:
    """A run with the initial weights of its agent, which are enough to act with."""
    experiment = EXPERIMENTS[name]
    env_batch = experiment.env.make(1, 0, EVAL, 1)
    env_batch.close()
    torch.manual_seed(1)
    agent = experiment.algo.agent(env_batch.spec, experiment.net, experiment.core)
    run = Run.create(path / name, experiment)
    run.save(0, {k: 3 * v if v.is_floating_point() else v for k, v in agent.state_dict().items()}, {"none": 0}, keep=1)
    return run


def evaluated(run: Run, mode: str, episodes: int, monkeypatch, **protocol: Any) -> tuple[list[list[int]], list[float]]:
    """The actions and the score of every episode of an evaluation in one environment."""
    found, unroll = [], Actor.unroll

    def record(actor: Actor):
        trajectory, ended = unroll(actor)
        found.append(trajectory)
        return trajectory, ended

    monkeypatch.setattr(Actor, "unroll", record)
    result = bestiary.evaluate(run, episodes, modes=(mode,), envs=1, threads=1, device="cpu", **protocol)
    action = torch.cat([t.action[:-1, 0] for t in found]).tolist()
    starts = torch.cat([t.step.is_first[:-1, 0] for t in found]).nonzero().flatten().tolist()
    # the environment ignores the action at the last step of an episode
    return [action[a : b - 1] for a, b in pairwise(starts)][:episodes], result[mode]["scores"]


def by_hand(run: Run, episodes: int, **options: Any) -> tuple[list[list[int]], list[float]]:
    """The same with a Gymnasium environment that is stepped with `Policy.act`."""
    policy, env = bestiary.load(run.path, device="cpu", **options), gymnasium.make("CartPole-v1")
    actions, scores = [], []
    for episode in range(episodes):
        seed = derive(run.experiment().seed, substream(EVAL, options.get("seed", 0), 0), 0, episode)
        obs, _ = env.reset(seed=seed)
        policy.reset()
        reward, score, over = 0.0, 0.0, False
        actions.append([])
        while not over:
            action = policy.act(obs, reward)
            assert type(action) is int
            obs, reward, terminated, truncated, _ = env.step(action)
            actions[-1].append(action)
            score, over = score + float(reward), terminated or truncated
        scores.append(score)
    return actions, scores


@pytest.mark.parametrize(("mode", "episodes"), [("greedy", 3), ("sampled", 1)])
@pytest.mark.parametrize("name", ["impala-lstm", "dqn-delta-net", "udrl-lstm"])
def test_a_loop_of_ones_own_equals_an_evaluation(name, mode, episodes, monkeypatch, tmp_path):
    run = untrained(name, tmp_path)
    protocol = {"command": COMMANDS.get(name), "seed": 5}
    actions, scores = evaluated(run, mode, episodes, monkeypatch, **protocol)
    assert by_hand(run, episodes, mode=mode, **protocol) == (actions, scores)
    assert len({a for episode in actions for a in episode}) > 1 or mode == "greedy"


def observations(T: int, B: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(T, B, 4)).astype(np.float32)


@pytest.mark.parametrize("name", ["impala-lstm", "dqn-delta-net", "udrl-lstm"])
def test_a_batch_equals_single_observations(name, tmp_path):
    run = untrained(name, tmp_path)
    obs, rewards = observations(20, 3), np.random.default_rng(1).normal(size=(20, 3))
    rewards[0] = 0
    command = COMMANDS.get(name)
    batch = bestiary.load(run.path, command=command)
    together = [batch.act(x, r) for x, r in zip(obs, rewards, strict=True)]
    assert all(isinstance(a, np.ndarray) and a.shape == (3,) and a.dtype == np.int64 for a in together)
    for b in range(3):
        single = bestiary.load(run.path, command=command)
        assert [single.act(x, r) for x, r in zip(obs[:, b], rewards[:, b], strict=True)] == [a[b] for a in together]


@pytest.mark.parametrize("how", ["reset", "is_first", "mask"])
def test_a_reset_forgets_what_came_before(how, tmp_path):
    run = untrained("impala-lstm", tmp_path)
    obs = observations(30, 2)
    fresh, used = bestiary.load(run), bestiary.load(run)
    for x in observations(7, 2):
        used.act(x, reward=1.0)
    start: dict[str, Any] = {}
    if how == "reset":
        used.reset()
    elif how == "mask":
        used.reset(np.array([True, True]))
    else:
        start = {"is_first": True}
    for x in obs:
        assert (used.act(x, reward=9.0, **start) == fresh.act(x, reward=9.0)).all()
        assert all(map(torch.equal, used.state, fresh.state))
        start = {}
    used.act(obs[0])
    assert not any(map(torch.equal, used.state, fresh.state))


def test_a_mask_resets_only_the_chosen_environments(tmp_path):
    run = untrained("impala-lstm", tmp_path)
    obs = observations(30, 2)
    both, kept = bestiary.load(run), bestiary.load(run)
    for x in observations(7, 2):
        both.act(x), kept.act(x)
    both.reset([False, True])
    fresh = bestiary.load(run)
    for x in obs:
        actions, kept_actions, fresh_actions = both.act(x), kept.act(x), fresh.act(x)
        assert actions.tolist() == [kept_actions[0], fresh_actions[1]]
        for state, kept_state, fresh_state in zip(both.state, kept.state, fresh.state, strict=True):
            assert torch.equal(state[0], kept_state[0]) and not torch.equal(state[0], fresh_state[0])
            assert torch.equal(state[1], fresh_state[1]) and not torch.equal(state[1], kept_state[1])


def test_the_same_seed_samples_the_same_actions(tmp_path):
    run = untrained("impala-lstm", tmp_path)
    obs = observations(40, 1)[:, 0]
    before = torch.get_rng_state()
    actions = [[p.act(x) for x in obs] for p in (bestiary.load(run, mode="sampled", seed=s) for s in (1, 1, 2))]
    assert actions[0] == actions[1] != actions[2]
    assert torch.get_rng_state().equal(before)


def test_checkpoints_are_chosen_by_name_or_frames(tmp_path):
    run = untrained("impala-lstm", tmp_path)
    weights = run.load().weights
    run.save_best(50, 1.0, {k: 0 * v for k, v in weights.items()}, keep=1)
    zero, last = bestiary.load(run, checkpoint="best"), bestiary.load(run, checkpoint=0)
    assert all(not p.any() for p in zero.agent.parameters())
    assert any(p.any() for p in last.agent.parameters())
    with pytest.raises(UserError, match="has no checkpoint '7'"):
        bestiary.load(run, checkpoint=7)


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        ([((3,), {})], r"has observations of shape \(4,\), or \[B, ...\] of them, not \(3,\)"),
        ([((2, 2, 4), {})], r"not \(2, 2, 4\)"),
        ([((0, 4), {})], r"not \(0, 4\)"),
        ([((4,), {}), ((2, 4), {})], r"a batch of 2 follows one observation: call reset\(\)"),
        ([((2, 4), {}), ((3, 4), {})], r"a batch of 3 follows a batch of 2: call reset\(\)"),
        ([((2, 4), {"reward": [0.0] * 3})], r"reward must be a number or have shape \(2,\), not \(3,\)"),
        ([((2, 4), {"is_first": [True] * 3})], r"is_first must be a number or have shape \(2,\), not \(3,\)"),
    ],
)
def test_wrong_shapes_are_refused_in_one_sentence(calls, sentence, tmp_path):
    policy = bestiary.load(untrained("impala-lstm", tmp_path))
    *good, (shape, options) = calls
    for x, more in good:
        policy.act(np.zeros(x), **more)
    with pytest.raises(UserError, match=sentence) as refusal:
        policy.act(np.zeros(shape), **options)
    assert "\n" not in str(refusal.value)
    policy.reset()
    assert isinstance(policy.act(np.zeros(4)), int)


def test_wrong_masks_modes_and_types_are_refused(tmp_path):
    policy = bestiary.load(untrained("impala-lstm", tmp_path))
    with pytest.raises(UserError, match=re.escape("reset(mask) needs a boolean for each environment")):
        policy.reset([True])
    policy.act(np.zeros((2, 4)))
    for mask in ([True], [1.0, 0.0]):
        with pytest.raises(UserError, match="a batch of 2 was given before"):
            policy.reset(mask)
    with pytest.raises(UserError, match="mode='best' must be 'greedy' or 'sampled'"):
        bestiary.load(tmp_path / "impala-lstm", mode="best")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--command is for agents that follow commands"):
        bestiary.load(tmp_path / "impala-lstm", command=(1.0,))
    images = bestiary.load(untrained("impala-catch", tmp_path))
    shape = images.spec.obs_shape
    assert isinstance(images.act(np.zeros(shape, np.uint8)), int)
    with pytest.raises(UserError, match="has observations of type uint8, not float64"):
        images.act(np.zeros(shape))


def test_the_loops_of_the_page_run(monkeypatch, tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "policy.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 2
    untrained("impala-lstm", tmp_path / "runs").path.rename(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "docs/policy.md", "exec"), {})


def test_the_public_names_are_listed_and_typed():
    assert dir(bestiary) == sorted(bestiary.__all__)
    assert all(getattr(bestiary, name) is not None for name in bestiary.__all__)
    assert {"load", "train", "iterate", "evaluate", "preset", "register", "Experiment", "Run", "video"} < set(
        bestiary.__all__
    )
    assert (Path(bestiary.__file__).parent / "py.typed").exists()
