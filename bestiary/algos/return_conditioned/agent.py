"""The agent that acts on a command, such as a desired return and horizon, and updates the command as it goes."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bestiary.algos.base import Agent
from bestiary.algos.return_conditioned.networks import NETWORKS
from bestiary.cores.base import CoreConfig
from bestiary.nets import Net, Torso
from bestiary.ops.commands import CommandDistribution, command_distribution, next_command
from bestiary.ops.policy import sample
from bestiary.types import Spec, State, TimeStep

if TYPE_CHECKING:
    from bestiary.algos.return_conditioned.config import ReturnConditioned


class ReturnConditionedAgent(Agent):
    """A policy pi(a | s, command).

    The command is part of the recurrent state: it is sampled at the first step of an episode and updated after every
    step. The command distribution, the statistics of observations and the inverse temperature are buffers, so they
    travel with the weights to actors and into checkpoints.
    """

    pool: Tensor  # command distribution
    spread: Tensor
    noise: Tensor
    untrained: Tensor  # True before the first update, while exploration is uniformly random
    max_inverse_temperature: Tensor
    obs_mean: Tensor
    obs_std: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, cfg: "ReturnConditioned", spec: Spec, net: Net, core: CoreConfig) -> None:
        super().__init__()
        self.cfg, self.spec, self.net, self.core = cfg, spec, net, core
        self.torso = Torso(spec, net, core)
        self.policy = NETWORKS[cfg.network](self.torso.width, cfg.width, cfg.head, spec.num_actions)
        pool_size = cfg.command_episodes if cfg.command_source == "episode" else 1
        self.register_buffer("pool", torch.zeros(pool_size, cfg.width))
        self.register_buffer("spread", torch.zeros(cfg.width))
        self.register_buffer("noise", torch.zeros(cfg.width))
        self.register_buffer("untrained", torch.tensor(True))
        self.register_buffer("max_inverse_temperature", torch.tensor(1.0))
        size = spec.obs_shape if cfg.normalise else (0,)
        self.register_buffer("obs_mean", torch.zeros(size))
        self.register_buffer("obs_std", torch.ones(size))
        self.register_buffer("shift", torch.tensor(cfg.command_shift), persistent=False)
        self.register_buffer("scale", torch.tensor(cfg.command_scale), persistent=False)

    def initial_state(self, batch_size: int) -> State:
        """Command, inverse temperature, and the core's recurrent state."""
        like = self.pool
        return (
            like.new_zeros(batch_size, self.cfg.width),
            like.new_ones(batch_size),
            *self.torso.initial_state(batch_size),
        )

    def set_command_distribution(self, distribution: CommandDistribution) -> None:
        """Sample commands from this distribution; a smaller pool than the agent's is repeated."""
        at = torch.arange(len(self.pool), device=self.pool.device) % len(distribution.pool)
        self.pool.copy_(distribution.pool.to(at.device)[at])
        self.spread.copy_(distribution.spread)
        self.noise.copy_(distribution.noise)

    def set_command(self, command: tuple[float, ...]) -> None:
        if command:
            self.cfg.check_command(command)
            self.set_command_distribution(command_distribution(np.array(command)))

    def episode_info(self, aux: dict[str, Tensor]) -> dict[str, Tensor]:
        names = ("desired_return", "desired_horizon")[: self.cfg.width]
        return dict(zip(names, aux["command"].unbind(-1), strict=True))

    def normalise(self, step: TimeStep) -> TimeStep:
        """Observations in standard deviations from their mean, clipped to 5."""
        if not self.cfg.normalise:
            return step
        return step._replace(obs=((step.obs - self.obs_mean) / self.obs_std).clamp(-5, 5))

    def logits(self, h: Tensor, command: Tensor) -> Tensor:
        return self.policy(h, (command - self.shift) * self.scale)

    def sample_commands(self, explore: Tensor | None, count: int, rng: torch.Generator) -> Tensor:
        """[B, W]. Spread and noise, which ask for more than was reached, are added only while exploring."""
        uniform = torch.rand(count, 2, generator=rng, device=self.pool.device)
        normal = torch.randn(count, self.cfg.width, generator=rng, device=self.pool.device)
        command = self.pool[(uniform[:, 0] * len(self.pool)).long()]
        if explore is not None:
            exploring = (explore > 0).to(command.dtype)[:, None]
            command = command + exploring * (uniform[:, 1:] * self.spread + normal * self.noise)
        reward = command[:, :1] if self.cfg.max_return is None else command[:, :1].clamp(max=self.cfg.max_return)
        return torch.cat([reward, command[:, 1:]], 1)

    def update_command(self, command: Tensor, reward: Tensor) -> Tensor:
        cfg = self.cfg
        if cfg.fixed_command:
            return command
        max_return = float("inf") if cfg.max_return is None else cfg.max_return
        if cfg.command == "return-to-go":
            return next_command(command, reward, cfg.discount, max_return)
        return next_command(command, torch.zeros_like(reward), 1.0, max_return)  # only the horizon decreases

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        """explore > 0: commands with spread and noise, and a random inverse temperature in each episode."""
        cfg, (command, inverse_temperature, *core_state) = self.cfg, state
        new_command = self.sample_commands(explore, len(command), rng)
        resampled = step.is_first[:, None] | torch.tensor(cfg.resample_command, device=new_command.device)
        command = torch.where(resampled, new_command, self.update_command(command, step.reward))
        uniform = torch.rand(len(command), generator=rng, device=new_command.device)
        exponent = uniform if explore is None else torch.where(explore > 0, uniform, 0.0)
        inverse_temperature = torch.where(step.is_first, self.max_inverse_temperature**exponent, inverse_temperature)
        steps = TimeStep(*(x[None] for x in self.normalise(step)))
        h, core_state = self.torso(steps, tuple(core_state))
        logits = self.logits(h[0], command)
        if explore is None:
            action = logits.argmax(-1)
        else:
            uniformly = self.untrained & (explore > 0)
            action = sample(torch.where(uniformly[:, None], 0.0, logits * inverse_temperature[:, None]), rng)
        return action, {"command": command}, (command, inverse_temperature, *core_state)
