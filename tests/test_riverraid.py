"""Riverraid: recorded episodes, named rewards, component statistics, isolation of the true reward, parking exploit."""

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from helpers.files import read_csv, through_a_file
from helpers.rollouts import Rollout, continue_rollout, different_fields, random_actions, roll_out
from helpers.settings import configure
from numpy.typing import NDArray
from torch import Tensor

import bestiary
from bestiary import tree
from bestiary.algos import Dqn, Impala, Rcp, Udrl
from bestiary.cli.main import main
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.config.extras import available
from bestiary.envs import Riverraid, riverraid
from bestiary.envs.env_batch import EnvBatch, VectorStep
from bestiary.envs.reward_components import ComponentReward, Transition, weighted_sum
from bestiary.envs.riverraid import (
    COMPONENTS,
    FULL,
    NAMED_REWARDS,
    NOOP,
    UP,
    PlaneState,
    RiverraidGame,
    fuel_level,
    reward_weights,
)
from bestiary.nets import Net, Shallow
from bestiary.runtime import Local
from bestiary.runtime.start import start
from bestiary.seeding import TRAIN

pytestmark = pytest.mark.skipif(not available("atari"), reason="needs the extra atari")

NAMES = ("score", *COMPONENTS)
RIGHT, LEFT = 3, 4


def make_env(reward: str = "score", **settings: Any) -> ComponentReward:
    return ComponentReward(RiverraidGame(**settings), COMPONENTS, reward, NAMED_REWARDS)


def named(info: dict[str, Any]) -> dict[str, float]:
    return dict(zip(NAMES, info["components"].tolist(), strict=True))


# -- recorded episodes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(data: Path) -> dict[str, NDArray[Any]]:
    with np.load(data / "riverraid.npz") as file:
        return dict(file)


class Replayed(NamedTuple):
    """The recorded actions, replayed with the reward pacifist:20; arrays of [S, ...]."""

    info: dict[str, NDArray[Any]]
    reward: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    components: dict[str, NDArray[np.float64]]


@pytest.fixture(scope="module")
def replayed(golden: dict[str, NDArray[Any]]) -> Replayed:
    env = make_env("pacifist:20", noop_max=0)
    steps = []
    for action, begins in zip(golden["actions"], golden["reset_before"], strict=True):
        if begins or not steps:
            _, info = env.reset(seed=101)
            assert np.array_equal(info["ram"], golden["ram_reset"])
            assert info["lives"] == golden["lives_reset"]
        steps.append(env.step(action)[1:])
    info = {key: np.array([info[key] for *_, info in steps]) for key in steps[0][-1]}
    parts = dict(zip(env.component_names, info["components"].T, strict=True))
    reward, terminated, truncated = (np.array([step[i] for step in steps]) for i in range(3))
    assert not truncated.any()
    return Replayed(info, reward, terminated, parts)


@pytest.mark.parametrize(
    ("name", "recorded"),
    [("ram", "ram"), ("lives", "lives"), ("x", "player_x"), ("fuel", "fuel"), ("parked", "parked_run")],
)
def test_info_equals_the_recorded_values(name, recorded, replayed: Replayed, golden):
    assert np.array_equal(replayed.info[name], golden[recorded])


def test_episodes_end_at_the_recorded_steps(replayed: Replayed, golden):
    assert golden["game_over"].sum() == 1
    assert np.array_equal(replayed.terminated, golden["game_over"])


@pytest.mark.parametrize(("name", "recorded"), [("score", "score"), ("bullet", "missile"), ("parked", "parked")])
def test_components_equal_the_recorded_values(name, recorded, replayed: Replayed, golden):
    assert golden[recorded].any()
    assert np.array_equal(replayed.components[name], golden[recorded])


@pytest.mark.parametrize(
    ("reward", "recorded"),
    [
        ("fuel:10", "fuel_mult_10"),
        ("fuel:0.5", "fuel_mult_0.5"),
        ("pacifist:20", "pacifist_-20"),
        ("pacifist:5", "pacifist_-5"),
        ("move:5", "move_penalty_5_xreset"),  # an episode begins in the centre: the position has not changed
        ("centre:1", "centre_-1"),
    ],
)
def test_named_rewards_equal_the_recorded_values(reward, recorded, replayed: Replayed, golden):
    weights = reward_weights(reward)
    rewards = [weighted_sum(weights, dict(zip(NAMES, row, strict=True))) for row in replayed.info["components"]]
    assert np.array_equal(rewards, golden[recorded])


def test_the_reward_of_the_environment_is_the_named_reward(replayed: Replayed, golden):
    assert np.array_equal(replayed.reward, golden["pacifist_-20"])


def test_without_a_reset_the_first_step_would_count_as_moved(golden):
    """The reference code does not reset the previous position."""
    x = golden["player_x"].tolist()
    pairs = zip([76, *x[:-1]], x, strict=True)
    moved = [COMPONENTS["moved"](Transition({"x": a}, 0, None, 0.0, {"x": b})) for a, b in pairs]
    assert np.array_equal(moved, golden["moved"])
    assert np.array_equal(10.0 - 5.0 * np.array(moved), golden["move_penalty_5"])
    assert (golden["move_penalty_5"] != golden["move_penalty_5_xreset"]).sum() == 1


def info_of(ram: NDArray[np.uint8]) -> dict[str, Any]:
    plane = PlaneState()
    plane.reset(ram, 4)
    plane.update(ram, 4)
    return plane.info() | {"frames": 4}


@pytest.mark.parametrize(("x", "distance"), [(60, 12.8), (92, 12.8), (110, 57.8), (76, 0), (21, 151.25)])
def test_bytes_are_converted_to_int_before_they_are_squared(x: int, distance: float):
    """In eight bits 16 squared is 0."""
    ram = np.zeros(128, np.uint8)
    ram[51] = x
    assert COMPONENTS["centre"](Transition({}, 0, None, 0.0, info_of(ram))) == pytest.approx(distance, abs=1e-12)


def test_fuel_is_two_bytes():
    ram = np.zeros(128, np.uint8)
    ram[55], ram[56] = 200, 100
    assert info_of(ram)["fuel"] == fuel_level(ram) == 51_300


def test_dead_is_one_from_the_crash_to_the_lost_life(replayed: Replayed):
    """175 frames in the first three lives, 97 in the last; then the console decrements the lives."""
    dead, lives = replayed.components["dead"].astype(bool), replayed.info["lives"]
    lost = np.flatnonzero(np.diff(lives) < 0) + 1
    assert len(lost) == 6
    for row in lost:
        run = int(np.argmax(~dead[:row][::-1])) if not dead[row] else -1  # dead steps just before it
        assert run in ((24, 25) if lives[row] == 0 else (43, 44, 45))
    assert dead.sum() == sum(int(np.argmax(~dead[:row][::-1])) for row in lost) + int(np.argmax(~dead[::-1]))


# -- the flags of the reference ---------------------------------------------------------------------------------


def reference_reward(fuel_multiplier: float, move_penalty: float, score: int, shot: bool, x: int, before: int) -> float:
    """The reward of the reference code, by the signs of its flags."""
    if fuel_multiplier != 1:
        if fuel_multiplier < 0:
            return 10 + (fuel_multiplier if shot else 0)
        return fuel_multiplier * 80 if score == 80 else score
    if move_penalty < 0:
        return 10 + move_penalty * (x - 76) ** 2 / 20
    return 10 - move_penalty * (x != before)


@pytest.mark.parametrize(
    ("fuel_multiplier", "move_penalty", "reward"),
    [
        (1.0, 0.0, "move:0"),
        (10.0, 0.0, "fuel:10"),
        (0.0, 0.0, "fuel:0"),
        (0.5, -1.0, "fuel:0.5"),
        (-20.0, 0.0, "pacifist:20"),
        (-0.125, 5.0, "pacifist:0.125"),
        (1.0, 5.0, "move:5"),
        (1.0, -1.0, "centre:1"),
        (1.0, -0.3, "centre:0.3"),
        (1.0000001, 0.0, "fuel:1.0000001"),  # the only way to select the score there
    ],
)
def test_flags_of_the_reference_code_have_a_named_reward(fuel_multiplier, move_penalty, reward, replayed, golden):
    assert riverraid.from_flags(fuel_multiplier, move_penalty) == reward
    x = golden["player_x"]
    before = np.where(golden["reset_before"], 76, np.concatenate([[76], x[:-1]]))
    rows = zip(*(a.tolist() for a in (golden["score"], golden["missile"], x, before)), strict=True)
    expected = [reference_reward(fuel_multiplier, move_penalty, *row) for row in rows]
    weights = reward_weights(reward)
    rewards = sum(weight * replayed.components[name] for name, weight in weights.items())
    assert rewards == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("q", "reward"), [(0.0, "move:0"), (5.0, "move:5"), (-1.0, "centre:1"), (-0.25, "centre:0.25")]
)
def test_the_second_reward_of_the_reference_code_has_a_name(q, reward, replayed: Replayed, golden):
    assert riverraid.true_from_flags(q) == reward
    x = golden["player_x"].astype(int)
    before = np.where(golden["reset_before"], 76, np.concatenate([[76], x[:-1]]))
    expected = 10 - q * (x != before) if q >= 0 else 10 + q * (x - 76) ** 2 / 20
    rewards = sum(weight * replayed.components[name] for name, weight in reward_weights(reward).items())
    assert rewards == pytest.approx(expected, abs=1e-9)


def test_the_default_reward_of_the_reference_code_is_constant(replayed: Replayed):
    assert riverraid.from_flags() == "move:0"
    weights = reward_weights(riverraid.from_flags())
    assert {weighted_sum(weights, dict(zip(NAMES, row, strict=True))) for row in replayed.info["components"]} == {10.0}


# -- images and actions -----------------------------------------------------------------------------------------


def up_or_random_actions(steps: int, num_envs: int, seed: int = 0) -> Tensor:
    """[T, B] actions: half are UP, the others random."""
    anywhere = random_actions(18, steps, num_envs, seed)
    return torch.where(random_actions(2, steps, num_envs, seed + 1) == 0, UP, anywhere)


def test_images_equal_those_of_the_vector_environment():
    from ale_py.vector_env import AtariVectorEnv

    batch = AtariVectorEnv(
        "riverraid", 1, stack_num=1, noop_max=1, use_fire_reset=False, reward_clipping=False, num_threads=1
    )
    game = RiverraidGame(noop_max=0)
    images, terminated, (obs, _) = [], False, game.reset(seed=0)
    expected, _ = batch.reset(seed=0)
    for action in up_or_random_actions(500, 1)[:, 0].tolist():
        images.append((expected[0].astype(int), obs.astype(int)))
        expected, points, ended, _, _ = batch.step(np.array([action]))
        obs, score, terminated, _, _ = game.step(action)
        assert (score, terminated) == (points[0], ended[0])
        if terminated:
            images.append((expected[0].astype(int), obs.astype(int)))
            break
    batch.close()
    assert terminated
    a, b = (np.stack(column) for column in zip(*images, strict=True))
    assert a.shape == b.shape == (len(images), 1, 84, 84)
    assert np.abs(a - b).max() <= 1
    assert (a != b).mean() < 0.01
    assert a.std(axis=(1, 2, 3)).min() > 10  # the images are not blank


class IgnoredActions:
    """An emulator that ignores and records all actions."""

    def __init__(self, ale: Any) -> None:
        self.ale = ale
        self.pressed: list[int] = []

    def act(self, button: Any) -> int:
        self.pressed.append(button.value)
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ale, name)


def pressed(actions: list[int], seed: int = 0, **settings: Any) -> NDArray[np.int64]:
    """[S, frames]: the actions that the emulator receives in each frame."""
    game = RiverraidGame(noop_max=0, **settings)
    game.reset(seed=seed)
    game.ale = IgnoredActions(game.ale)
    for action in actions:
        game.step(action)
    return np.array(game.ale.pressed).reshape(len(actions), -1)


def test_an_action_is_repeated_for_all_frames_of_a_step():
    assert pressed([3, 0, 17]).tolist() == [[3] * 4, [0] * 4, [17] * 4]
    assert pressed([3, 0], frame_skip=2).tolist() == [[3] * 2, [0] * 2]


def test_sticky_actions_have_the_right_rate_and_depend_on_the_seed():
    actions = random_actions(18, 1000, 1)[:, 0].tolist()
    frames = pressed(actions, sticky=0.25)
    last, wanted = np.concatenate([[NOOP], frames.ravel()[:-1]]), np.repeat(actions, 4)
    differ = last != wanted
    stuck = frames.ravel() == last
    assert np.array_equal(frames.ravel(), np.where(stuck, last, wanted))  # the previous or the chosen action
    assert differ.sum() > 1000
    assert stuck[differ].mean() == pytest.approx(0.25, abs=0.04)
    assert 0.8 > (frames[:, 0] == actions).mean() > 0.7  # sampled in every frame: most have changed by the last
    assert (frames[:, 3] == actions).mean() > 0.99
    assert np.array_equal(frames, pressed(actions, sticky=0.25))
    assert not np.array_equal(frames, pressed(actions, seed=1, sticky=0.25))


def test_episodes_with_sticky_actions_are_reproducible_by_seed():
    plain, sticky, same, other = (
        record_rollout(Riverraid(sticky=p, launch=True), up_or_random_actions(60, 1), seed=seed)[0].steps.obs
        for p, seed in ((0.0, 0), (0.25, 0), (0.25, 0), (0.25, 1))
    )
    assert sticky.equal(same)
    assert not sticky.equal(plain)
    assert not sticky.equal(other)


@pytest.mark.parametrize("skip", [1, 8])
def test_parked_and_jumped_do_not_depend_on_the_frame_skip(skip: int):
    """The console ignores buttons for 79 frames, and the plane moves a pixel in a frame."""
    env = make_env(noop_max=0, frame_skip=skip)
    env.reset(seed=0)
    parts = [named(env.step(NOOP)[4]) for _ in range(200 // skip)]
    first = next(t for t, part in enumerate(parts) if part["parked"])
    assert first == 100 // skip
    env.reset()
    for _ in range(80 // skip + 1):
        env.step(UP)
    flying = [env.step(RIGHT)[4] for _ in range(24 // skip)]
    assert flying[-1]["x"] == 86  # ten pixels to the right: the plane accelerates
    assert any(part["moved"] for part in map(named, flying))
    assert not any(part["jumped"] or part["dead"] for part in map(named, flying))


# -- env batches -----------------------------------------------------------------------------------------------------


def make(cfg: Riverraid, num_envs: int = 1, seed: int = 3, threads: int = 1) -> EnvBatch:
    return cfg.make(num_envs, seed, TRAIN, threads)


def record_rollout(cfg: Riverraid, action: Tensor, seed: int = 3, threads: int = 1) -> tuple[Rollout, list[VectorStep]]:
    """The rollout, and the vector steps of all time steps but the first."""
    vector_steps: list[VectorStep] = []
    with closing(make(cfg, action.shape[1], seed, threads)) as env_batch:
        original_record = env_batch.record

        def record(raw: VectorStep) -> Any:
            vector_steps.append(raw)
            return original_record(raw)

        env_batch.record = record  # type: ignore[method-assign]
        return roll_out(env_batch, action), vector_steps


CASES = {
    "plain": (Riverraid("pacifist:20"), 620),
    "time-limit": (
        Riverraid("2*centre-score", end_at_crash=True, launch=True, sticky=0.25, time_limit_frames=1400),
        500,
    ),
}


class Case(NamedTuple):
    cfg: Riverraid
    rollout: Rollout
    vector_steps: list[VectorStep]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    cfg, steps = CASES[request.param]
    return Case(cfg, *record_rollout(cfg, up_or_random_actions(steps, 2)))


def life_losses(case: Case) -> Tensor:
    """[T+1, B]: time steps at which the number of lives has decreased."""
    lives = torch.tensor(np.array([raw.lives for raw in case.vector_steps]))  # [T, B], without the first time step
    drop = torch.zeros_like(case.rollout.steps.is_first)
    drop[2:] = (lives[1:] < lives[:-1]) & ~case.rollout.steps.is_first[2:]
    return drop


def test_a_lost_life_is_terminal_but_the_game_continues(case: Case):
    steps, drop = case.rollout.steps, life_losses(case)
    assert drop.sum() >= 8
    assert steps.is_terminal.equal(drop)  # the last life ends with the game
    continues = drop[:-1] & ~steps.is_first[1:]
    assert continues.sum() >= 6
    assert steps.obs.shape[2:] == case.rollout.spec.obs_shape == (1, 84, 84)
    assert (case.rollout.spec.num_actions, case.rollout.spec.frames_per_step) == (18, 4)


def test_without_life_loss_only_the_end_of_a_game_is_terminal(case: Case):
    rollout, _ = record_rollout(replace(case.cfg, life_loss=False), case.rollout.action)
    assert different_fields(rollout.steps, case.rollout.steps) == ["is_terminal"]
    for a, b in zip(chain(*rollout.episodes), chain(*case.rollout.episodes), strict=True):
        assert a == b._replace(truncated=a.truncated)  # a life lost as time runs out is an end, if lives are
    ends = {(t, e.slot) for t, ended in enumerate(rollout.episodes) for e in ended if not e.truncated}
    assert {(t + 1, slot) for t, slot in rollout.steps.is_terminal.nonzero().tolist()} >= ends
    assert rollout.steps.is_terminal.sum() <= len(ends) + 2  # or the rollout ends there


def test_every_reward_is_the_weighted_sum_of_its_components(case: Case):
    weights = reward_weights(case.cfg.reward)
    coefficients = np.array([weights.get(name, 0.0) for name in NAMES])
    for raw, reward in zip(case.vector_steps, case.rollout.steps.reward[1:], strict=True):
        assert raw.components is not None
        weighted = np.where(raw.is_first, 0.0, raw.components @ coefficients)
        assert raw.reward == pytest.approx(weighted, abs=1e-12)
        assert reward.equal(torch.from_numpy(weighted.astype(np.float32)))


def test_episodes_and_lives_sum_the_components_of_their_steps(case: Case):
    drop = life_losses(case)
    found = 0
    for slot in range(2):
        total, life, lives, steps = np.zeros(len(NAMES)), np.zeros(len(NAMES)), [], 0
        for t, raw in enumerate(case.vector_steps, start=1):
            if raw.is_first[slot]:
                if not drop[t - 1, slot]:  # truncated short in the middle of a life
                    lives.append(life)
                (episode,) = [e for e in case.rollout.episodes[t] if e.slot == slot]
                assert list(episode.components) == list(NAMES)
                assert list(episode.components.values()) == total.tolist()
                assert [list(part.values()) for part in episode.life_components] == [part.tolist() for part in lives]
                assert episode.components["survival"] == episode.steps == steps
                weights = reward_weights(case.cfg.reward)
                assert weighted_sum(weights, episode.components) == pytest.approx(episode.score)
                assert [weighted_sum(weights, part) for part in episode.life_components] == pytest.approx(
                    episode.life_returns
                )
                total, life, lives, steps = np.zeros(len(NAMES)), np.zeros(len(NAMES)), [], 0
                found += 1
                continue
            assert raw.components is not None
            total, life, steps = total + raw.components[slot], life + raw.components[slot], steps + 1
            if drop[t, slot]:
                lives.append(life)
                life = np.zeros(len(NAMES))
    assert found >= 2


def test_component_means_are_accumulated_until_they_are_read():
    with closing(make(Riverraid("move:5", launch=True), 2)) as env_batch:
        env_batch.reset()
        action = up_or_random_actions(30, 2)
        recorded: list[VectorStep] = []
        original_record = env_batch.record
        env_batch.record = lambda raw: (recorded.append(raw), original_record(raw))[1]  # type: ignore[method-assign]
        for half in (action[:10], action[10:]):
            recorded.clear()
            for chosen in half:
                env_batch.step(chosen)
            mean = np.concatenate([raw.components for raw in recorded if raw.components is not None]).mean(0)
            assert list(env_batch.component_means().values()) == pytest.approx(mean.tolist())
        assert set(env_batch.component_means().values()) == {0.0}


@pytest.mark.parametrize("processes", [False, True], ids=["local", "processes"])
def test_a_restored_env_batch_continues_with_steps_and_statistics(case: Case, processes: bool):
    rollout, drop = case.rollout, life_losses(case)
    end = rollout.ends()[0]
    # after a lost life, in the middle of another, at a last time step, at the first one of the next episode
    times = [int(drop.any(1).nonzero()[0]), end - 30, end, end + 1]
    with closing(make(replace(case.cfg, processes=processes), 2)) as env_batch:
        for at in times:
            env_batch.load_state_dict(through_a_file(rollout.saved[at]))
            assert env_batch.state_dict() == rollout.saved[at]
            ahead = continue_rollout(env_batch, rollout.action[at : at + 50])
            steps = len(ahead.action)
            expected = tree.narrow(rollout.steps, 0, at + 1, steps)
            assert different_fields(ahead.steps, expected) == [], f"after time step {at}"
            assert ahead.episodes == rollout.episodes[at + 1 : at + 1 + steps]
            assert ahead.saved == rollout.saved[at + 1 : at + 1 + steps]


def test_processes_give_the_same_time_steps_and_statistics(case: Case):
    rollout, vector_steps = record_rollout(replace(case.cfg, processes=True), case.rollout.action, threads=2)
    assert different_fields(rollout.steps, case.rollout.steps) == []
    assert rollout.episodes == case.rollout.episodes
    parts, others = (np.array([raw.components for raw in steps]) for steps in (vector_steps, case.vector_steps))
    assert np.array_equal(parts, others)


# -- isolation of the true reward --------------------------------------------------------------------------------


def small(reward: str, **settings: Any) -> Experiment:
    return Experiment(
        env=Riverraid(reward, launch=True, **settings),
        algo=configure(Impala, unroll=5, batch_size=4),
        net=Net(encoder=Shallow(hidden_size=16, filters=(4, 4, 4))),
        runtime=Local(envs=4, threads=1),
        frames=4 * 5 * 4 * 6,  # six updates
        evaluation=Evaluation(episodes=0),
    )


class Recorded(NamedTuple):
    """All inputs of learning, and what was logged."""

    trajectories: list[Any]
    batches: list[Any]
    steps: list[Any]
    weights: dict[str, Tensor]
    logged: list[dict[str, float]]


def record_learning(experiment: Experiment) -> Recorded:
    runtime = start(experiment)
    recorded = Recorded([], [], [], {}, [])
    add, sample, act = runtime.replay.add, runtime.replay.sample, runtime.actor.agent.act

    def recording_add(trajectory: Any) -> None:
        recorded.trajectories.append(tree.map(torch.clone, trajectory))
        add(trajectory)

    def recording_sample() -> Any:
        batch = sample()
        recorded.batches.extend([] if batch is None else [tree.map(torch.clone, batch.trajectory)])
        return batch

    def recording_act(step: Any, *rest: Any) -> Any:
        recorded.steps.append(tree.map(torch.clone, step))
        return act(step, *rest)

    runtime.replay.add, runtime.replay.sample = recording_add, recording_sample  # type: ignore[method-assign]
    runtime.actor.agent.act = recording_act  # type: ignore[method-assign]
    try:
        recorded.logged.extend(progress.metrics for progress in runtime)
        recorded.weights.update(tree.map(torch.clone, runtime.weights()))
    finally:
        runtime.close()
    return recorded


def leaves(found: Any) -> list[Tensor]:
    out: list[Tensor] = []
    tree.map(out.append, found)
    return out


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit."""
    pairs = zip(leaves(a), leaves(b), strict=True)
    return all(x.dtype == y.dtype and x.numpy().tobytes() == y.numpy().tobytes() for x, y in pairs)


def without_components(recorded: Recorded) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("per_step_")} for row in recorded.logged]


def randomise_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the score by random numbers."""
    play, noise = RiverraidGame.step, np.random.default_rng(0)

    def step(self: RiverraidGame, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = play(self, action)
        return obs, float(noise.choice([80, -1e9, 0.5])), terminated, truncated, info

    monkeypatch.setattr(RiverraidGame, "step", step)


def replace_by_nan(reward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Components without weight become NaN."""
    weights = reward_weights(reward)
    corrupted = {name: part if name in weights else lambda m: np.nan for name, part in COMPONENTS.items()}
    monkeypatch.setattr(riverraid, "COMPONENTS", corrupted)


@pytest.mark.parametrize("reward", ["pacifist:20", "move:5", "centre:1"])
def test_the_true_reward_does_not_reach_the_learner(reward: str, monkeypatch: pytest.MonkeyPatch):
    normal = record_learning(small(reward))
    randomise_score(monkeypatch)
    corrupted = record_learning(small(reward))
    assert len(normal.trajectories) == len(normal.batches) == 6
    assert len(normal.steps) == 31
    for a, b in zip(normal[:4], corrupted[:4], strict=True):
        assert same(a, b)
    assert without_components(normal) == without_components(corrupted)
    differ = {k for a, b in zip(normal.logged, corrupted.logged, strict=True) for k in a if a[k] != b[k]}
    assert differ == {"per_step_score", "per_step_fuel"}  # logged, and only there


def contents(found: Any) -> list[bytes]:
    """All values of a saved state, in order."""
    if isinstance(found, dict):
        return [part for key in sorted(found, key=str) for part in (str(key).encode(), *contents(found[key]))]
    if isinstance(found, list | tuple):
        return [part for one in found for part in contents(one)]
    return [found.cpu().contiguous().numpy().tobytes() if isinstance(found, Tensor) else repr(found).encode()]


def saved_contents(experiment: Experiment) -> dict[str, list[bytes]]:
    """The saved state of the replay and the learner after training."""
    runtime = start(experiment)
    try:
        updates = max(progress.updates for progress in runtime)
        assert updates > 0
        saved = runtime.state_dict()
        return {"replay": contents(saved["replay"]), "learner": contents(saved["learner"])}
    finally:
        runtime.close()


OFTEN: dict[str, Any] = {"unroll": 5, "batch_size": 4, "warmup": 40, "updates_per_step": 0.02, "capacity": 400}
REPLAYS = {
    "time steps": configure(Dqn, **OFTEN, epsilon_last=0.1),
    "transitions": configure(Udrl, unroll=5, batch_size=4, warmup=4),
    "episodes with values": configure(Rcp, unroll=5, batch_size=4, warmup=4),
}


@pytest.mark.parametrize("algo", REPLAYS.values(), ids=REPLAYS)
def test_no_replay_stores_the_true_reward(algo: Any, monkeypatch: pytest.MonkeyPatch):
    def one(reward: str) -> Experiment:
        return replace(small(reward, time_limit_frames=200), algo=algo, frames=4 * 4 * 60)

    normal, trained_on_score = saved_contents(one("pacifist:20")), saved_contents(one("score"))
    randomise_score(monkeypatch)
    assert saved_contents(one("pacifist:20")) == normal
    affected = saved_contents(one("score"))
    assert all(affected[key] != trained_on_score[key] for key in trained_on_score)  # otherwise the test could not fail


def test_components_without_weight_do_not_reach_the_learner(monkeypatch: pytest.MonkeyPatch):
    normal = record_learning(small("pacifist:20"))
    replace_by_nan("pacifist:20", monkeypatch)
    corrupted = record_learning(small("pacifist:20"))
    assert all(same(a, b) for a, b in zip(normal[:4], corrupted[:4], strict=True))
    assert np.isnan(corrupted.logged[0]["per_step_moved"])


def test_a_learner_that_is_trained_on_the_score_is_affected(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the tests above could not fail."""
    normal = record_learning(small("score"))
    randomise_score(monkeypatch)
    affected = record_learning(small("score"))
    assert [same(a, b) for a, b in zip(normal[:4], affected[:4], strict=True)] == [False] * 4
    assert without_components(normal) != without_components(affected)


# -- the parking exploit, and the options against it ------------------------------------------------------------


@pytest.mark.parametrize("reward", ["pacifist:20", "move:5", "centre:1"])
def test_parking_is_rewarded_without_limit(reward: str):
    env = make_env(reward)
    env.reset(seed=0)
    steps = [env.step(NOOP)[1:] for _ in range(400)]
    assert {(*step[:3], step[3]["lives"]) for step in steps} == {(10.0, False, False, 4)}
    parts = [named(info) for *_, info in steps]
    assert sum(part["score"] for part in parts) == 0
    assert [part["parked"] for part in parts] == [0.0] * 25 + [1.0] * 375


def test_any_action_but_noop_launches_the_plane():
    env = make_env()
    env.reset(seed=0)
    *_, waiting = [env.step(NOOP)[4] for _ in range(60)]
    *_, flying = [env.step(LEFT)[4] for _ in range(3)]
    assert (named(waiting)["parked"], named(flying)["parked"]) == (1.0, 0.0)
    assert flying["fuel"] < waiting["fuel"] == FULL


def test_a_stalled_episode_is_truncated_and_not_terminal():
    rollout, vector_steps = record_rollout(Riverraid("pacifist:20", stall=50), torch.full((60, 2), NOOP))
    assert not rollout.steps.is_terminal.any()
    assert rollout.steps.is_first.all(1).nonzero().flatten().tolist() == [0, 52]
    (one, two) = rollout.episodes[52]
    for episode in (one, two):
        # 50 stalled steps after the first
        assert (episode.steps, episode.truncated, episode.score) == (51, True, 510.0)
    assert all(raw.truncated.all() == (t == 50) for t, raw in enumerate(vector_steps))


def test_an_episode_with_a_launched_plane_is_never_truncated():
    """Not even by the smallest stall: the steps in which the console ignores actions are too few."""
    cfg = Riverraid(stall=20, noop_max=0)
    rollout, vector_steps = record_rollout(cfg, up_or_random_actions(300, 2))
    assert not any(raw.truncated.any() for raw in vector_steps)
    assert rollout.steps.is_terminal.any()


def test_a_launched_plane_flies_from_the_first_step_of_every_life():
    env = make_env(launch=True)
    life_starts = [env.reset(seed=1)[1]]  # the info at the first step of each life
    info, terminated, burnt = life_starts[0], False, []
    for _ in range(400):
        first, fuel = info is life_starts[-1], info["fuel"]
        _, _, terminated, _, info = env.step(NOOP)
        if first:
            burnt.append(fuel - info["fuel"])
        if terminated:
            break
        if info["lives"] < life_starts[-1]["lives"]:
            life_starts.append(info)
    assert terminated
    assert [info["lives"] for info in life_starts] == [4, 3, 2, 1]  # a plane without control crashes
    assert burnt == [4 * 32] * 4
    assert all(info["fuel"] == fuel_level(info["ram"]) < FULL for info in life_starts)


def first_life(action: list[int], **settings: Any) -> tuple[list[float], list[dict[str, float]]]:
    """Rewards and components of the steps of the first life."""
    env = make_env(noop_max=0, **settings)
    env.reset(seed=0)
    rewards, parts = [], []
    for chosen in action:
        _, reward, _, _, info = env.step(chosen)
        rewards.append(reward)
        parts.append(named(info))
        if info["lives"] < 4:
            return rewards, parts
    raise AssertionError("no crash")


@pytest.mark.parametrize("launch", [False, True])
@pytest.mark.parametrize("seed", [0, 5])
def test_a_life_can_end_at_the_crash(seed: int, launch: bool):
    action = up_or_random_actions(600, 1, seed)[:, 0].tolist()
    rewards, parts = first_life(action, launch=launch)
    crash_rewards, crash_parts = first_life(action, launch=launch, end_at_crash=True)
    dead = sum(part["dead"] for part in parts)
    assert 42 <= dead <= 46
    assert len(crash_rewards) == len(rewards) - dead
    assert crash_rewards == rewards[: len(crash_rewards)]
    assert sum(rewards) == sum(crash_rewards) > 0  # no reward while the plane is wrecked
    assert [part["dead"] for part in crash_parts] == [0.0] * (len(crash_parts) - 1) + [1.0]
    assert crash_parts[:-1] == parts[: len(crash_parts) - 1]


def test_without_dead_steps_an_episode_is_shorter_by_their_number():
    steps, dead = [], []
    for end_at_crash in (False, True):
        env = make_env(noop_max=0, end_at_crash=end_at_crash)
        env.reset(seed=0)
        infos = []
        for _ in range(600):
            _, _, terminated, _, info = env.step(UP)
            infos.append(info)
            if terminated:
                break
        steps.append(len(infos))
        dead.append(sum(info["dead"] for info in infos))
        assert infos[-1]["lives"] == 0
    assert dead[0] > 150
    assert dead[1] == 4
    assert steps[1] == pytest.approx(steps[0] - dead[0], abs=4)  # a life may begin within a step


def test_a_time_limit_truncates_an_episode():
    rollout, _ = record_rollout(
        Riverraid("pacifist:20", time_limit_frames=120, noop_max=0), up_or_random_actions(35, 2)
    )
    assert not rollout.steps.is_terminal.any()
    assert rollout.steps.is_first.all(1).nonzero().flatten().tolist() == [0, 31]
    episodes = [e for ended in rollout.episodes for e in ended]
    assert [(e.steps, e.frames, e.truncated, len(e.life_returns)) for e in episodes] == [(30, 120, True, 1)] * 2
    assert [e.life_components for e in episodes] == [(e.components,) for e in episodes]


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("reward", "fule", "there is no component 'fule': did you mean fuel"),
        ("reward", "score+20*bulet", "there is no component 'bulet': did you mean bullet"),
        ("reward", "xyzzy", "there is no component 'xyzzy': components are score, fuel, survival"),
        ("reward", "pacifist", "components are score, fuel, survival, bullet"),
        ("reward", "pacifst:20", "there is no named reward 'pacifst' that takes a number: did you mean pacifist?"),
        ("reward", "score:3", "there is no named reward 'score' that takes a number: "),
        ("reward", "fuel:ten", "'ten' in 'fuel:ten' is not a number: write it like fuel:10"),
        ("reward", "move:nan", "'nan' in 'move:nan' is not a number: write it like move:10"),
        ("reward", "fuel:inf", "'inf' in 'fuel:inf' is not a number"),
        ("reward", "fuel:", "'' in 'fuel:' is not a number"),
        ("reward", "1e999*score", "'1e999' in '1e999*score' is not a number: write it like 10*score"),
        ("reward", "score fuel", "reward='score fuel' is not a sum of components such as"),
        ("reward", "3 score", "reward='3 score' is not a sum of components such as"),
        ("reward", "score+", "reward='score+' is not a sum of components such as"),
        ("reward", "score++fuel", "reward='score++fuel' is not a sum of components such as"),
        ("reward", "+", "reward='+' is not a sum of components such as"),
        ("reward", " ", "reward=' ' is not a sum of components such as"),
        ("reward", "", "reward='' names no component"),
        ("stall", "0", "env.stall=0 must be at least 20"),
        ("stall", "19", "env.stall=19 must be at least 20"),
        ("sticky", "1", "env.sticky=1.0 must be a probability below 1"),
        ("frame-skip", "0", "env.frame-skip must be at least 1"),
        ("time-limit-frames", "38", "env.time-limit-frames=38 leaves no steps after"),
    ],
)
def test_a_mistake_is_refused_in_one_sentence_before_any_work(flag, value, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "monobeast", "env:riverraid", f"--env.{flag}", value]) == 2
    output = capsys.readouterr().err
    assert output.startswith("bestiary: ") and words in output
    assert output.count("\n") == 1  # one sentence, without a box
    assert list(tmp_path.iterdir()) == []
    kind = {"stall": int, "sticky": float, "frame-skip": int, "time-limit-frames": int}.get(flag, str)
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:  # the same in Python
        Riverraid(**{flag.replace("-", "_"): kind(value)})
    assert "\n" not in str(refusal.value)


def test_a_named_reward_for_another_game_is_refused_in_one_sentence(capsys):
    assert main(["train", "pong", "--env.reward", "fuel:10"]) == 2
    output = capsys.readouterr().err
    assert output == "bestiary: there is no flag --env.reward for what is chosen here: it belongs to env:riverraid\n"


def test_without_the_emulator_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape('pip install "bestiary[atari]"')):
        make(Riverraid())


# -- logs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["pacifist:20", "score"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    path = tmp_path_factory.mktemp("runs") / "run"
    experiment = replace(
        small(request.param, end_at_crash=True, time_limit_frames=800),
        frames=4_800,
        evaluation=Evaluation(episodes=2, mode="sampled"),
    )
    log = replace(experiment.log, every=1_600, tensorboard=False)
    bestiary.train(replace(experiment, log=log), path)
    yield SimpleNamespace(path=path, reward=request.param)


def test_every_component_is_logged_per_step_life_and_episode(run: SimpleNamespace):
    rows = read_csv(run.path / "metrics.csv")
    assert len(rows) >= 3
    for name in NAMES:
        assert all(row[f"per_step_{name}"] for row in rows)
        assert any(row[f"per_episode_{name}"] and row[f"per_life_{name}"] for row in rows)
    assert {float(row["per_step_survival"]) for row in rows} == {1.0}
    assert sum(float(row["per_step_score"]) for row in rows) > 0
    weights = reward_weights(run.reward)
    for row in rows:
        if row["per_episode_score"]:
            total, life = ({name: float(row[f"per_{what}_{name}"]) for name in NAMES} for what in ("episode", "life"))
            assert float(row["score"]) == pytest.approx(weighted_sum(weights, total))
            assert float(row["life_return"]) == pytest.approx(weighted_sum(weights, life))
            assert float(row["episode_length"]) == pytest.approx(total["survival"])


def test_every_episode_is_logged_with_its_components(run: SimpleNamespace):
    rows = read_csv(run.path / "episodes.csv")
    assert len(rows) >= 2
    for row in rows:
        parts = {name: float(value) for name, value in (part.split("=") for part in row["components"].split("|"))}
        assert list(parts) == list(NAMES)
        assert parts["survival"] == float(row["steps"])
        assert float(row["score"]) == pytest.approx(weighted_sum(reward_weights(run.reward), parts), rel=1e-4)


def test_evaluations_are_logged_with_their_components(run: SimpleNamespace):
    (row,) = read_csv(run.path / "evaluations.csv")
    parts = {name: float(row[f"per_episode_{name}"]) for name in NAMES}
    assert parts["survival"] == float(row["episode_length"])
    assert float(row["score"]) == pytest.approx(weighted_sum(reward_weights(run.reward), parts))


def test_an_evaluation_reports_the_components_of_its_episodes(run: SimpleNamespace):
    found = bestiary.evaluate(run.path, episodes=3, modes=("sampled",), envs=3, threads=1)["sampled"]
    assert list(found["components"]) == list(NAMES)
    assert found["components"]["survival"]["mean"] == found["episode_length"]["mean"]
    assert found["components"]["survival"]["n"] == 3
    means = {name: part["mean"] for name, part in found["components"].items()}
    assert found["score"]["mean"] == pytest.approx(weighted_sum(reward_weights(run.reward), means))


# -- under its Gymnasium name -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version.*:UserWarning")
def test_riverraid_is_an_ordinary_gymnasium_environment():
    from gymnasium.utils.env_checker import check_env

    env = gymnasium.make("bestiary/Riverraid-v0", reward="pacifist:20", sticky=0.25)
    check_env(env, skip_render_check=True)
    _, info = env.reset(seed=0)
    assert env.get_wrapper_attr("component_names") == NAMES
    assert info["components"].tolist() == [0.0] * len(NAMES)
    _, reward, _, _, info = env.step(NOOP)
    assert reward == 10.0
    assert named(info)["survival"] == 1.0
    env.close()


def test_riverraid_can_be_rendered():
    env = gymnasium.make("bestiary/Riverraid-v0", render_mode="rgb_array")
    env.reset(seed=0)
    image: Any = env.render()
    assert image.shape == (210, 160, 3)
    assert image.std() > 10
    env.close()


# -- the page ---------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "riverraid.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_documentation_lists_every_component_and_reward():
    rows = re.findall(r"^\| `([\w:]+)` \|", section("Named rewards"), re.M)
    assert {name for name in rows if ":" not in name} == set(NAMES)
    assert {name.split(":")[0] for name in rows if ":" in name} == set(NAMED_REWARDS)
    assert {f"{name}:X" for name in NAMED_REWARDS} < set(rows)


def test_the_flags_in_the_documentation_are_translated_correctly():
    text = section("Named rewards")
    rows = re.findall(r"^\| (-?\d+)(?: \(default\))? \| (any|-?\d+)(?: \(default\))? \| `(\w+:[\d.]+)`", text, re.M)
    assert len(rows) == 6
    for fuel_multiplier, move_penalty, reward in rows:
        for penalty in (-3, 0, 7) if move_penalty == "any" else (float(move_penalty),):
            assert riverraid.from_flags(float(fuel_multiplier), penalty) == reward
    true_rewards = re.findall(r"^\| (-?\d+)(?: \(default\))? \| `(\w+:[\d.]+)` \|$", text, re.M)
    assert len(true_rewards) == 3
    assert all(riverraid.true_from_flags(float(penalty)) == reward for penalty, reward in true_rewards)


def test_the_python_in_the_documentation_runs(capsys: pytest.CaptureFixture[str]):
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(block, {})
    output = capsys.readouterr().out
    assert output.startswith("10.0 76 65535 4 76\n")
    assert output.endswith("pacifist:20\n")
