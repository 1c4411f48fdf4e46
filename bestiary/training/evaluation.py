"""How good is it, really: whole games on fresh seeds, with intervals, and the protocol beside the number."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bestiary.acting.episodes import play_episodes
from bestiary.config.experiment import Experiment
from bestiary.config.machine import choose_device, cores, set_threads, tune_malloc
from bestiary.config.schema import differences, encode
from bestiary.envs import Atari, EnvConfig
from bestiary.envs.base import for_evaluation, references
from bestiary.envs.env_batch import EnvBatch
from bestiary.envs.reward_components import Weights, file_name, parse_reward, weighted_sum
from bestiary.errors import UserError
from bestiary.ops import stats
from bestiary.runtime.evaluation import build_agent
from bestiary.seeding import ACTIONS, EVAL, derive, substream
from bestiary.training.run import Run
from bestiary.types import Episode, Mode, Spec


@cache
def reference_scores() -> dict[str, dict[str, float | None]]:
    """Random and human scores per Atari game."""
    return json.loads(files("bestiary.envs").joinpath("atari_scores.json").read_text())


def human_normalised(game: str, score: float) -> float | None:
    """(score - random) / (human - random); None where no reference is published."""
    by_name = {name.lower(): row for name, row in reference_scores().items()}
    row = by_name.get(game.lower(), {})
    human, random = row.get("human"), row.get("random")
    return None if human is None or random is None else (score - random) / (human - random)


def played_in(experiment: Experiment, env: EnvConfig | None) -> tuple[Experiment, list[str]]:
    """A run's experiment where its agent is played (None: as usual), and what is not as usual there."""
    usual = for_evaluation(experiment.env)
    chosen = usual if env is None else env
    return replace(experiment, env=chosen), differences(encode(usual), encode(chosen))


def protocol_name(epsilon: float, command: tuple[float, ...] | None, changed: list[str]) -> str:
    """What sets a protocol apart, as part of a file's name."""
    slips = f"-epsilon{epsilon:g}" if epsilon else ""
    told = "" if command is None else "-command" + ("-".join(f"{x:g}" for x in command) or "-own")
    return slips + told + "".join("-" + re.sub(r"[^\w.]+", "-", change).strip("-") for change in changed)


def info_summary(episodes: list[Episode]) -> dict[str, Any]:
    """Statistics of each number in `Episode.info`, such as the desired return and horizon."""
    names = episodes[0].info if episodes else {}
    return {name: stats.summary([e.info[name] for e in episodes]) for name in names}


def report(episodes: list[Episode], game: str | None) -> dict[str, Any]:
    """Statistics per game and per life; success where there is such a thing; human-normalised for Atari."""
    scores = [e.score for e in episodes]
    out: dict[str, Any] = {
        "game": stats.summary(scores),
        "life": stats.summary([r for e in episodes for r in e.lives]),
        "steps": stats.summary([e.steps for e in episodes]),
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
        out["human_normalised"] = human_normalised(game, out["game"]["mean"])
    out["scores"] = scores
    return out


def named_reward(env: EnvConfig, env_batch: EnvBatch, reward: str) -> Weights:
    """A reward by its name, of an environment that keeps record of what rewards are made of."""
    if not env_batch.components:
        raise UserError(
            f"{env_batch.spec.name} has no rewards by name: --reward is for env:riverraid and "
            "bestiary.envs.reward_components"
        )
    return parse_reward(reward, dict.fromkeys(env_batch.components), getattr(env, "named_rewards", None))


def recount(e: Episode, weights: Weights) -> Episode:
    """The same game under another reward."""
    return e._replace(
        score=weighted_sum(weights, e.components),
        lives=tuple(weighted_sum(weights, parts) for parts in e.life_components),
    )


def evaluate(
    run: Run | Path | str,
    episodes: int = 100,
    modes: tuple[Mode, ...] = ("greedy", "sampled"),
    checkpoint: str | None = None,
    positive_only: bool = False,
    runs: int = 1,
    envs: int = 16,
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
    env: EnvConfig | None = None,
    epsilon: float = 0.0,
    command: tuple[float, ...] | None = None,
    reward: str | None = None,
) -> dict[str, Any]:
    """Play a run's agent on seeds it was never trained on. Needs only the run directory; writes eval-*.json there.

    `runs` repeats the protocol on other seeds: the statistics are over all games, and the means of the
    repetitions are listed. `positive_only` replays a game, from a fresh start, until its final score is positive.
    `env` plays elsewhere than it was trained, for example in a longer maze. `epsilon` is the chance that an action,
    whichever way it was chosen, is replaced by one at random. `command` is what an agent that follows commands is told
    to reach, instead of what the experiment says: its `evaluation.command`; (): what the agent asks of itself. `reward`
    counts games by another one than that of the run, where rewards have names; what the agent sees stays the same.
    """
    if episodes < 1 or envs < 1 or runs < 1:
        raise UserError(f"episodes={episodes}, envs={envs} and runs={runs} must be at least 1")
    if not 0 <= epsilon <= 1:
        raise UserError(f"epsilon={epsilon} must lie in [0, 1]")
    run = run if isinstance(run, Run) else Run(run)
    experiment, changed = played_in(run.experiment(), env)
    saved = run.load(checkpoint)
    where = choose_device(device)
    tune_malloc()

    def repetition(mode: Mode, number: int) -> tuple[Spec, list[Episode]]:
        # the run's own seed, in a stream of its own: what belongs to the whole run stays the same
        stream = substream(EVAL, seed, number)
        env_batch = experiment.env.make(min(envs, episodes), experiment.seed, stream, threads or cores())
        set_threads(threads, env_batch.spec)
        try:
            weights = None if reward is None else named_reward(experiment.env, env_batch, reward)
            count = (lambda e: e) if weights is None else (lambda e: recount(e, weights))
            accept = (lambda e: count(e).score > 0) if positive_only else (lambda e: True)
            agent = build_agent(experiment, env_batch.spec, saved.weights, where, command)
            rng = torch.Generator(where).manual_seed(derive(experiment.seed, stream, ACTIONS))
            played = play_episodes(agent, env_batch, episodes, mode, rng, accept, epsilon=epsilon)
            return env_batch.spec, [count(e) for e in played]
        finally:
            env_batch.close()

    out: dict[str, Any] = {
        "checkpoint_frames": saved.meta["frames"],
        "elsewhere": changed,
        "protocol": {
            "episodes": episodes,
            "runs": runs,
            "envs": min(envs, episodes),
            "seed": seed,
            "positive_only": positive_only,
            "epsilon": epsilon,
            "reward": reward,
            "command": experiment.evaluation.command if command is None else command,
            "env": encode(experiment.env),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    }
    for mode in modes:
        played = [repetition(mode, number) for number in range(runs)]
        spec = played[0][0]
        out["environment"] = spec.name
        # the scores of people are of whole games
        game = spec.name if isinstance(experiment.env, Atari) and not experiment.env.one_life else None
        out[mode] = report([e for _, games in played for e in games], game)
        out[mode]["run_means"] = [float(np.mean([e.score for e in games])) for _, games in played]
    known = references(experiment.env)
    if known is not None:
        out["references"] = known._asdict()
    which = "" if len(modes) == 2 else f"-{modes[0]}"
    kind = ("-positive" if positive_only else "") + protocol_name(epsilon, command, changed)
    kind += "" if reward is None else f"-reward-{file_name(reward)}"
    name = f"eval-{saved.meta['frames']}-{runs}x{episodes}-seed{seed}{which}{kind}.json"
    run.write(name, json.dumps(out, indent=2))
    return out | {"file": str(run.path / name)}
