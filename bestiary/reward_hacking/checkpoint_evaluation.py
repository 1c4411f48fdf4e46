"""Evaluates the checkpoints of a study's run: whole episodes, with all reward components and the actions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary.acting.episodes import play_episodes, quotas
from bestiary.config.experiment import Experiment
from bestiary.envs.base import for_evaluation
from bestiary.envs.env_batch import EnvBatch, VectorStep
from bestiary.envs.reward_components import Weights, weighted_sum
from bestiary.envs.riverraid import reward_weights
from bestiary.reward_hacking.report.figures import MODES
from bestiary.reward_hacking.statistics import pearson
from bestiary.runtime.evaluation import build_agent
from bestiary.seeding import ACTIONS, EVAL, derive, substream
from bestiary.training.run import Run
from bestiary.types import Episode, Mode


class TrainedRun(Protocol):
    """What is evaluated: one run of a study."""

    @property
    def proxy(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def experiment(self) -> Experiment: ...
    @property
    def path(self) -> Path: ...
    @property
    def name(self) -> str: ...


class ComponentRecorder:
    """Records rewards, reward components and actions of every step, until each slot has its quota of episodes."""

    def __init__(self, env_batch: EnvBatch, episodes: int) -> None:
        self.quota = np.array(quotas(episodes, env_batch.num_envs))
        self.names = env_batch.components
        self.action_counts = np.zeros(env_batch.spec.num_actions, np.int64)
        self.rewards: list[NDArray[Any]] = []
        self.components: list[NDArray[Any]] = []
        env_batch.listener = self

    def __call__(self, action: NDArray[np.int64], step: VectorStep) -> None:
        assert step.components is not None
        self.quota -= step.is_first
        counted = (self.quota > 0) & ~step.is_first
        self.action_counts += np.bincount(action[counted], minlength=len(self.action_counts))
        self.rewards.append(step.reward[counted])
        self.components.append(step.components[counted])

    def rewards_under(self, weights: Weights) -> NDArray[np.float64]:
        """The reward of every step under another reward."""
        weight_vector = np.array([weights.get(name, 0.0) for name in self.names])
        return np.concatenate(self.components) @ weight_vector


def make_env_batch(run: TrainedRun, episodes: int, number: int) -> EnvBatch:
    """Environments with seeds that no training uses, the same for all runs with the same seed."""
    return for_evaluation(run.experiment.env).make(min(episodes, 16), run.seed, substream(EVAL, number, 0), 1)


def run_episodes(
    env_batch: EnvBatch,
    run: TrainedRun,
    weights: dict[str, Tensor],
    episodes: int,
    mode: Mode,
    stop: Callable[[], bool],
) -> list[Episode]:
    """Whole episodes of the run's agent; fewer if stopped. Closes the environments."""
    try:
        agent = build_agent(run.experiment, env_batch.spec, weights, torch.device("cpu"))
        rng = torch.Generator().manual_seed(derive(run.seed, EVAL, ACTIONS))
        return play_episodes(agent, env_batch, episodes, mode, rng, stop=stop)
    finally:
        env_batch.close()


def evaluate_checkpoints(
    run: TrainedRun, rewards: dict[str, str], true: str, episodes: int, stop: Callable[[], bool]
) -> list[dict[str, Any]]:
    """One row per checkpoint and mode. Rows are saved in the run directory, so that no evaluation is repeated."""
    saved, rows = Run(run.path), []
    for path in saved.saved("milestones"):
        name = f"judged-{path.name}.json"
        if (run.path / name).exists():
            rows += json.loads((run.path / name).read_text())
            continue
        if stop():
            break
        frames = int(path.name)
        weights = saved.load(str(frames)).weights
        evaluated = [_evaluate(run, frames, weights, mode, rewards, true, episodes, stop) for mode in MODES]
        if stop():  # incomplete
            break
        saved.write(name, json.dumps(evaluated))
        rows += evaluated
    return rows


def _evaluate(
    run: TrainedRun,
    frames: int,
    weights: dict[str, Tensor],
    mode: Mode,
    rewards: dict[str, str],
    true: str,
    episodes: int,
    stop: Callable[[], bool],
) -> dict[str, Any]:
    env_batch = make_env_batch(run, episodes, 0)
    recorder = ComponentRecorder(env_batch, episodes)
    finished = run_episodes(env_batch, run, weights, episodes, mode, stop)
    if stop():
        return {}
    components = [e.components for e in finished]
    returns = {name: [weighted_sum(reward_weights(name), c) for c in components] for name in rewards}
    trunk = sum(w.numel() for name, w in weights.items() if name.startswith("torso.encoder.layers."))
    return {
        "proxy": run.proxy,
        "width": run.width,
        "depth": run.depth,
        "seed": run.seed,
        "run": run.name,
        "frames": frames,
        "parameters": sum(w.numel() for w in weights.values()),
        "trunk_parameters": trunk,
        "mode": mode,
        "proxy_return": [e.score for e in finished],
        "true_return": returns[true],
        "steps": [e.steps for e in finished],
        "returns": returns,
        "components": {name: [c[name] for c in components] for name in components[0]},
        "action_counts": recorder.action_counts.tolist(),
        "step_correlation": pearson(np.concatenate(recorder.rewards), recorder.rewards_under(reward_weights(true))),
    }
