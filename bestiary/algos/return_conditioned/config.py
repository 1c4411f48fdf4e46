"""Settings of return-conditioned policies. The parts of UDRL and RCP can be mixed; the two differ in defaults."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bestiary.algos.base import Agent
from bestiary.algos.exploration import Explorer, FixedExploration
from bestiary.algos.return_conditioned.agent import ReturnConditionedAgent
from bestiary.algos.return_conditioned.learner import ReturnConditionedLearner
from bestiary.config.schema import Count, Counts, Numbers, advanced
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net
from bestiary.nets.optim import AdamW, OptimizerConfig
from bestiary.ops.commands import CommandDistribution, command_distribution, top_episodes
from bestiary.replay.critic_refresh import CriticRefresh
from bestiary.replay.episode_storage import EpisodeTable
from bestiary.replay.episodes import Episodes, EpisodesBuilder
from bestiary.types import Spec

LATEST_EPISODES = 20  # episodes over which command_source=maximum takes the largest return


@dataclass(frozen=True)
class ReturnConditioned:
    """Supervised learning of actions conditioned on a command: a return-to-go, an episode return or an advantage."""

    command: Literal["return-to-go", "return", "advantage"] = "return-to-go"
    """conditioning variable: return-to-go (UDRL), return of the whole episode (RCP-R) or advantage (RCP-A)"""
    horizon: bool = True
    """add the desired horizon to the command: the number of steps in which to reach the desired return (UDRL)"""
    discount: float = 1.0
    """discount factor gamma of returns-to-go and of the critic (UDRL 1, RCP 0.99)"""
    replay: Episodes = field(default_factory=Episodes)
    optimizer: OptimizerConfig = field(default_factory=lambda: AdamW(lr=1e-3))
    network: Literal["gate", "gates", "film"] = "film"
    """how the command enters the policy network: sigmoid gates of one layer (gate: UDRL), of every layer (gates: RCP),
    or scales of every layer (film: Perez et al. 2018)"""
    head: Counts = (128, 128)
    """hidden units of the policy network's layers after the core"""
    command_source: Literal["uniform", "episode", "percentile", "maximum"] = "episode"
    """distribution of commands: U(M, M + S) with mean M and standard deviation S of the best returns (uniform: UDRL),
    return and length of one of the best episodes (episode), a percentile of all labels (percentile), or the largest
    recent return or advantage (maximum: RCP's public code)"""
    command_episodes: int = 100
    """number of best episodes from which commands are taken (Srivastava et al. 2019: 25 to 100)"""
    max_return: float | None = None
    """upper limit of desired returns; None: no limit (LunarLander 320)"""
    weighting: Literal["none", "exponential"] = "none"
    """weights of transitions in the loss: all equal (UDRL), or exponential weights exp(z / beta) (RCP)"""
    beta: float = 1.0
    """temperature of the exponential weights exp(z / beta) (Peng et al. 2019); z is in standard deviations"""
    unroll: int = 32
    """environment steps, in each environment, between two rounds of updates"""

    # commands
    fixed_command: bool = advanced(False)
    """keep the command of an episode's first step, whatever is earned (RCP)"""
    resample_command: bool = advanced(False)
    """sample a new command at every step (RCP-A's public code)"""
    distinct_returns: bool = advanced(False)
    """among the best episodes only one of each return counts (UDRL's public code)"""
    return_increment: float = advanced(0.5)
    """while exploring, command_source=episode adds up to so many standard deviations of the best returns"""
    command_percentile: float = advanced(90.0)
    """percentile of the labels, with command_source=percentile"""
    command_period: int = advanced(1_000)
    """updates over which command_source=maximum takes the largest advantage"""
    command_shift: Numbers = advanced((0.0, 0.0))
    """subtracted from the command before it enters the network: return or advantage, horizon"""
    command_scale: Numbers = advanced((1.0, 1.0))
    """then multiplied with the command, so that the network sees numbers of size one"""

    # weights and training
    weight_by: Literal["episodes", "transitions"] = advanced("episodes")
    """what z of the exponential weights is of: the episode's rank score, or the transition's label; of advantages
    always the label"""
    weight_cap: float = advanced(20.0)
    """upper limit of the exponential weights (Peng et al. 2019: 20)"""
    burn_in: int = advanced(0)
    """burn-in length in steps: unrolled without gradient before a sequence, for recurrent state or frame stacks"""
    normalise: bool = advanced(False)
    """standardise observations with running mean and standard deviation; for vector observations"""
    label_smoothing: float = advanced(0.0)
    """label smoothing of the cross entropy: probability that the target gives to all actions alike"""
    ema_decay: float | None = advanced(None)
    """decay per update of an exponential moving average of the weights, which acts; None: the trained network acts"""
    max_inverse_temperature: float = advanced(1.0)
    """while exploring, logits are multiplied by an inverse temperature between 1 and this, log-uniform per episode"""
    inverse_temperature_steps: Count = advanced(600_000)
    """environment steps (episodes, if updates are counted by episodes) over which that maximum grows from 1"""
    grad_norm: float | None = advanced(1.0)
    """clip the gradient to this norm; None: no clipping"""
    final_lr_fraction: float = advanced(0.1)
    """learning rate at the end of the budget as a fraction of the first, decayed linearly; constant if updates are
    counted by episodes"""

    # the critic of advantages
    critic: Literal["separate", "joint"] = advanced("separate")
    """separate: its own optimiser, and TD(lambda) targets of all episodes at once; joint: its loss on a few episodes
    is added to the policy's (RCP-A's public code)"""
    critic_period: int = advanced(128)
    """updates between two refreshes of all advantages (separate) or between two critic losses (joint)"""
    critic_head: Counts = advanced((64, 64))
    """hidden units of the critic's layers after its core"""
    critic_optimizer: OptimizerConfig = field(default_factory=lambda: AdamW(lr=1e-3))
    trace_decay: float = advanced(0.95)
    """lambda of the critic's TD(lambda) targets (Kumar et al. 2019: 0.95)"""
    value_scale: float = advanced(100.0)
    """the critic predicts returns divided by this"""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        for name in ("command_shift", "command_scale"):
            if len(getattr(self, name)) != self.width:
                raise UserError(f"{self._flag(name)} must have as many numbers as a command: {self.width}")
        for name in ("beta", "weight_cap", "value_scale", "grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{self._flag(name)} must be positive")
        for name in ("discount", "label_smoothing", "ema_decay", "trace_decay", "final_lr_fraction"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"{self._flag(name)} must lie in [0, 1]")
        if not 0 <= self.command_percentile <= 100:
            raise UserError(f"{self._flag('command_percentile')} must lie in [0, 100]")
        for name in ("return_increment", "burn_in"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{self._flag(name)} must be at least 0")
        for name in ("max_inverse_temperature", "unroll", "command_episodes", "critic_period", "command_period"):
            if not getattr(self, name) >= 1:
                raise UserError(f"{self._flag(name)} must be at least 1")
        if not self.head or min(self.head) < 1:
            raise UserError(f"{self._flag('head')} must be layers of at least one unit")
        if any(units < 1 for units in self.critic_head):
            raise UserError(f"{self._flag('critic_head')} must be layers of at least one unit")

    def _flag(self, name: str) -> str:
        return f"algo.{name.replace('_', '-')}={getattr(self, name)}"

    def _check_combinations(self) -> None:
        if self.horizon and self.command == "advantage":
            raise UserError(
                "algo.horizon does not go with algo.command=advantage: an advantage is of a single transition"
            )
        if self.command_source == "percentile" and self.horizon:
            raise UserError("algo.command-source=percentile gives no horizon: use --algo.no-horizon")
        if self.command_source == "percentile" and self.command == "advantage" and self.critic == "joint":
            raise UserError(
                "algo.command-source=percentile needs algo.critic=separate: a joint critic's advantages are not stored"
            )
        if self.command_source in ("uniform", "episode") and self.command == "advantage":
            raise UserError(
                f"algo.command-source={self.command_source} is of returns: with advantages use percentile or maximum"
            )
        if not self.fixed_command and self.command == "return-to-go" and self.discount == 0:
            raise UserError("algo.discount=0 makes a return-to-go undefined after the first step: set it above 0")

    @property
    def width(self) -> int:
        """Numbers in a command."""
        return 2 if self.horizon else 1

    def check_command(self, command: tuple[float, ...]) -> None:
        """Raise UserError for a command that agents of this algorithm cannot follow."""
        names = ["a return" if self.command != "advantage" else "an advantage", "a number of steps"]
        if len(command) != self.width:
            wanted = " and ".join(names[: self.width])
            raise UserError(
                f"a command of this agent is {wanted}: {self.width} number{'s' * (self.width > 1)}, not {len(command)}"
            )
        if not all(math.isfinite(x) for x in command):
            raise UserError(f"a command must be made of finite numbers, not {', '.join(map(str, command))}")
        if self.max_return is not None and command[0] > self.max_return:
            raise UserError(
                f"a desired return of {command[0]:g} is above algo.max-return={self.max_return:g}, the highest that "
                "was trained"
            )
        if self.horizon and command[1] < 1:
            raise UserError(f"a desired horizon of {command[1]:g} steps is too short: it must be at least 1")

    def command_distribution(self, table: EpisodeTable, labels: NDArray[Any]) -> CommandDistribution:
        """The distribution of commands, given the episodes held and the labels of all transitions."""
        discounted = self.command == "return-to-go" and self.discount < 1
        returns = table.discounted_return if discounted else table.episode_return
        if self.command_source == "percentile":
            among = returns if self.command == "return" else labels
            percentile = [np.percentile(among, self.command_percentile)] if len(among) else [0.0]
            return command_distribution(np.array(percentile))
        if self.command_source == "maximum":
            latest = returns[-LATEST_EPISODES:]
            horizon = [table.length[-LATEST_EPISODES:].mean()] if self.horizon else []
            noise = np.array([latest.std(), *(0.0 for _ in horizon)])
            return command_distribution(np.array([latest.max(), *horizon]), noise=noise)
        top = top_episodes(table.rank_score, self.command_episodes, self.distinct_returns)
        pairs = np.stack([returns[top], table.length[top].astype(np.float64)], 1)[:, : self.width]
        std = np.array([returns[top].std(), 0.0])[: self.width]
        if self.command_source == "uniform":
            mean = pairs.mean(0)
            mean[1:] = np.round(mean[1:])
            return command_distribution(mean, spread=std)
        return command_distribution(pairs, spread=self.return_increment * std)

    def replay_builder(self, num_streams: int) -> EpisodesBuilder:
        refresh = None
        if self.command == "advantage":
            refresh = CriticRefresh(self.critic_period, store=self.critic == "separate")
        return EpisodesBuilder(
            self.replay,
            streams=num_streams,
            discount=self.discount,
            burn_in=self.burn_in,
            command_distribution=self.command_distribution,
            needs_returns_to_go=self.command_source == "percentile" and self.command == "return-to-go",
            critic_refresh=refresh,
        )

    def explorer(self, num_envs: int) -> Explorer:
        return FixedExploration(torch.ones(num_envs))

    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> ReturnConditionedAgent:
        if self.normalise and spec.is_image:
            raise UserError(f"algo.normalise is for vector observations, but {spec.name} has images")
        agent = ReturnConditionedAgent(self, spec, net, core)
        whole_episodes = self.replay.sequence_length is None and not agent.torso.memoryless
        if net.frame_stack - 1 > self.burn_in and not whole_episodes:
            raise UserError(
                f"algo.burn-in={self.burn_in} steps do not fill net.frame-stack={net.frame_stack}: "
                f"raise it to {net.frame_stack - 1}"
            )
        return agent

    def learner(self, agent: Agent, total_steps: int) -> ReturnConditionedLearner:
        assert isinstance(agent, ReturnConditionedAgent)
        return ReturnConditionedLearner(self, agent, total_steps)
