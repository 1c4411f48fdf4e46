"""Evaluations during training: whole episodes on evaluation seeds, in the training loop or in the background."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from bestiary.acting.episodes import play_episodes
from bestiary.algos.base import Agent, load_weights
from bestiary.config.experiment import Experiment
from bestiary.envs import Atari, EnvConfig
from bestiary.envs.base import for_evaluation
from bestiary.seeding import ACTIONS, EVAL, derive
from bestiary.types import Episode, Spec

MAX_ENVS = 16  # environments of an evaluation during training


def build_agent(
    experiment: Experiment,
    spec: Spec,
    weights: dict[str, Tensor],
    device: torch.device,
    command: tuple[float, ...] | None = None,
) -> Agent:
    """The experiment's agent with given weights, in evaluation mode.

    `command` sets the desired return (and horizon) of a return-conditioned agent. None: `evaluation.command` of the
    experiment; (): the command distribution that the agent learned.
    """
    agent = experiment.algo.agent(spec, experiment.net, experiment.core)
    load_weights(agent, weights, "than experiment.json describes")
    chosen = experiment.evaluation.command if command is None else command
    if chosen or command is not None:
        agent.set_command(chosen)
    return agent.to(device).eval()


def evaluation_env(experiment: Experiment) -> EnvConfig:
    """The environment of evaluations during training."""
    env, lives = for_evaluation(experiment.env), experiment.evaluation.lives
    return replace(env, one_life=lives == "one") if isinstance(env, Atari) and lives != "as trained" else env


def prepare(
    experiment: Experiment, weights: dict[str, Tensor], device: torch.device, threads: int
) -> Callable[[Callable[[], bool]], list[Episode]]:
    """Build environments and agent of an evaluation during training; return a function that runs it.

    Building uses global random state and belongs to the calling thread. The returned function takes a `stop` callback
    and may run in any thread.
    """
    cfg = experiment.evaluation
    env_batch = evaluation_env(experiment).make(min(MAX_ENVS, cfg.episodes), experiment.seed, EVAL, threads)
    try:
        with torch.random.fork_rng(devices=[]):  # initialising a network must not advance training's random numbers
            agent = build_agent(experiment, env_batch.spec, weights, device)
    except BaseException:
        env_batch.close()
        raise
    rng = torch.Generator(device).manual_seed(derive(experiment.seed, EVAL, ACTIONS))

    def run(stop: Callable[[], bool]) -> list[Episode]:
        try:
            return play_episodes(agent, env_batch, cfg.episodes, cfg.mode, rng, stop=stop, epsilon=cfg.epsilon)
        finally:
            env_batch.close()

    return run


class AsyncEvaluation(Protocol):
    """An evaluation that runs while training continues."""

    frames: int
    weights: dict[str, Tensor]

    @property
    def running(self) -> bool: ...
    def finish(self, stop: Callable[[], bool] = ...) -> None:
        """Wait until all episodes have ended; cancel once `stop` returns True (default: at once)."""
        ...

    def episodes(self) -> list[Episode]:
        """The finished episodes; fewer than requested if the evaluation was cancelled."""
        ...


class ThreadedEvaluation:
    """An evaluation in a background thread, with a copy of the weights at its start.

    A failure in the thread is raised by `episodes()` in the thread that calls it.
    """

    def __init__(self, experiment: Experiment, frames: int, weights: dict[str, Tensor], device: torch.device) -> None:
        self.frames = frames
        self.weights = {k: v.detach().clone() for k, v in weights.items()}
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self.finished: list[Episode] = []
        run = prepare(experiment, self.weights, device, threads=1)
        torch.get_num_threads()  # PyTorch's thread count becomes this thread's own only once it has been read here
        self.thread = threading.Thread(target=self._run, args=(run,), name="evaluation", daemon=True)
        self.thread.start()

    def _run(self, run: Callable[[Callable[[], bool]], list[Episode]]) -> None:
        torch.set_num_threads(1)  # applies to this thread alone
        try:
            self.finished = run(self.stopping.is_set)
        except BaseException as e:
            self.failure = e

    @property
    def running(self) -> bool:
        return self.thread.is_alive()

    def finish(self, stop: Callable[[], bool] = lambda: True) -> None:
        while self.running:
            if stop():
                self.stopping.set()
            self.thread.join(0.05)

    def episodes(self) -> list[Episode]:
        if self.failure is not None:
            raise self.failure
        return self.finished
