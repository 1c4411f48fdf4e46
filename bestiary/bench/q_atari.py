"""Speed of the Ape-X and R2D2 training loops against the sum of their parts: emulator, acting, learning."""

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bestiary import tree
from bestiary.acting.actor import Actor
from bestiary.algos import Apex, R2d2
from bestiary.bench import medians
from bestiary.config.experiment import Experiment
from bestiary.config.machine import cores
from bestiary.config.schema import Count
from bestiary.envs import Atari
from bestiary.envs.atari import AtariEnvBatch
from bestiary.errors import UserError
from bestiary.presets import preset
from bestiary.replay.prioritized import PrioritizedReplay
from bestiary.runtime import Local, Overlap
from bestiary.runtime.local import LocalRuntime
from bestiary.runtime.start import start
from bestiary.seeding import TRAIN
from bestiary.types import Batch, Progress, Update

CAPACITY = 20_000  # transitions
UPDATES = 8  # updates per timing of sampling, learning and writing back
RUN_UP, UNROLLS = 2, 2  # unrolls of the loop: before a timing, and per timing
ALWAYS = 1e9  # updates per step: one is always due
PARTS = {
    "emulator": "emulator",
    "acting": "acting",
    "writing": "writing into the replay",
    "sampling": "sampling",
    "learning": "learning",
    "write_back": "writing priorities back",
}
BOUNDS = {
    "in_turn": "emulator, acting and learning one after the other",
    "side_by_side": "emulator and acting, at the same time as learning",
}


@dataclass(frozen=True)
class QAtariBench:
    preset: ClassVar[str]
    game: str = "Pong"
    """Atari game"""
    envs: int = 32
    """number of environments"""
    runtime: Literal["local", "overlap"] = "local"
    """acting and learning one after the other (local) or at the same time (overlap)"""
    warmup: Count = 4_000
    """transitions in the replay before anything is measured"""
    rounds: int = 9
    """rounds, in which the parts and the loop take turns; medians are reported"""
    threads: int | None = None
    """PyTorch threads; None: as the runtime chooses"""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"rounds={self.rounds} must be at least 1")

    @property
    def title(self) -> str:
        return {Apex: "Ape-X", R2d2: "R2D2"}[type(preset(self.preset).algo)]

    def experiment(self) -> Experiment:
        base = preset(self.preset)
        algo = base.algo
        assert isinstance(algo, Apex | R2d2)
        machine = {"local": Local, "overlap": Overlap}[self.runtime]
        return replace(
            base,
            env=Atari(game=self.game),
            algo=replace(algo, replay=replace(algo.replay, capacity=CAPACITY, warmup=self.warmup)),
            runtime=machine(envs=self.envs, threads=self.threads),
            frames=10**12,  # never reached
        )


@dataclass(frozen=True)
class ApexAtari(QAtariBench):
    """bestiary bench apex-atari"""

    preset: ClassVar[str] = "apex-small"


@dataclass(frozen=True)
class R2d2Atari(QAtariBench):
    """bestiary bench r2d2-atari"""

    preset: ClassVar[str] = "r2d2-small"


class Parts:
    """Every part of the loop alone, with an emulator, an actor and a full replay of its own."""

    def __init__(self, experiment: Experiment, runtime: LocalRuntime) -> None:
        self.learner, self.device = runtime.learner, runtime.device
        algo, envs = experiment.algo, experiment.runtime.envs
        assert isinstance(algo, Apex | R2d2)
        env_batch = experiment.env.make(envs, experiment.seed, TRAIN, experiment.runtime.threads or cores())
        assert isinstance(env_batch, AtariEnvBatch)
        self.env_batch, self.envs, self.unroll = env_batch, envs, algo.unroll
        agent = copy.deepcopy(self.learner.agent)
        self.actor = Actor(env_batch, agent, algo.explorer(envs), algo.unroll, 0, self.device)
        self.trajectory, _ = self.actor.unroll()
        algo = replace(algo, replay=replace(algo.replay, updates_per_step=ALWAYS))
        self.replay = algo.replay_builder(envs).build(0, env_batch.spec, agent.initial_state(1))
        while self.replay.ring.newest < self.replay.ring.slots or self.replay.rate_limiter.due < 1:
            self.write()
        self.rng = np.random.default_rng(0)
        self.batches: list[Batch] = []
        self.updates: list[Update] = []

    def emulate(self) -> None:
        for _ in range(self.unroll):
            self.env_batch.env.step(self.rng.integers(0, self.env_batch.spec.num_actions, self.envs))

    @torch.no_grad()
    def act(self) -> None:
        actor = self.actor
        assert actor.current is not None
        assert actor.explorer is not None
        for _ in range(self.unroll):
            step = actor.current[0]
            actor.agent.act(step, actor.state, actor.explorer(step), actor.rng)

    def write(self) -> None:
        self.replay.add(self.trajectory)

    def sample(self) -> None:
        batches = [self.replay.sample() for _ in range(UPDATES)]
        self.batches = [batch for batch in batches if batch is not None]

    def learn(self) -> None:
        self.updates = [self.learner.update(tree.to_device(batch, self.device)) for batch in self.batches]

    def write_back(self) -> None:
        for batch, update in zip(self.batches, self.updates, strict=True):
            assert batch.keys is not None
            assert update.priorities is not None
            self.replay.update_priorities(batch.keys, update.priorities)


def fill(runtime: LocalRuntime) -> None:
    """Act until the warm-up is over, and count the updates that are due by then as made."""
    replay = runtime.replay
    assert isinstance(replay, PrioritizedReplay)
    while replay.rate_limiter.steps < replay.rate_limiter.warmup:
        trajectory, _ = runtime.actor.unroll()
        replay.add(trajectory)
    replay.rate_limiter.batches = int(replay.rate_limiter.updates_per_step * replay.rate_limiter.steps)


class Loop:
    """Transitions and updates per second of the running loop."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self.progress = iter(runtime)
        self.steps: list[float] = []
        self.updates: list[float] = []

    def run(self) -> None:
        before = self._after(RUN_UP)
        start = time.perf_counter()
        after = self._after(UNROLLS)
        seconds = time.perf_counter() - start
        self.steps.append((after.steps - before.steps) / seconds)
        self.updates.append((after.updates - before.updates) / seconds)
        rest()

    def _after(self, unrolls: int) -> Progress:
        return [next(self.progress) for _ in range(unrolls)][-1]


def rest(seconds: float = 10.0) -> None:
    """Wait until all threads are idle: with overlap the actor continues until the replay is full."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        worked = time.process_time()
        time.sleep(0.1)
        if time.process_time() - worked < 0.01:
            return


def measure(cfg: QAtariBench) -> dict[str, float]:
    """Steps per second: of each part alone, of all parts at best, and of the loop."""
    experiment = cfg.experiment()
    algo = experiment.algo
    assert isinstance(algo, Apex | R2d2)
    with closing(start(experiment)) as runtime:
        assert isinstance(runtime, LocalRuntime)
        fill(runtime)
        parts, loop = Parts(experiment, runtime), Loop(runtime)
        sides: dict[str, Callable[[], object]] = {
            "emulator": parts.emulate,
            "acting": parts.act,
            "writing": parts.write,
            "sampling": parts.sample,
            "learning": parts.learn,
            "write_back": parts.write_back,
            "loop": loop.run,
        }
        with closing(parts.env_batch):
            seconds = medians(sides, cfg.rounds)
        threads = runtime.threads
    per_unroll, per_update = 1 / (algo.unroll * cfg.envs), algo.replay.updates_per_step / UPDATES
    calls = dict.fromkeys(PARTS, per_update) | dict.fromkeys(("emulator", "acting", "writing"), per_unroll)
    cost = {name: calls[name] * seconds[name] for name in PARTS}  # seconds per step
    acting = cost["emulator"] + cost["acting"]
    bounds = {"in_turn": 1 / (acting + cost["learning"]), "side_by_side": 1 / max(acting, cost["learning"])}
    # parts that were measured on all cores are slower when they share them
    apart = cfg.runtime == "overlap" and cores() >= 2 * threads
    ideal = bounds["side_by_side" if apart else "in_turn"]
    steps, updates = (statistics.median(rates[1:]) for rates in (loop.steps, loop.updates))  # the first is warm-up
    rates = {name: 1 / s for name, s in cost.items()} | bounds
    waiting = steps * (cost["sampling"] + cost["write_back"])
    return rates | {"ideal": ideal, "loop": steps, "updates": updates, "share": steps / ideal, "waiting": waiting}


def main(cfg: QAtariBench) -> dict[str, Any]:
    r = measure(cfg)
    algo = cfg.experiment().algo
    assert isinstance(algo, Apex | R2d2)
    setting = (
        f"T={algo.unroll}, {cfg.envs} environments, batch {algo.replay.batch_size}, {torch.get_num_threads()} threads"
    )
    table = Table(
        title=f"{cfg.title} on {cfg.game}, {cfg.runtime}: {setting}", title_justify="left", box=None, padding=(0, 2)
    )
    for column in ("part", "steps/s alone", "µs per step", "of the loop's time"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, text in PARTS.items():
        table.add_row(text, f"{r[name]:,.0f}", f"{1e6 / r[name]:,.1f}", f"{100 * r['loop'] / r[name]:.1f}%")
    console = Console(width=110)
    console.print(table)
    for name, text in BOUNDS.items() if cfg.runtime == "overlap" else [("in_turn", BOUNDS["in_turn"])]:
        is_ideal = ", the ideal here" if r["ideal"] == r[name] else ""
        console.print(f"  {text}: {r[name]:,.0f} steps/s{is_ideal}")
    if cfg.runtime == "overlap":
        console.print("  (the second is the ideal where there are two cores per thread)")
    rates = f"{r['loop']:,.0f} steps/s, {r['updates']:,.1f} updates/s"
    every = f"an update every {1 / algo.replay.updates_per_step:.0f} steps"
    console.print(f"  loop, {every}: {rates}, {100 * r['share']:.0f}% of the ideal")
    aside = "; without waiting for the actor" if cfg.runtime == "overlap" else ""
    share = f"{100 * r['waiting']:.1f}% of the time"
    console.print(f"  the learner waits for data {share} (sampling, writing priorities back{aside})")
    return r
