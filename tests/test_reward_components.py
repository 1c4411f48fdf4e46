"""Rewards as weighted sums of named components: values, parsing, statistics, logs, invalid rewards."""

import re
import shlex
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from helpers.files import read_csv
from helpers.rollouts import Rollout, different_fields, random_actions, roll_out
from helpers.settings import configure

import bestiary
from bestiary.algos import Impala
from bestiary.cli.main import main
from bestiary.config.experiment import Evaluation, Experiment, Logs
from bestiary.config.extras import available
from bestiary.envs import Gym
from bestiary.envs.env_batch import EnvBatch, VectorStep
from bestiary.envs.reward_components import (
    ComponentReward,
    Components,
    NamedRewards,
    Weights,
    format_reward,
    parse_reward,
    weighted_sum,
)
from bestiary.runtime import Local
from bestiary.seeding import TRAIN
from bestiary.types import Spec

PAGE = Path(__file__).parent.parent / "docs" / "reward-components.md"
box2d = pytest.mark.skipif(not available("box2d"), reason="needs the extra box2d")


class Walk(gymnasium.Env):
    """Actions: left, stay, right. At a distance of three one of two lives is lost."""

    metadata = {"lives": True}
    observation_space = gymnasium.spaces.Box(-3, 3, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def _observe(self) -> tuple[np.ndarray, dict[str, Any]]:
        return np.array([self.x], np.float32), {"x": self.x, "lives": self.lives}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.lives = int(self.np_random.integers(-1, 2)), 2
        return self._observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x += int(action) - 1
        reward = float(self.x > 0)
        if abs(self.x) == 3:
            self.x, self.lives = 0, self.lives - 1
        obs, info = self._observe()
        return obs, reward, self.lives == 0, False, info


COMPONENTS: Components = {
    "moved": lambda m: m.info["x"] != m.prev_info["x"],
    "leftward": lambda m: m.action == 0,
    "place": lambda m: m.obs[0] / 4,
    "x2": lambda m: m.info["x"] ** 2,
}
NAMES = ("score", *COMPONENTS)
NAMED: NamedRewards = {"lazy": lambda f: {"score": 1.0, "moved": -f}}


def walk(reward: str = "score", **settings: Any) -> gymnasium.Env:
    return ComponentReward(Walk(**settings), COMPONENTS, reward, NAMED)


gymnasium.register("toys/Walk-v0", entry_point=walk, max_episode_steps=40)


# -- values ----------------------------------------------------------------------------------------------------


def test_components_are_functions_of_a_transition():
    env = walk()
    _, info = env.reset(seed=0)
    start = info["x"]
    assert info["components"].tolist() == [0.0] * len(NAMES)
    for action, x in ((2, start + 1), (1, start + 1), (0, start)):
        obs, reward, _, _, info = env.step(action)
        assert dict(zip(NAMES, info["components"].tolist(), strict=True)) == {
            "score": float(x > 0),
            "moved": float(action != 1),
            "leftward": float(action == 0),
            "place": x / 4,
            "x2": float(x**2),
        }
        assert reward == float(x > 0)
        assert obs.tolist() == [x]


def test_a_reset_is_not_a_transition():
    env = walk("moved")
    env.reset(seed=0)
    env.step(2)
    _, info = env.reset(seed=0)
    assert env.step(1)[1] == 0.0  # the position before the reset does not count
    assert info["components"].tolist() == [0.0] * len(NAMES)


@pytest.mark.parametrize("reward", ["score", "2*score-0.5*moved", "-x2", "lazy:3", "place + 1e-3*leftward", "0*score"])
def test_the_reward_is_the_weighted_sum_and_all_else_is_unchanged(reward: str):
    plain, env = Walk(), walk(reward)
    weights = parse_reward(reward, dict.fromkeys(NAMES), NAMED)
    plain.reset(seed=4)
    env.reset(seed=4)
    for action in random_actions(3, 40, 1)[:, 0].tolist():
        obs, score, terminated, truncated, info = plain.step(action)
        other_obs, weighted, other_terminated, other_truncated, other_info = env.step(action)
        parts = dict(zip(NAMES, other_info.pop("components").tolist(), strict=True))
        assert (terminated, truncated, info) == (other_terminated, other_truncated, other_info)
        assert obs.tolist() == other_obs.tolist() and parts["score"] == score
        assert weighted == pytest.approx(weighted_sum(weights, parts))
        assert type(weighted) is float
        if terminated:
            plain.reset(seed=5)
            env.reset(seed=5)


def test_components_without_weight_do_not_affect_the_reward():
    env = ComponentReward(Walk(), {"broken": lambda m: np.nan, "endless": lambda m: np.inf}, "2*score")
    env.reset(seed=0)
    assert np.isfinite([env.step(a)[1] for a in (2, 2, 0, 0, 1)]).all()


def test_the_true_reward_can_differ_from_the_environments_own():
    env = ComponentReward(Walk(), {"score": lambda m: 7.0, "own": lambda m: m.reward}, "score+own")
    env.reset(seed=0)
    assert env.component_names == ("score", "own")
    assert env.step(2)[1] in (7.0, 8.0)


# -- parsing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("score", {"score": 1}),
        (" -x2 ", {"x2": -1}),
        ("+score", {"score": 1}),
        ("score+9*moved", {"score": 1, "moved": 9}),
        ("score - .5*moved", {"score": 1, "moved": -0.5}),
        ("1e3*score", {"score": 1000}),
        ("2.*score+1e+2*x2-1e-2*moved", {"score": 2, "x2": 100, "moved": -0.01}),
        ("score+score-3*score", {"score": -1}),
        ("lazy:2", {"score": 1, "moved": -2}),
        (" lazy: -2.5", {"score": 1, "moved": 2.5}),
    ],
)
def test_a_reward_is_parsed_into_weights(text: str, weights: Weights):
    assert parse_reward(text, dict.fromkeys(NAMES), NAMED) == weights


def random_weights(rng: np.random.Generator) -> Weights:
    names = rng.permutation(NAMES)[: rng.integers(1, len(NAMES) + 1)].tolist()
    kinds = [
        lambda: float(rng.integers(-20, 21)),
        lambda: round(float(rng.normal()), 2),
        lambda: float(rng.normal() * 10.0 ** rng.integers(-30, 30)),
        lambda: float(rng.choice([1.0, -1.0])),
    ]
    return {name: kinds[rng.integers(len(kinds))]() for name in names}


def test_formatting_and_parsing_weights_are_inverse():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        weights = random_weights(rng)
        text = format_reward(weights)
        assert parse_reward(text, dict.fromkeys(NAMES)) == weights, text
        spaced = re.sub(r"(?<![e\d.])(?=[+-])|(?<=\*)|(?=\*)", " " * int(rng.integers(3)), text)
        assert parse_reward(spaced, dict.fromkeys(NAMES)) == weights, spaced


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"score": 1.0}, "score"),
        ({"score": 1.0, "fuel": 9.0}, "score+9*fuel"),
        ({"survival": 10.0, "bullet": -20.0}, "10*survival-20*bullet"),
        ({"bullet": -1.0}, "-bullet"),
        ({"score": 0.1 + 0.2}, "0.30000000000000004*score"),
        ({"score": 1234567.0}, "1234567.0*score"),
    ],
)
def test_weights_are_formatted_as_short_sums(weights: Weights, text: str):
    assert format_reward(weights) == text


def test_a_weighted_sum_equals_a_loop():
    rng = np.random.default_rng(1)
    for _ in range(200):
        weights, parts = random_weights(rng), dict(zip(NAMES, rng.normal(size=len(NAMES)).tolist(), strict=True))
        slow = 0.0
        for name, amount in parts.items():
            if name in weights:
                slow += weights[name] * amount
        assert weighted_sum(weights, parts) == pytest.approx(slow, rel=1e-9, abs=1e-9 * sum(map(abs, weights.values())))


# -- invalid rewards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("scor", "there is no component 'scor': did you mean score?"),
        ("xyzzy", "there is no component 'xyzzy': components are score, moved, leftward, place, x2, lazy:NUMBER"),
        ("score+lazy", "there is no component 'lazy': "),
        ("lasy:3", "there is no named reward 'lasy' that takes a number: did you mean lazy?"),
        ("lazy:much", "'much' in 'lazy:much' is not a number: write it like lazy:10"),
        ("lazy:inf", "'inf' in 'lazy:inf' is not a number"),
        ("1e999*score", "'1e999' in '1e999*score' is not a number: write it like 10*score"),
        ("score moved", "reward='score moved' is not a sum of components such as score-2*x2"),
        ("score-main-engine", "there is no component 'main'"),
        ("", "names no component"),
    ],
)
def test_an_invalid_reward_is_refused_in_one_sentence(reward: str, words: str):
    for processes in (False, True):
        with pytest.raises(ValueError, match=re.escape(words)) as refusal:
            Gym("toys/Walk-v0", {"reward": reward}, processes).make(1, 0, TRAIN, 1)
        assert "\n" not in str(refusal.value)


def test_an_invalid_reward_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    env = ["--env.id", "toys/Walk-v0", "--env.kwargs", "reward", "scor"]
    assert main(["train", "cartpole", *env, "--run", str(run)]) == 2
    assert capsys.readouterr().err == "bestiary: there is no component 'scor': did you mean score?\n"
    assert not run.exists()


# -- statistics -----------------------------------------------------------------------------------------------------


def make(num_envs: int = 2, id: str = "toys/Walk-v0", processes: bool = False, **kwargs: Any) -> EnvBatch:
    return Gym(id, kwargs, processes).make(num_envs, 3, TRAIN, 2)


def rollout(processes: bool = False, reward: str = "score") -> Rollout:
    with closing(make(processes=processes, reward=reward)) as env_batch:
        assert env_batch.components == NAMES
        return roll_out(env_batch, random_actions(3, 200, 2))


def test_components_are_summed_over_episodes_and_lives():
    result = rollout(reward="2*place-moved")
    weights = parse_reward("2*place-moved", COMPONENTS)
    steps, episodes = result.steps, 0
    for slot in range(2):
        for t, episode in result.finished(slot):
            during = slice(t - episode.steps, t)
            reward = steps.reward[during, slot]
            assert episode.components["leftward"] == (steps.prev_action[during, slot] == 0).sum().item()
            assert weighted_sum(weights, episode.components) == pytest.approx(reward.sum().item(), abs=1e-4)
            assert weighted_sum(weights, episode.components) == pytest.approx(episode.score)
            assert [weighted_sum(weights, part) for part in episode.life_components] == pytest.approx(
                episode.life_returns
            )
            for name in NAMES:
                parts = [part[name] for part in episode.life_components]
                assert sum(parts) == pytest.approx(episode.components[name])
            assert len(episode.life_returns) == 2 or episode.truncated
            episodes += 1
    assert episodes >= 4
    assert not steps.is_terminal[:-1][~steps.is_first[1:]].any()  # a lost life is not terminal here


def test_the_choice_of_reward_changes_rewards_and_nothing_else():
    one, other = rollout(reward="score"), rollout(reward="-x2")
    assert different_fields(one.steps, other.steps) == ["reward"]
    for a, b in zip(one.episodes, other.episodes, strict=True):
        assert [e.components for e in a] == [e.components for e in b]
        assert [e.life_components for e in a] == [e.life_components for e in b]


def test_processes_give_the_same_steps_statistics_and_states():
    local, remote = rollout(), rollout(processes=True)
    assert different_fields(local.steps, remote.steps) == []
    assert local.episodes == remote.episodes
    assert local.saved == remote.saved


def test_an_ordinary_environment_has_no_components():
    with closing(make(id="CartPole-v1")) as env_batch:
        result = roll_out(env_batch, random_actions(2, 60, 2))
        assert (env_batch.components, env_batch.component_means()) == ((), {})
    episodes = [e for ended in result.episodes for e in ended]
    assert episodes
    assert all((e.components, e.life_components) == ({}, ()) for e in episodes)


def trained(path: Path, env: Gym) -> Path:
    experiment = Experiment(
        env=env,
        algo=configure(Impala, unroll=10, batch_size=4),
        runtime=Local(envs=4, threads=1),
        frames=2_000,
        evaluation=Evaluation(episodes=4, mode="sampled"),
        log=Logs(every=400, tensorboard=False),
    )
    bestiary.train(experiment, path)
    return path


def test_all_components_are_logged_for_every_reward(tmp_path: Path):
    for reward in ("lazy:3", "score"):
        run = trained(tmp_path / reward.replace(":", ""), Gym("toys/Walk-v0", {"reward": reward}))
        rows = read_csv(run / "metrics.csv")
        assert len(rows) >= 4
        for name in NAMES:
            assert all(row[f"per_{what}_{name}"] for row in rows for what in ("step", "episode", "life"))
        weights = parse_reward(reward, dict.fromkeys(NAMES), NAMED)
        for row in rows:
            sums = {name: float(row[f"per_episode_{name}"]) for name in NAMES}
            assert float(row["score"]) == pytest.approx(weighted_sum(weights, sums), abs=1e-6)
        (evaluation,) = read_csv(run / "evaluations.csv")
        assert {f"per_episode_{name}" for name in NAMES} < evaluation.keys()
        assert all("moved=" in row["components"] for row in read_csv(run / "episodes.csv"))


def test_runs_without_components_have_no_such_columns(tmp_path: Path):
    run = trained(tmp_path / "run", Gym("CartPole-v1"))
    for name in ("metrics.csv", "evaluations.csv"):
        assert not [column for column in read_csv(run / name)[0] if column.startswith("per_")]
    assert {row["components"] for row in read_csv(run / "episodes.csv")} == {""}


# -- LunarLander's fuel -----------------------------------------------------------------------------------------

FUEL: Components = {"main_engine": lambda m: m.action == 2, "side_engine": lambda m: m.action in (1, 3)}


def shaping_reward(before: np.ndarray, after: np.ndarray) -> float:
    """LunarLander's shaping reward without fuel: distance, speed, angle and leg contact."""

    def potential(s: np.ndarray) -> float:
        x, y, vx, vy, angle, _, left, right = s.astype(np.float64)
        return -100 * (np.hypot(x, y) + np.hypot(vx, vy) + abs(angle)) + 10 * (left + right)

    return potential(after) - potential(before)


@box2d
@pytest.mark.parametrize(
    ("reward", "main_cost", "side_cost"),
    [
        ("score", 0.3, 0.03),
        ("score+0.3*main_engine", 0.0, 0.03),
        ("score+0.3*main_engine+0.03*side_engine", 0.0, 0.0),
        ("score-0.7*main_engine", 1.0, 0.03),
    ],
)
def test_the_weights_set_the_price_of_fuel(reward: str, main_cost: float, side_cost: float):
    env = ComponentReward(gymnasium.make("LunarLander-v3"), FUEL, reward)
    plain = gymnasium.make("LunarLander-v3")
    checked = set()
    for seed in range(4):
        obs, _ = env.reset(seed=seed)
        assert np.array_equal(obs, plain.reset(seed=seed)[0])
        for action in random_actions(4, 200, 1, seed)[:, 0].tolist():
            after, weighted, terminated, _, info = env.step(action)
            expected, own, _, _, _ = plain.step(action)
            main, side = action == 2, action in (1, 3)
            assert np.array_equal(after, expected)
            assert info["components"].tolist() == [own, main, side]
            assert weighted == pytest.approx(own + (0.3 - main_cost) * main + (0.03 - side_cost) * side, abs=1e-9)
            if terminated:  # then the reward is 100 or -100
                break
            assert weighted == pytest.approx(shaping_reward(obs, after) - main_cost * main - side_cost * side, abs=1e-3)
            checked.add(action)
            obs = after
    assert checked == {0, 1, 2, 3}


# -- the page ---------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A file with the example of the documentation."""
    file = tmp_path / "fuel_lander.py"
    file.write_text(blocks("python")[0])
    return file


@box2d
def test_the_commands_in_the_documentation_train(example: Path):
    lines = [line.split("  #")[0] for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) >= 4
    short = (
        "--frames 640 --runtime.envs 4 --runtime.threads 1 --algo.replay.batch-size 4 --evaluation.episodes 1 --plain"
    )
    for line in (lines[1], lines[3], lines[-1]):
        program, *words = shlex.split(line)
        assert program == "bestiary"
        run = example.with_name(f"run{len(list(example.parent.iterdir()))}")
        command = [sys.executable, "-m", "bestiary", *words, *short.split(), "--run", str(run)]
        done = subprocess.run(command, cwd=example.parent, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        row = read_csv(run / "metrics.csv")[-1]
        assert float(row["per_step_main_engine"]) + float(row["per_step_side_engine"]) < 1
        assert float(row["per_step_tilt"]) > 0
        (evaluation,) = read_csv(run / "evaluations.csv")
        sums = {
            name: float(evaluation[f"per_episode_{name}"]) for name in ("score", "main_engine", "side_engine", "tilt")
        }
        reward = next((word for word in words if "*" in word), "-tilt")
        assert float(evaluation["score"]) == pytest.approx(weighted_sum(parse_reward(reward, sums), sums), rel=1e-5)


@box2d
def test_the_python_in_the_documentation_runs(capsys: pytest.CaptureFixture[str]):
    scope: dict[str, Any] = {"__name__": "fuel_lander"}
    exec(blocks("python")[0].replace("bestiary.register(env=FuelLander)", ""), scope)
    exec(blocks("python")[1], scope)
    assert re.search(r"'score': .*'main_engine': .*1\.0.*'tilt'", capsys.readouterr().out)
    gymnasium.registry.pop("FuelLander-v0")


def test_nan_does_not_remain_in_the_means_after_they_were_read():
    env_batch = EnvBatch(Spec("Any", (1,), torch.float32, 2), 1, ("part",))
    no, first = np.zeros(1, bool), np.ones(1, bool)
    env_batch.record(VectorStep(np.zeros((1, 1)), np.zeros(1), no, no, first, components=np.zeros((1, 1))))
    for value, expected in ((2.0, 2.0), (np.nan, np.nan), (3.0, 3.0)):
        env_batch.record(VectorStep(np.zeros((1, 1)), np.zeros(1), no, no, no, components=np.array([[value]])))
        np.testing.assert_equal(env_batch.component_means(), {"per_step_part": expected})
