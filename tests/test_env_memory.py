"""T-Maze, Visual Match and Key-to-Door: equal to recorded episodes of the originals, and further properties."""

import json
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from bestiary.envs import Catch, KeyToDoor, Recall, TMaze, VisualMatch
from bestiary.envs.base import references
from bestiary.envs.batched import BatchedEnv
from bestiary.envs.compiled import CompiledEnv, random_int
from bestiary.envs.grid import MAY_GROW
from bestiary.envs.key_to_door import KeyToDoorEnv
from bestiary.envs.tmaze import DOWN, LEFT, RIGHT, UP, TMazeEnv
from bestiary.envs.visual_match import VisualMatchEnv
from bestiary.errors import UserError
from bestiary.seeding import EVAL, TRAIN, substream

FILES = sorted(
    file.stem
    for kind in ("tmaze_", "visual_match_", "key_to_door_")
    for file in Path(__file__).parent.joinpath("data").glob(f"{kind}*.npz")
)
ENVS = {
    "tmaze-passive": partial(TMazeEnv, length=6),
    "tmaze-active": partial(TMazeEnv, length=6, active=True),
    "visual-match": partial(VisualMatchEnv, length=25),
    "key-to-door": partial(KeyToDoorEnv, length=25),
}


class Golden:
    """Recorded episodes of an original environment: actions [E, T] and their results."""

    def __init__(self, name: str, data: Path) -> None:
        self.file = np.load(data / f"{name}.npz")
        task, length = name.rsplit("_", 1)
        self.env: Any = {
            "tmaze_passive": TMaze(int(length)),
            "tmaze_active": TMaze(int(length), active=True),
            "visual_match": VisualMatch(int(length)),
            "key_to_door": KeyToDoor(int(length)),
        }[task]
        self.actions, self.reward, self.terminated = (self.file[k] for k in ("actions", "reward", "terminated"))
        self.obs = self.file["obs"]  # [E, T+1, ...]
        self.episodes, self.horizon = self.actions.shape
        if task.startswith("tmaze"):
            self.hidden = ["goal"]
            self.success = self.reward[:, -1] == 1
        else:
            self.obs = np.moveaxis(self.obs, -1, 2)
            self.hidden = list(VisualMatchEnv.hidden if task == "visual_match" else KeyToDoorEnv.hidden)
            self.success = self.file["success"]

    @property
    def options(self) -> dict[str, np.ndarray]:
        return {name: self.file[name] for name in self.hidden}


@pytest.fixture(params=FILES)
def golden(request: pytest.FixtureRequest, data: Path) -> Golden:
    return Golden(request.param, data)


def unwrap(env_batch: Any) -> CompiledEnv:
    return env_batch.env


# -- recorded episodes --------------------------------------------------------------------------------------------


def test_there_are_recordings_of_every_task():
    assert len(FILES) == 12


def test_the_vector_environment_replays_the_original(golden: Golden):
    env = unwrap(golden.env.make(golden.episodes, 0, TRAIN, 1))
    obs, _ = env.reset(seed=0, options=golden.options)
    assert (obs == golden.obs[:, 0]).all()
    for t in range(golden.horizon):
        obs, reward, terminated, truncated, info = env.step(golden.actions[:, t])
        assert (obs == golden.obs[:, t + 1]).all(), t
        assert (reward == golden.reward[:, t]).all(), t
        assert (terminated == golden.terminated[:, t]).all(), t
        assert not truncated.any()
        assert (info != {}) == (t == golden.horizon - 1)
    assert (info["success"] == golden.success).all()
    assert info["success"].any()
    assert not info["success"].all()
    assert info["_success"].all()


def test_an_env_batch_replays_the_original(golden: Golden, monkeypatch: pytest.MonkeyPatch):
    env_batch = golden.env.make(golden.episodes, 0, TRAIN, 1)
    monkeypatch.setattr(env_batch.env, "reset", partial(env_batch.env.reset, options=golden.options))
    step = env_batch.reset()
    assert step.is_first.all()
    for t in range(golden.horizon):
        assert (step.obs.numpy() == golden.obs[:, t]).all()
        assert step.obs.dtype == env_batch.spec.obs_dtype
        step, episodes = env_batch.step(torch.from_numpy(golden.actions[:, t]))
        assert episodes == []
        assert (step.reward.numpy() == golden.reward[:, t].astype(np.float32)).all()
        assert (step.is_terminal.numpy() == golden.terminated[:, t]).all()
    assert (step.obs.numpy() == golden.obs[:, -1]).all()
    step, episodes = env_batch.step(torch.zeros(golden.episodes, dtype=torch.int64))
    assert step.is_first.all()
    assert [e.success for e in episodes] == golden.success.tolist()
    assert [e.score for e in episodes] == pytest.approx(golden.reward.sum(1).tolist())
    assert {(e.steps, e.truncated) for e in episodes} == {(golden.horizon, False)}


def test_a_single_environment_replays_the_original(golden: Golden):
    name = golden.env.make(1, 0, TRAIN, 1).spec.name
    env = gymnasium.make(f"bestiary/{name}-v0", length=golden.env.length)
    for e in range(0, golden.episodes, 9):
        obs, _ = env.reset(options={k: v[e] for k, v in golden.options.items()})
        assert (obs == golden.obs[e, 0]).all()
        for t in range(golden.horizon):
            obs, reward, terminated, _, info = env.step(golden.actions[e, t])
            assert (obs == golden.obs[e, t + 1]).all()
            assert (reward, terminated) == (golden.reward[e, t], golden.terminated[e, t])
        assert info == {"success": bool(golden.success[e]), "oracle": 1.0 if "goal" in golden.hidden else 5.0}
        assert type(info["success"]) is bool


# -- random numbers -----------------------------------------------------------------------------------------------


def test_compiled_random_integers_equal_those_of_the_batch():
    env = RecordedDraws(5)
    for index in range(3):
        for n in (2, 10, 22, 1000):
            one_by_one = [random_int(s, index, n) for s in env.state]
            assert one_by_one == BatchedEnv._random_int(env, n, index).tolist()


class RecordedDraws(TMazeEnv):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.reset(seed=2**40)
        self.state["episode"] = np.arange(num_envs) * 10**6


def hidden_of_many_episodes(env: CompiledEnv, names: list[str]) -> dict[str, np.ndarray]:
    """The sampled variables, each [episodes, ...]."""
    sampled: dict[str, list] = {name: [] for name in names}
    for episode in range(20):
        env.reset(seed=0) if episode == 0 else env.reset()
        for name in names:
            sampled[name].append(env.state[name].copy())
    return {name: np.concatenate(values) for name, values in sampled.items()}


def shares(values: np.ndarray) -> list[float]:
    """Relative frequency of each value (or vector of values)."""
    return (np.unique(values, axis=0, return_counts=True)[1] / len(values)).tolist()


def test_hidden_variables_are_uniform():
    goals = hidden_of_many_episodes(TMazeEnv(200), ["goal"])["goal"]
    assert shares(goals) == pytest.approx([1 / 2] * 2, abs=0.04)
    match = hidden_of_many_episodes(VisualMatchEnv(200), ["target", "cue_cell", "door_colours"])
    assert shares(match["target"]) == pytest.approx([1 / 3] * 3, abs=0.04)
    assert shares(match["cue_cell"]) == pytest.approx([1 / 8] * 8, abs=0.03)
    assert shares(match["door_colours"]) == pytest.approx([1 / 6] * 6, abs=0.03)
    both = np.column_stack([match["target"], match["door_colours"].reshape(-1, 9)])
    assert shares(both) == pytest.approx([1 / 18] * 18, abs=0.02)  # and independent
    key = hidden_of_many_episodes(KeyToDoorEnv(200), ["key_cell", "start_cell"])
    assert shares(key["key_cell"]) == pytest.approx([1 / 10] * 10, abs=0.03)
    assert shares(np.column_stack([key["key_cell"], key["start_cell"]])) == pytest.approx([1 / 100] * 100, abs=0.01)


@pytest.mark.parametrize("make", [VisualMatchEnv, KeyToDoorEnv])
def test_ten_of_22_trees_have_apples_every_set_equally_likely(make: Any):
    cells = hidden_of_many_episodes(make(200), ["apple_cells"])["apple_cells"].astype(int)
    grows = np.zeros((len(cells), *MAY_GROW.shape))
    grows[np.arange(len(cells))[:, None], cells[:, :, 0], cells[:, :, 1]] = 1
    assert (grows.sum((1, 2)) == 10).all()
    assert not grows[:, ~MAY_GROW].any()
    trees = grows[:, MAY_GROW]  # [episodes, 22]
    assert trees.mean(0) == pytest.approx(np.full(22, 10 / 22), abs=0.04)
    pairs = trees.T @ trees / len(trees)
    apart = ~np.eye(22, dtype=bool)
    assert pairs[apart] == pytest.approx(np.full(22 * 21, 10 / 22 * 9 / 21), abs=0.04)


def test_evaluation_and_training_share_no_episodes():
    streams = [TRAIN, EVAL, *(substream(EVAL, seed, number) for seed in range(5) for number in range(5))]
    keys = []
    for stream in streams:
        env_batch = TMaze().make(64, 0, stream, 1)
        env_batch.reset()
        keys += unwrap(env_batch).state["key"].tolist()
    assert len(set(keys)) == 64 * len(streams)


@pytest.mark.parametrize("make", ENVS.values(), ids=ENVS)
def test_a_state_saved_at_any_step_continues_exactly(make: Any):
    env, other, rng = make(3), make(3), np.random.default_rng(0)
    actions = rng.integers(0, 4, (180, 3))
    env.reset(seed=5)
    saved, results = [], []
    for action in actions:
        saved.append(json.dumps(env.state_dict()))
        results.append(env.step(action))
    for at in (0, 1, 4, 6, 7, 14, 15, 16, 30, 39, 40, 41, 52, 55, 56):  # on the way, and around the ends of phases
        other.load_state_dict(json.loads(saved[at]))
        for action, expected in zip(actions[at:], results[at:], strict=True):
            for ours, theirs in zip(other.step(action)[:4], expected[:4], strict=True):
                assert (ours == theirs).all(), at
        assert other.state_dict() == env.state_dict()


def test_the_episode_after_a_forced_one_is_sampled_as_usual():
    forced, usual = TMazeEnv(50, length=1), TMazeEnv(50, length=1)
    first, _ = usual.reset(seed=3)
    obs, _ = forced.reset(seed=3, options={"goal": -first[:, 1].astype(int)})
    assert (obs[:, 1] == -first[:, 1]).all()
    for _ in range(3):
        a, b = forced.step(np.zeros(50, int))[0], usual.step(np.zeros(50, int))[0]
    assert (a == b).all()
    assert set(a[:, 1]) == {-1.0, 1.0}


def test_hidden_variables_that_are_not_forced_are_sampled():
    env, other = VisualMatchEnv(20), VisualMatchEnv(20)
    env.reset(seed=1, options={"target": np.full(20, 2)})
    other.reset(seed=1)
    assert (env.state["target"] == 2).all()
    for name in ("door_colours", "cue_cell", "apple_cells"):
        assert (env.state[name] == other.state[name]).all()


# -- T-Maze -------------------------------------------------------------------------------------------------------


def optimal(env: TMazeEnv) -> np.ndarray:
    """Returns of a policy that looks at the cue, remembers it, and turns."""
    obs, _ = env.reset(options={"goal": np.array([1, -1])})
    cue, score, done = obs[:, 1].copy(), np.zeros(2), np.zeros(2, bool)
    active = not cue.any()
    while not done.any():
        at_end = obs[:, 0] == 1
        action = np.where(at_end, np.where(cue > 0, UP, DOWN), RIGHT)
        if active and not cue.any():
            action[:] = LEFT
        obs, reward, done, _, info = env.step(action)
        cue = np.where(obs[:, 0] == 1, cue, cue + obs[:, 1])
        score += reward
    assert info["success"].all()
    assert (info["oracle"] == 1).all()
    return score


@pytest.mark.parametrize("length", [1, 2, 50])
@pytest.mark.parametrize("active", [False, True], ids=["passive", "active"])
def test_remembering_the_cue_scores_exactly_one(length: int, active: bool):
    assert optimal(TMazeEnv(2, length, active)).tolist() == [1.0, 1.0]


def play(env: Any, choose: Any) -> tuple[np.ndarray, np.ndarray]:
    """Scores and successes of one episode each."""
    env.reset(seed=0)
    score, done, t = np.zeros(env.num_envs), np.zeros(1, bool), 0
    while not done.any():
        _, reward, done, _, info = env.step(np.broadcast_to(choose(t), env.num_envs))
        score, t = score + reward, t + 1
    return score, info["success"]


@pytest.mark.parametrize("active", [False, True], ids=["passive", "active"])
def test_guessing_scores_one_half(active: bool):
    """Straight to the junction, then up and stay up: the active maze leaves two steps to spare."""
    score, success = play(TMazeEnv(4000, 10, active), lambda t: RIGHT if t < 10 else UP)
    assert set(score) == {0.0, 1.0}
    assert score.mean() == pytest.approx(TMaze(10).references.memoryless, abs=0.03)
    assert (success == (score == 1)).all()


def test_standing_still_costs_what_the_rules_say():
    assert play(TMazeEnv(1, 20), lambda t: UP)[0] == pytest.approx(-1.0)
    assert play(TMazeEnv(1, 20, active=True), lambda t: UP)[0] == pytest.approx(-1.0)
    assert play(TMazeEnv(1, 20, active=True), lambda t: LEFT)[0] == pytest.approx(-21 / 20)


# -- Visual Match and Key-to-Door ---------------------------------------------------------------------------------


def test_always_the_middle_door_is_right_once_in_three():
    score, success = play(VisualMatchEnv(3000), lambda t: 0)
    assert success.mean() == pytest.approx(VisualMatch().references.memoryless, abs=0.03)
    assert (score[success] >= 5).all()


def test_without_the_key_the_door_pays_nothing():
    _, success = play(KeyToDoorEnv(200), lambda t: 1 if t < 75 else 0)  # south, away from the key
    assert not success.any()


def doors(env_batch: Any) -> list:
    env_batch.reset()
    orders = [unwrap(env_batch).state["door_colours"].tolist()]
    for _ in range(5):
        unwrap(env_batch).reset()
        orders.append(unwrap(env_batch).state["door_colours"].tolist())
    return [order for episode in orders for order in episode]


def distinct(orders: list) -> int:
    return len({str(order) for order in orders})


def test_doors_have_new_colours_in_every_episode():
    assert distinct(doors(VisualMatch().make(30, 0, TRAIN, 1))) == 6


def test_doors_keep_their_colours_for_a_whole_run_evaluation_included():
    cfg, seen = VisualMatch(colours="per_run"), set()
    for seed in range(20):
        streams = (TRAIN, EVAL, substream(EVAL, 0, 1))
        orders = [order for stream in streams for order in doors(cfg.make(5, seed, stream, 1))]
        assert distinct(orders) == 1
        seen.add(str(orders[0]))
    assert len(seen) > 3


def test_doors_as_published_differ_between_training_and_evaluation():
    cfg, same = VisualMatch(colours="upstream"), 0
    for seed in range(60):
        train, evaluation = (doors(cfg.make(3, seed, stream, 1)) for stream in (TRAIN, EVAL))
        assert distinct(train) == distinct(evaluation) == 1
        assert train == doors(cfg.make(3, seed, TRAIN, 1))
        same += train[0] == evaluation[0]
    assert same / 60 == pytest.approx(1 / 6, abs=0.1)


def test_fixed_colours_outside_a_run():
    orders = {str(doors_of(VisualMatchEnv(2, colours="upstream"))) for _ in range(40)}
    assert len(orders) > 2  # random, and saved with the state
    assert len({str(doors_of(VisualMatchEnv(2, colours="per_run"))) for _ in range(10)}) == 1
    assert len({str(doors_of(VisualMatchEnv(2, colours="per_run", colour_seed=s))) for s in range(20)}) > 3
    env, other = VisualMatchEnv(2, colours="upstream"), VisualMatchEnv(2, colours="upstream")
    expected = doors_of(env)
    other.load_state_dict(env.state_dict())
    other.reset()
    assert other.state["door_colours"].tolist() == expected


def doors_of(env: VisualMatchEnv) -> list:
    env.reset(seed=0)
    return env.state["door_colours"].tolist()


# -- oracle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "channels"), [(TMazeEnv, 2), (VisualMatchEnv, 3), (KeyToDoorEnv, 3)], ids=["tmaze", "match", "key"]
)
def test_the_oracle_sees_the_same_and_the_hidden_variable(make: Any, channels: int):
    plain, oracle, rng = make(16, length=20), make(16, length=20, oracle=True), np.random.default_rng(0)
    pairs = [(plain.reset(seed=0)[0], oracle.reset(seed=0)[0])]
    held = False
    for action in rng.integers(0, 4, (200, 16)):
        pairs.append((plain.step(action)[0], oracle.step(action)[0]))
        seen, state = pairs[-1][1], oracle.state
        if make is TMazeEnv:
            assert (seen[:, 2] == state["goal"]).all()
        elif make is VisualMatchEnv:
            target = state["door_colours"][np.arange(16), state["target"]]
            assert (seen[:, 3:] == target[:, :, None, None]).all()
        else:
            assert (seen[:, 3] == np.where(state["has_key"], 255, 0)[:, None, None]).all()
            held |= state["has_key"].any()
    assert held or make is not KeyToDoorEnv
    for few, many in pairs:
        assert (few == many[:, :channels]).all()
        assert oracle.observation_space.contains(many)


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [TMaze, VisualMatch, KeyToDoor])
@pytest.mark.parametrize("length", [0, -3])
def test_a_length_below_one_is_refused(cfg: Any, length: int):
    with pytest.raises(UserError, match=f"needs a length of at least 1, not {length}"):
        cfg(length=length)


@pytest.mark.parametrize("name", ["TMazePassive", "TMazeActive", "VisualMatch", "KeyToDoor"])
def test_gymnasium_ids_refuse_it_too(name: str):
    with pytest.raises(UserError, match="needs a length of at least 1, not 0"):
        gymnasium.make(f"bestiary/{name}-v0", length=0)
    with pytest.raises(UserError, match="render_mode='human' must be 'rgb_array' or None"):
        gymnasium.make_vec(f"bestiary/{name}-v0", num_envs=2, render_mode="human")


def test_unknown_colours_are_refused():
    for make in (VisualMatch, VisualMatchEnv):
        with pytest.raises(UserError, match="no colours='per_episod': did you mean per_episode"):
            make(colours="per_episod")


APPLE_CELLS = np.argwhere(MAY_GROW)[:10]


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (TMazeEnv, {"gaol": [1, 1]}, "no option 'gaol': did you mean goal"),
        (TMazeEnv, {"goal": [1, 0]}, r"goal must be 1 \(up\) or -1 \(down\), not 0"),
        (TMazeEnv, {"goal": [1]}, "goal must have 2 entries, one per environment, not 1"),
        (TMazeEnv, {"goal": 1}, "goal must have 2 entries, one per environment, not a single value"),
        (TMazeEnv, {"goal": [[1], [1]]}, r"goal must have the shape \(\) in each environment, not \(1,\)"),
        (TMazeEnv, {"goal": [0.5, 1.0]}, "goal must hold whole numbers, not float64"),
        (VisualMatchEnv, {"target": [0, 3]}, "target must be 0 .* not 3"),
        (VisualMatchEnv, {"cue_cell": [[1, 4], [2, 5]]}, r"the cell \(2, 5\); it may hold \(1, 4\), \(1, 5\)"),
        (VisualMatchEnv, {"cue_cell": [[1, 4], [2, 11]]}, r"\(2, 11\), which lies outside the board's 7 rows and 11"),
        (VisualMatchEnv, {"door_colours": np.full((2, 3, 3), 256)}, "RGB values from 0 to 255"),
        (VisualMatchEnv, {"door_colours": np.zeros((2, 3, 3), int)}, "three different colours"),
        (VisualMatchEnv, {"apple_cells": [APPLE_CELLS, APPLE_CELLS[[0, *range(9)]]]}, "holds a cell twice"),
        (VisualMatchEnv, {"apple_cells": [APPLE_CELLS, APPLE_CELLS + 1]}, r"it may hold \(1, 1\)"),
        (KeyToDoorEnv, {"apple_cells": np.zeros((2, 9, 2), int)}, r"the shape \(10, 2\) in each environment"),
        (KeyToDoorEnv, {"key_cell": [[1, 3], [3, 5]]}, r"key_cell holds the cell \(3, 5\); it may hold \(1, 3\)"),
        (KeyToDoorEnv, {"start_cell": [[-1, 3], [4, 5]]}, r"start_cell holds the cell \(-1, 3\), which lies outside"),
    ],
)
def test_options_of_an_impossible_episode_are_refused(make: Any, options: dict, sentence: str):
    env = make(2)
    env.reset(seed=0)
    before = env.state_dict()
    with pytest.raises(UserError, match=sentence):
        env.reset(options=options)
    assert env.state_dict() == before


def test_a_single_environment_takes_options_without_the_batch():
    env = gymnasium.make("bestiary/KeyToDoor-v0", length=60)
    env.reset(seed=0, options={"key_cell": (2, 5), "start_cell": (4, 5)})
    for _ in range(2):
        obs, *_ = env.step(0)
    assert (obs[:, 0, 2] == 255).all()  # the lamp, two rows above the key
    with pytest.raises(UserError, match=r"the shape \(2,\) in each environment, not \(3,\)"):
        env.reset(options={"key_cell": (2, 5, 1)})


# -- rendering and reference values -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["TMazePassive", "TMazeActive", "VisualMatch", "KeyToDoor"])
def test_every_environment_can_be_rendered(name: str):
    shape = (120, 640, 3) if name.startswith("TMaze") else (264, 360, 3)
    env = gymnasium.make(f"bestiary/{name}-v0", render_mode="rgb_array", length=3)
    vector = gymnasium.make_vec(f"bestiary/{name}-v0", num_envs=4, render_mode="rgb_array", length=3)
    assert env.metadata["render_modes"] == vector.metadata["render_modes"] == ["rgb_array"]
    assert env.metadata["render_fps"] > 0
    env.reset(seed=0)
    vector.reset(seed=0)
    seen = []
    for _ in range(20):
        frames = vector.render()
        assert isinstance(frames, tuple)
        assert [frame.shape for frame in frames] == [shape] * 4
        frame = env.render()
        assert frame.dtype == np.uint8
        assert (frame == frames[0]).all()
        seen.append(frame.tobytes())
        terminated = env.step(0)[2]
        vector.step(np.zeros(4, int))
        if terminated:
            break
    assert len(set(seen)) > 1


def test_a_rendered_image_shows_the_players_view():
    """Inside the frame, the centre of every cell has the colour of the observation."""
    for make in (VisualMatchEnv, KeyToDoorEnv):
        env, rng = make(1, length=20, render_mode="rgb_array"), np.random.default_rng(0)
        obs, _ = env.reset(seed=0)
        for action in rng.integers(0, 4, (45, 1)):
            image = env.render()[0][12::24, 12::24]  # one pixel per cell, with a margin of two cells
            row, column = (int(env.state[k][0]) for k in ("row", "column"))
            view = image[row : row + 5, column : column + 5]
            inside = [(r, c) for r in range(5) for c in range(5) if 2 <= row + r < 9 and 2 <= column + c < 13]
            for r, c in inside:
                assert (view[r, c] == obs[0, :, r, c]).all()
            obs, *_ = env.step(action)


def test_reference_values_are_optimal_and_memoryless_results():
    assert references(TMaze()) == ("score", 1.0, 0.5)
    assert references(VisualMatch()) == ("success", 1.0, 1 / 3)
    assert references(KeyToDoor()) == ("success", 1.0, 0.0)
    assert references(Recall(cues=5)) == ("score", 1.0, 0.2)
    assert references(Catch()) is None
    assert str(references(TMaze())) == "score: optimal 1.0, without memory 0.5"
    assert str(references(VisualMatch())) == "success: optimal 1.0, without memory 0.333"


def test_all_six_orders_of_colours_are_known():
    hidden = [doors_of(VisualMatchEnv(1, colours="per_run", colour_seed=s))[0] for s in range(60)]
    pure = ([255, 0, 0], [0, 255, 0], [0, 0, 255])
    assert {str(order) for order in hidden} == {str(list(order)) for order in permutations(pure)}
