"""How good is it, really: whole games on fresh seeds, with intervals, and the protocol beside the number."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bestiary import stats
from bestiary.actor import Actor
from bestiary.algos.base import Agent, load_weights
from bestiary.config import differences, encode
from bestiary.envs import Atari, EnvConfig
from bestiary.envs.base import references
from bestiary.envs.world import World
from bestiary.errors import UserError
from bestiary.experiment import Experiment
from bestiary.exploration import Fixed
from bestiary.machine import choose_device, cores, keep_memory, set_threads
from bestiary.run import Run
from bestiary.seeding import ACTIONS, EVAL, derive, substream
from bestiary.types import Episode, Spec

Mode = Literal["greedy", "sampled"]
ROWS = 32  # between two looks at what has ended
ATTEMPTS = 20  # games per wanted positive one, before giving up


@torch.no_grad()
def play(
    agent: Agent,
    world: World,
    episodes: int,
    mode: Mode,
    rng: torch.Generator,
    accept: Callable[[Episode], bool] = lambda e: True,
    stop: Callable[[], bool] = lambda: False,
) -> list[Episode]:
    """Whole games. Every slot has its quota, so quick games are not over-represented."""
    n = world.num_envs
    quota = [episodes // n + (slot < episodes % n) for slot in range(n)]
    actor = Actor(world, agent, None if mode == "greedy" else Fixed(torch.zeros(n)), ROWS, 0, rng.device)
    actor.rng = rng
    played: list[Episode] = []
    tries = 0
    while any(quota) and not stop():
        for e in actor.unroll()[1]:
            tries += quota[e.slot] > 0
            if quota[e.slot] > 0 and accept(e):
                quota[e.slot] -= 1
                played.append(e)
        if tries > ATTEMPTS * episodes:
            raise UserError(f"only {len(played)} of {tries} games had a positive score; {episodes} were asked for")
    return sorted(played, key=lambda e: e.slot)


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


def build_agent(experiment: Experiment, spec: Spec, weights: dict[str, torch.Tensor], device: torch.device) -> Agent:
    agent = experiment.algo.agent(spec, experiment.net, experiment.core)
    load_weights(agent, weights, "than experiment.json describes")
    return agent.to(device).eval()


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
    if game is not None:
        out["human_normalised"] = human_normalised(game, out["game"]["mean"])
    out["scores"] = scores
    return out


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
) -> dict[str, Any]:
    """Play a run's agent on seeds it was never trained on. Needs only the run directory; writes eval-*.json there.

    `runs` repeats the protocol on other seeds: the statistics are over all games, and the means of the
    repetitions are listed. `positive_only` replays a game, from a fresh start, until its final score is positive.
    `env` plays elsewhere than it was trained, for example in a longer maze.
    """
    if episodes < 1 or envs < 1 or runs < 1:
        raise UserError(f"episodes={episodes}, envs={envs} and runs={runs} must be at least 1")
    run = run if isinstance(run, Run) else Run(run)
    experiment = run.experiment()
    changed = [] if env is None else differences(encode(experiment.env), encode(env))
    experiment = experiment if env is None else replace(experiment, env=env)
    saved = run.load(checkpoint)
    where = choose_device(device)
    keep_memory()
    accept = (lambda e: e.score > 0) if positive_only else (lambda e: True)

    def repetition(mode: Mode, number: int) -> tuple[Spec, list[Episode]]:
        # the run's own seed, in a stream of its own: what belongs to the whole run stays the same
        stream = substream(EVAL, seed, number)
        world = experiment.env.make(min(envs, episodes), experiment.seed, stream, threads or cores())
        set_threads(threads, world.spec)
        try:
            agent = build_agent(experiment, world.spec, saved.weights, where)
            rng = torch.Generator(where).manual_seed(derive(experiment.seed, stream, ACTIONS))
            return world.spec, play(agent, world, episodes, mode, rng, accept)
        finally:
            world.close()

    out: dict[str, Any] = {
        "checkpoint_frames": saved.meta["frames"],
        "elsewhere": changed,
        "protocol": {
            "episodes": episodes,
            "runs": runs,
            "envs": min(envs, episodes),
            "seed": seed,
            "positive_only": positive_only,
            "env": encode(experiment.env),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    }
    for mode in modes:
        played = [repetition(mode, number) for number in range(runs)]
        spec = played[0][0]
        out["environment"] = spec.name
        game = spec.name if isinstance(experiment.env, Atari) else None
        out[mode] = report([e for _, games in played for e in games], game)
        out[mode]["run_means"] = [float(np.mean([e.score for e in games])) for _, games in played]
    known = references(experiment.env)
    if known is not None:
        out["references"] = known._asdict()
    which = "" if len(modes) == 2 else f"-{modes[0]}"
    kind = "-positive" if positive_only else ""
    elsewhere = "".join(f"-{c.rpartition(': ')[0].strip('.') or 'env'}-{c.rpartition(' -> ')[2]}" for c in changed)
    name = f"eval-{saved.meta['frames']}-{runs}x{episodes}-seed{seed}{which}{kind}{elsewhere}.json"
    run.write(name, json.dumps(out, indent=2))
    return out | {"file": str(run.path / name)}


def evaluate_now(
    experiment: Experiment,
    weights: dict[str, torch.Tensor],
    device: torch.device,
    threads: int,
    stop: Callable[[], bool],
) -> list[Episode]:
    """During training: greedy games in a world of their own, with a copy of the weights."""
    episodes = experiment.evaluation.episodes
    world = experiment.env.make(min(16, episodes), experiment.seed, EVAL, threads)
    try:
        agent = build_agent(experiment, world.spec, weights, device)
        return play(agent, world, episodes, "greedy", torch.Generator(device).manual_seed(0), stop=stop)
    finally:
        world.close()
