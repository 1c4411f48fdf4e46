"""What every algorithm promises."""

from typing import Protocol

import torch
from torch import Tensor, nn

from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net
from bestiary.replay.base import ReplayConfig
from bestiary.types import Batch, Snapshot, Spec, State, TimeStep, Trajectory, Update


class Agent(nn.Module):
    """What actors run; its state_dict is all that travels back to them."""

    def initial_state(self, batch_size: int) -> State:
        raise NotImplementedError

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        """step is [B, ...] -> action [B], aux, state. explore is [B], a rung in [0, 1]; None: play the best move."""
        raise NotImplementedError


class Diverged(UserError):
    """Learning produced a number that is not one. The weights from before that update are intact."""


class Learner(Protocol):
    """Owns targets, critics and optimisers, and never ships them."""

    agent: Agent
    updates: int

    def update(self, batch: Batch) -> Update: ...
    def state_dict(self) -> Snapshot: ...
    def load_state_dict(self, state: Snapshot) -> None: ...


class AlgoConfig(Protocol):
    """An algorithm is a frozen dataclass of numbers that builds an agent and its learner."""

    @property
    def unroll(self) -> int: ...
    def replay(self, num_envs: int) -> ReplayConfig: ...
    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> Agent: ...
    def learner(self, agent: Agent, total_steps: int) -> Learner: ...
    def priorities(self, trajectory: Trajectory) -> Tensor | None: ...
