"""How good is it, really: whole games on fresh seeds, with intervals, and the protocol beside the number."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch

from bestiary import stats, tree
from bestiary.algos.base import Agent
from bestiary.config import encode
from bestiary.envs import Atari
from bestiary.envs.world import World
from bestiary.experiment import Experiment
from bestiary.machine import choose_device
from bestiary.run import Run
from bestiary.runtime import cores
from bestiary.seeding import ACTIONS, EVAL, derive
from bestiary.types import Episode, Spec

Mode = Literal["greedy", "sampled"]
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
    explore = None if mode == "greedy" else torch.zeros(n, device=rng.device)
    step, state = world.reset(), agent.initial_state(n)
    played: list[Episode] = []
    tries = 0
    while any(quota) and not stop():
        step = tree.to_device(step, rng.device)
        action, _, state = agent.act(step, state, explore, rng)
        step, ended = world.step(action)
        for e in ended:
            tries += quota[e.slot] > 0
            if quota[e.slot] > 0 and accept(e):
                quota[e.slot] -= 1
                played.append(e)
        if tries > ATTEMPTS * episodes:
            raise ValueError(f"only {len(played)} of {tries} games ended with a positive score; {episodes} were asked for")
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
    try:
        agent.load_state_dict(weights)
    except RuntimeError as e:
        reason = str(e).splitlines()[1].strip() if "\n" in str(e) else str(e)
        raise ValueError(f"the checkpoint is of another network than experiment.json describes: {reason}") from None
    return agent.to(device).eval()


def report(episodes: list[Episode], spec: Spec, game: str | None) -> dict[str, Any]:
    """Statistics per game and per life; human-normalised for Atari."""
    scores = [e.score for e in episodes]
    out: dict[str, Any] = {
        "game": stats.summary(scores),
        "life": stats.summary([r for e in episodes for r in e.lives]),
        "steps": stats.summary([e.steps for e in episodes]),
        "frames": sum(e.frames for e in episodes),
        "truncated": sum(e.truncated for e in episodes),
    }
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
    envs: int = 16,
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
    write: bool = True,
) -> dict[str, Any]:
    """Play a run's agent on seeds it was never trained on. Needs only the run directory."""
    if episodes < 1 or envs < 1:
        raise ValueError(f"episodes={episodes} and envs={envs} must be at least 1")
    run = run if isinstance(run, Run) else Run(run)
    experiment = run.experiment()
    saved = run.load(checkpoint)
    where, threads = choose_device(device), threads or cores()
    torch.set_num_threads(threads)
    results: dict[str, Any] = {}
    name = None
    for mode in modes:
        world = experiment.env.make(min(envs, episodes), derive(experiment.seed, seed), EVAL, threads)
        try:
            agent = build_agent(experiment, world.spec, saved.weights, where)
            rng = torch.Generator(where).manual_seed(derive(experiment.seed, ACTIONS, EVAL, seed))
            accept = (lambda e: e.score > 0) if positive_only else (lambda e: True)
            played = play(agent, world, episodes, mode, rng, accept)
            name = world.spec.name
            results[mode] = report(played, world.spec, name if isinstance(experiment.env, Atari) else None)
        finally:
            world.close()
    out = {
        "environment": name,
        "checkpoint_frames": saved.meta["frames"],
        "protocol": {
            "episodes": episodes,
            "envs": min(envs, episodes),
            "seed": seed,
            "positive_only": positive_only,
            "env": encode(experiment.env),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        **results,
    }
    if write:
        kind = "-positive" if positive_only else ""
        run.write(f"eval-{saved.meta['frames']}{kind}.json", json.dumps(out, indent=2))
    return out


def evaluate_now(
    experiment: Experiment, weights: dict[str, torch.Tensor], device: torch.device, threads: int, stop: Callable[[], bool]
) -> list[Episode]:
    """During training: greedy games in a world of their own, with a copy of the weights."""
    episodes = experiment.evaluation.episodes
    world = experiment.env.make(min(16, episodes), experiment.seed, EVAL, threads)
    try:
        agent = build_agent(experiment, world.spec, weights, device)
        return play(agent, world, episodes, "greedy", torch.Generator(device).manual_seed(0), stop=stop)
    finally:
        world.close()


