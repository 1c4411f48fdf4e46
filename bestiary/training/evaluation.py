"""Evaluation: whole episodes on seeds that training never uses, with confidence intervals and the protocol."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from bestiary.acting.episodes import play_episodes
from bestiary.config.experiment import Experiment
from bestiary.config.machine import choose_device, cores, set_threads, tune_malloc
from bestiary.config.schema import OptionalCommand, differences, encode
from bestiary.envs import Atari, EnvConfig
from bestiary.envs.base import for_evaluation, references
from bestiary.envs.env_batch import EnvBatch
from bestiary.envs.reward_components import Weights, file_name, parse_reward, weighted_sum
from bestiary.errors import UserError
from bestiary.ops import stats
from bestiary.runtime.evaluation import build_agent
from bestiary.seeding import ACTIONS, EVAL, derive, substream
from bestiary.training.checkpoint import Checkpoint
from bestiary.training.run import Run
from bestiary.types import Episode, Mode, Spec

BOTH: tuple[Mode, ...] = ("greedy", "sampled")


def parse_modes(text: str) -> tuple[Mode, ...]:
    """greedy, sampled or both."""
    modes: dict[str, tuple[Mode, ...]] = {"both": BOTH, "greedy": ("greedy",), "sampled": ("sampled",)}
    if text not in modes:
        raise UserError(f"mode={text} must be one of {', '.join(modes)}")
    return modes[text]


Modes = Annotated[
    tuple[Mode, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="both|greedy|sampled",
        instance_from_str=lambda args: parse_modes(args[0]),
        is_instance=lambda x: isinstance(x, tuple),
        str_from_instance=lambda x: ["both" if len(x) == 2 else x[0]],
    ),
    tyro.conf.arg(name="mode"),
]


@dataclass(frozen=True)
class EvaluationProtocol:
    """What an evaluation runs: which checkpoint, on which episodes, and how the agent chooses its actions."""

    episodes: int = 100
    """episodes per mode and repeat"""
    modes: Modes = BOTH
    """greedy: the best action; sampled: an action sampled from the policy; both: one evaluation of each"""
    checkpoint: str | None = None
    """frames of a checkpoint, or last, or best (highest score of the evaluations during training); None: last"""
    positive_only: bool = False
    """replace episodes with a score of 0 or less by new ones (BattleZone, Up'n Down)"""
    repeats: int = 1
    """evaluations on different seeds; statistics are over all their episodes, and their means are listed"""
    envs: int = 16
    """environments that are stepped in parallel"""
    seed: int = 0
    """seed of the evaluation's episodes, which training never uses"""
    epsilon: float = 0.0
    """probability that an action is replaced by a uniformly random one (DQN: 0.05)"""
    command: OptionalCommand = None
    """for return-conditioned agents: desired return and horizon, such as 200,300; own: commands as the agent learnt
    them; None: as in the run's evaluations"""
    reward: str | None = None
    """named reward by which episodes are scored, whatever the agent was trained on: score, fuel:10, ..."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto: a GPU if there is one"""
    threads: int | None = None
    """CPU threads; None: one per core"""
    env: EnvConfig | None = None
    """environment, if it is not the one of training: --env.length 10000"""

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.envs < 1 or self.repeats < 1:
            raise UserError(f"episodes={self.episodes}, envs={self.envs} and repeats={self.repeats} must be at least 1")
        if not 0 <= self.epsilon <= 1:
            raise UserError(f"epsilon={self.epsilon} must lie in [0, 1]")

    def encoded(self, experiment: Experiment) -> dict[str, Any]:
        """The protocol as JSON, for the evaluation of an experiment."""
        return {
            "episodes": self.episodes,
            "repeats": self.repeats,
            "envs": min(self.envs, self.episodes),
            "seed": self.seed,
            "positive_only": self.positive_only,
            "epsilon": self.epsilon,
            "reward": self.reward,
            "command": experiment.evaluation.command if self.command is None else self.command,
            "env": encode(experiment.env),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def file(self, frames: int, env_changes: list[str]) -> str:
        """The name of the result's file. Protocols that differ in more than the device have different files."""
        mode = "" if len(self.modes) == 2 else f"-{self.modes[0]}"
        positive = "-positive" if self.positive_only else ""
        reward = "" if self.reward is None else f"-reward-{file_name(self.reward)}"
        acting = acting_name(self.epsilon, self.command, env_changes)
        return f"eval-{frames}-{self.repeats}x{self.episodes}-seed{self.seed}{mode}{positive}{acting}{reward}.json"


def acting_name(epsilon: float, command: tuple[float, ...] | None, env_changes: list[str]) -> str:
    """Part of a file's name: how the agent acted, where that is not the default."""
    parts = [f"epsilon{epsilon:g}"] if epsilon else []
    parts += [] if command is None else ["command" + ("-".join(f"{x:g}" for x in command) or "-own")]
    parts += [re.sub(r"[^\w.]+", "-", change).strip("-") for change in env_changes]
    return "".join(f"-{part}" for part in parts)


def evaluate(run: Run | Path | str, episodes: int = 100, **protocol: Any) -> dict[str, Any]:
    """Evaluate a run's agent on seeds that training never uses. Needs only the run directory.

    `protocol` are fields of `EvaluationProtocol`: `evaluate(run, 30, modes=("greedy",), checkpoint="best")`. Returns
    the statistics and the protocol, and writes them to eval-*.json in the run directory.
    """
    cfg = EvaluationProtocol(episodes, **protocol)
    run = run if isinstance(run, Run) else Run(run)
    experiment, env_changes = evaluation_experiment(run.experiment(), cfg.env)
    saved = run.load(cfg.checkpoint)
    device = choose_device(cfg.device)
    tune_malloc()
    frames = saved.meta["frames"]
    out: dict[str, Any] = {"checkpoint_frames": frames, "env_changes": env_changes, "protocol": cfg.encoded(experiment)}
    for mode in cfg.modes:
        repeats = [_play(cfg, experiment, saved, device, mode, number) for number in range(cfg.repeats)]
        spec = repeats[0][0]
        out["environment"] = spec.name
        # human scores are of full games
        game = spec.name if isinstance(experiment.env, Atari) and not experiment.env.one_life else None
        out[mode] = report([e for _, played in repeats for e in played], game)
        out[mode]["repeat_means"] = [float(np.mean([e.score for e in played])) for _, played in repeats]
    known = references(experiment.env)
    if known is not None:
        out["references"] = known._asdict()
    name = cfg.file(frames, env_changes)
    run.write(name, json.dumps(out, indent=2))
    return out | {"file": str(run.path / name)}


def evaluation_experiment(experiment: Experiment, env: EnvConfig | None) -> tuple[Experiment, list[str]]:
    """The experiment with the environment of its evaluation (None: as usual), and what differs from the usual."""
    usual = for_evaluation(experiment.env)
    chosen = usual if env is None else env
    return replace(experiment, env=chosen), differences(encode(usual), encode(chosen))


def _play(
    cfg: EvaluationProtocol, experiment: Experiment, saved: Checkpoint, device: torch.device, mode: Mode, number: int
) -> tuple[Spec, list[Episode]]:
    """The episodes of one mode and repeat."""
    # the run's own seed with another stream: what the seed decides for the whole run, such as a maze, stays the same
    stream = substream(EVAL, cfg.seed, number)
    env_batch = experiment.env.make(min(cfg.envs, cfg.episodes), experiment.seed, stream, cfg.threads or cores())
    set_threads(cfg.threads, env_batch.spec)
    try:
        score = scoring(experiment.env, env_batch, cfg.reward)
        accept = (lambda e: score(e).score > 0) if cfg.positive_only else (lambda e: True)
        agent = build_agent(experiment, env_batch.spec, saved.weights, device, cfg.command)
        rng = torch.Generator(device).manual_seed(derive(experiment.seed, stream, ACTIONS))
        played = play_episodes(agent, env_batch, cfg.episodes, mode, rng, accept, epsilon=cfg.epsilon)
        return env_batch.spec, [score(e) for e in played]
    finally:
        env_batch.close()


def scoring(env: EnvConfig, env_batch: EnvBatch, reward: str | None) -> Callable[[Episode], Episode]:
    """A function that scores an episode by a named reward; None: by the reward of the environment."""
    if reward is None:
        return lambda episode: episode
    if not env_batch.components:
        raise UserError(
            f"{env_batch.spec.name} has no named rewards: --reward is for env:riverraid and "
            "bestiary.envs.reward_components"
        )
    weights = parse_reward(reward, dict.fromkeys(env_batch.components), getattr(env, "named_rewards", None))
    return lambda episode: rescored(episode, weights)


def rescored(episode: Episode, weights: Weights) -> Episode:
    """The same episode with the returns of another reward."""
    return episode._replace(
        score=weighted_sum(weights, episode.components),
        life_returns=tuple(weighted_sum(weights, components) for components in episode.life_components),
    )


def report(episodes: list[Episode], game: str | None) -> dict[str, Any]:
    """Statistics of episodes and lives. `game`: the Atari game whose human score normalises the mean; None: none."""
    scores = [e.score for e in episodes]
    out: dict[str, Any] = {
        "score": stats.summary(scores),
        "life_return": stats.summary([r for e in episodes for r in e.life_returns]),
        "episode_length": stats.summary([e.steps for e in episodes]),
        "frames": sum(e.frames for e in episodes),
        "truncated": sum(e.truncated for e in episodes),
    }
    successes = [e.success for e in episodes if e.success is not None]
    if successes:
        out["success"] = stats.summary(successes)
    if episodes[0].info:
        out["info"] = info_summary(episodes)
    if episodes[0].components:
        out["components"] = {k: stats.summary([e.components[k] for e in episodes]) for k in episodes[0].components}
    if game is not None:
        out["human_normalised"] = human_normalised(game, out["score"]["mean"])
    out["scores"] = scores
    return out


def info_summary(episodes: list[Episode]) -> dict[str, Any]:
    """Statistics of each number in `Episode.info`, such as the desired return and horizon."""
    names = episodes[0].info if episodes else {}
    return {name: stats.summary([e.info[name] for e in episodes]) for name in names}


@cache
def reference_scores() -> dict[str, dict[str, float | None]]:
    """Random, human and published scores per Atari game."""
    return json.loads(files("bestiary.envs").joinpath("atari_scores.json").read_text())


def human_normalised(game: str, score: float) -> float | None:
    """(score - random) / (human - random); None where no reference is published."""
    by_name = {name.lower(): scores for name, scores in reference_scores().items()}
    scores = by_name.get(game.lower(), {})
    human, random = scores.get("human"), scores.get("random")
    return None if human is None or random is None else (score - random) / (human - random)
