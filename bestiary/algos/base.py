"""What every algorithm promises."""

import math
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bestiary.algos.exploration import Explorer
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net
from bestiary.ops.collective import SINGLE_PROCESS, Collective
from bestiary.ops.program import Program
from bestiary.replay.base import ReplayBuilder
from bestiary.types import Batch, Snapshot, Spec, State, TimeStep, Update


class Agent(nn.Module):
    """What actors run; its state_dict is all that travels back to them."""

    picks: Literal["sample", "epsilon_greedy"] = "sample"  # how `act` chooses by what the network answers
    keeps: str | None = None  # the name under which that answer is kept in aux

    def initial_state(self, batch_size: int) -> State:
        raise NotImplementedError

    def compile_to(self, program: Program) -> int | None:
        """The network as instructions for compiled acting: where its answer is; None: it has none."""
        return None

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        """step is [B, ...] -> action [B], aux, state. explore is [B], in [0, 1]; None: play the best move."""
        raise NotImplementedError

    def set_command(self, command: tuple[float, ...]) -> None:
        """Fix the command, for example a desired return and horizon; (): commands as they were learnt."""
        raise no_commands("--command")

    def episode_info(self, aux: dict[str, Tensor]) -> dict[str, Tensor]:
        """Numbers [B] that describe an episode, from the aux of its first step: they become `Episode.info`."""
        return {}


class AgentWrapper(Agent):
    """Another agent, with something done on the way: subclasses write `act`."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent

    def initial_state(self, batch_size: int) -> State:
        return self.agent.initial_state(batch_size)

    def episode_info(self, aux: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.agent.episode_info(aux)


def load_weights(agent: Agent, weights: dict[str, Tensor], other: str) -> None:
    """Weights into the network they were learnt in; `other` says than what it would be another one."""
    try:
        agent.load_state_dict(weights)
    except RuntimeError as e:
        reason = str(e).splitlines()[1].strip() if "\n" in str(e) else str(e)
        raise UserError(f"the checkpoint is of another network {other}: {reason}") from None


class Diverged(UserError):
    """Learning produced a number that is not one. The weights from before that update are intact."""


def apply_gradient(
    loss: Tensor,
    module: nn.Module | list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    grad_norm: float | None,
    update: int,
    collective: Collective = SINGLE_PROCESS,
) -> Tensor:
    """One step down the loss, its gradient clipped to a norm (None: as it is). Returns the norm before.

    To look up a module's parameters takes longer than an update of a small network: that may be done once.
    Of several learners each has its part of the loss: all see the same sums, so all step, or none does.
    """
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    found = list(module.parameters()) if isinstance(module, nn.Module) else module
    loss = collective.all_reduce_gradients(loss, found)
    norm = nn.utils.clip_grad_norm_(found, math.inf if grad_norm is None else grad_norm)
    if not (torch.isfinite(loss) and torch.isfinite(norm)):
        raise Diverged(
            f"update {update} gave a loss of {loss.item()} and a gradient norm of {norm.item()}; "
            "it was not applied: lower the learning rate or clip the rewards"
        )
    optimizer.step()
    return norm.detach()


class Learner(Protocol):
    """Owns targets, critics and optimisers, and never ships them.

    One that can be one of several also has `together`, `ALONE` at first, and asks it what all of them have.
    """

    updates: int

    @property
    def agent(self) -> Agent: ...

    def update(self, batch: Batch) -> Update: ...
    def state_dict(self) -> Snapshot: ...
    def load_state_dict(self, state: Snapshot) -> None: ...


class AlgoConfig(Protocol):
    """An algorithm is a frozen dataclass of numbers that builds an agent and its learner."""

    @property
    def unroll(self) -> int: ...
    def replay_builder(self, num_streams: int) -> ReplayBuilder: ...
    def explorer(self, num_envs: int) -> Explorer: ...
    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> Agent: ...
    def learner(self, agent: Agent, total_steps: int) -> Learner: ...


@runtime_checkable
class FollowsCommands(Protocol):
    """An algorithm whose agents follow commands, such as a desired return and horizon."""

    def check_command(self, command: tuple[float, ...]) -> None:
        """Raise UserError for a command that its agents cannot follow."""
        ...


def check_command(algo: AlgoConfig, command: tuple[float, ...], flag: str) -> None:
    """Raise UserError if agents of this algorithm cannot follow the command that `flag` gave."""
    if not isinstance(algo, FollowsCommands):
        raise no_commands(flag)
    algo.check_command(command)


def no_commands(flag: str) -> UserError:
    return UserError(f"{flag} is for agents that follow commands (Udrl, Rcp); this one does not")
