"""How good is it, really: whole games on fresh seeds, with intervals, and the protocol beside the number."""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.acting.actor import Actor
from bestiary.algos.base import UNCOMMANDED, Agent, AgentWrapper, load_weights
from bestiary.algos.exploration import Fixed
from bestiary.algos.return_conditioned.learner import Commanded
from bestiary.config.experiment import Experiment
from bestiary.config.machine import choose_device, cores, keep_memory, set_threads
from bestiary.config.schema import differences, encode
from bestiary.envs import Atari, EnvConfig
from bestiary.envs.base import for_evaluation, references
from bestiary.envs.env_batch import EnvBatch
from bestiary.envs.reward_components import Weights, file_name, parse_reward, worth
from bestiary.errors import UserError
from bestiary.ops import stats
from bestiary.ops.policy import epsilon_greedy
from bestiary.seeding import ACTIONS, EVAL, derive, substream
from bestiary.training.run import Run
from bestiary.types import Episode, Mode, Spec, State, TimeStep

ROWS = 32  # between two looks at what has ended
ATTEMPTS = 20  # games per wanted positive one, before giving up


class EpsilonGreedyAgent(AgentWrapper):
    """Another agent, but with a chance of epsilon it does anything at all."""

    def __init__(self, agent: Agent, epsilon: float, num_actions: int) -> None:
        super().__init__(agent)
        self.epsilon = torch.tensor(epsilon)
        self.num_actions = num_actions

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        meant, aux, state = self.agent.act(step, state, explore, rng)
        return epsilon_greedy(F.one_hot(meant, self.num_actions), self.epsilon, rng), aux, state


def quotas(episodes: int, slots: int) -> list[int]:
    """So many games for each slot: if the first to end counted, quick games would be over-represented."""
    return [episodes // slots + (slot < episodes % slots) for slot in range(slots)]


@torch.no_grad()
def play(
    agent: Agent,
    env_batch: EnvBatch,
    episodes: int,
    mode: Mode,
    rng: torch.Generator,
    accept: Callable[[Episode], bool] = lambda e: True,
    stop: Callable[[], bool] = lambda: False,
    epsilon: float = 0.0,
) -> list[Episode]:
    """Whole games. Every slot has its quota, so quick games are not over-represented."""
    n = env_batch.num_envs
    agent = EpsilonGreedyAgent(agent, epsilon, env_batch.spec.num_actions) if epsilon else agent
    quota = quotas(episodes, n)
    actor = Actor(env_batch, agent, None if mode == "greedy" else Fixed(torch.zeros(n)), ROWS, 0, rng.device)
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


def build_agent(
    experiment: Experiment,
    spec: Spec,
    weights: dict[str, torch.Tensor],
    device: torch.device,
    command: tuple[float, ...] | None = None,
) -> Agent:
    """An agent to be looked at; `command` as in `evaluate`."""
    agent = experiment.algo.agent(spec, experiment.net, experiment.core)
    load_weights(agent, weights, "than experiment.json describes")
    asked = experiment.evaluation.command if command is None else command
    if asked:
        agent.tell(asked)
    elif command is not None and not isinstance(experiment.algo, Commanded):
        raise UserError(UNCOMMANDED)
    return agent.to(device).eval()


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


def commanded(episodes: list[Episode]) -> dict[str, Any]:
    """What was asked for, against what was reached: returns (or advantages), and moves where they were given too."""
    asked = [e.asked for e in episodes]
    if not asked or not all(asked):
        return {}
    out = {"asked": stats.summary([a[0] for a in asked])}
    if len(asked[0]) > 1:
        out["asked_steps"] = stats.summary([a[1] for a in asked])
    return out


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
    out |= commanded(episodes)
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
        score=worth(weights, e.components), lives=tuple(worth(weights, parts) for parts in e.life_components)
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
    keep_memory()

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
            played = play(agent, env_batch, episodes, mode, rng, accept, epsilon=epsilon)
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


def evaluated_in(experiment: Experiment) -> EnvConfig:
    """The environment of evaluations during training."""
    env, lives = for_evaluation(experiment.env), experiment.evaluation.lives
    return replace(env, one_life=lives == "one") if isinstance(env, Atari) and lives != "as trained" else env


def prepare(
    experiment: Experiment, weights: dict[str, Tensor], device: torch.device, threads: int
) -> Callable[[Callable[[], bool]], list[Episode]]:
    """During training: games in a world of their own, with a copy of the weights.

    All is built here and now; what is returned plays, until it is done or told to stop, in whatever thread.
    """
    plan = experiment.evaluation
    env_batch = evaluated_in(experiment).make(min(16, plan.episodes), experiment.seed, EVAL, threads)
    try:
        with torch.random.fork_rng(devices=[]):  # a new network draws from the stream that training draws from
            agent = build_agent(experiment, env_batch.spec, weights, device)
    except BaseException:
        env_batch.close()
        raise
    rng = torch.Generator(device).manual_seed(derive(experiment.seed, EVAL, ACTIONS))

    def games(stop: Callable[[], bool]) -> list[Episode]:
        try:
            return play(agent, env_batch, plan.episodes, plan.mode, rng, stop=stop, epsilon=plan.epsilon)
        finally:
            env_batch.close()

    return games


class AsyncEvaluation(Protocol):
    """An evaluation that is played while training goes on."""

    frames: int
    weights: dict[str, Tensor]

    @property
    def playing(self) -> bool: ...
    def end(self, stop: Callable[[], bool] = ...) -> None:
        """Wait until all games are played, or break them off once told to: without a word, now."""
        ...

    def games(self) -> list[Episode]:
        """What was played; fewer games than planned if it was broken off."""
        ...


class ThreadedEvaluation:
    """An evaluation in a thread of its own, with the weights as they were when it began.

    The thread only plays: whoever began it asks for the games, and is told there what went wrong.
    """

    def __init__(self, experiment: Experiment, frames: int, weights: dict[str, Tensor], device: torch.device) -> None:
        self.frames = frames
        self.weights = {k: v.detach().clone() for k, v in weights.items()}
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self.played: list[Episode] = []
        play_games = prepare(experiment, self.weights, device, threads=1)
        torch.get_num_threads()  # only a thread that has asked once keeps its number when another sets its own
        self.thread = threading.Thread(target=self._play, args=(play_games,), name="evaluation", daemon=True)
        self.thread.start()

    def _play(self, play_games: Callable[[Callable[[], bool]], list[Episode]]) -> None:
        torch.set_num_threads(1)  # of this thread alone
        try:
            self.played = play_games(self.stopping.is_set)
        except BaseException as e:  # raised where the games are asked for
            self.failure = e

    @property
    def playing(self) -> bool:
        return self.thread.is_alive()

    def end(self, stop: Callable[[], bool] = lambda: True) -> None:
        while self.playing:
            if stop():
                self.stopping.set()
            self.thread.join(0.05)

    def games(self) -> list[Episode]:
        if self.failure is not None:
            raise self.failure
        return self.played
