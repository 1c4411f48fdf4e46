"""The interfaces of an algorithm (settings, agent, learner), and the gradient step that all learners share."""
# pyright: reportUnknownMemberType=false

import math
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bestiary.algos.exploration import Explorer
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net, Torso
from bestiary.ops.collective import SINGLE_PROCESS, Collective
from bestiary.ops.program import Program
from bestiary.replay.base import ReplayBuilder
from bestiary.types import Batch, Snapshot, Spec, State, TimeStep, Update


class Agent(nn.Module):
    """What actors run. Its state_dict is all that learners send to actors."""

    action_selection: Literal["sample", "epsilon_greedy"] = "sample"  # how `act` chooses by the network's output
    output_key: str | None = None  # the key of `aux` under which `act` records that output; None: it does not

    def initial_state(self, batch_size: int) -> State:
        raise NotImplementedError

    def compile_to(self, program: Program) -> int | None:
        """Write the network as instructions for compiled acting; returns where its output is. None: not supported."""
        return None

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        """step is [B, ...] -> action [B], aux, state. explore is [B], in [0, 1]; None: the greedy action."""
        raise NotImplementedError

    def set_command(self, command: tuple[float, ...]) -> None:
        """Fix the command, for example a desired return and horizon; (): commands as they were learnt."""
        raise no_commands("--command")

    def episode_info(self, aux: dict[str, Tensor]) -> dict[str, Tensor]:
        """Numbers [B] that describe an episode, from the aux of its first step: they become `Episode.info`."""
        return {}


class AgentWrapper(Agent):
    """An agent that changes how another one acts: subclasses write `act`."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent

    def initial_state(self, batch_size: int) -> State:
        return self.agent.initial_state(batch_size)

    def episode_info(self, aux: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.agent.episode_info(aux)


def load_weights(agent: Agent, weights: dict[str, Tensor], other: str) -> None:
    """Load weights into an agent. The error of weights that do not fit says "of another network {other}"."""
    try:
        agent.load_state_dict(weights)
    except RuntimeError as e:
        reason = str(e).splitlines()[1].strip() if "\n" in str(e) else str(e)
        raise UserError(f"the checkpoint is of another network {other}: {reason}") from None


class Diverged(UserError):
    """Loss or gradient is NaN or infinite. The weights from before that update are intact."""


def apply_gradient(
    loss: Tensor,
    module: nn.Module | list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    grad_norm: float | None,
    update: int,
    collective: Collective = SINGLE_PROCESS,
) -> Tensor:
    """One step of gradient descent, the gradient clipped to a norm (None: not clipped). Returns the norm before.

    Several learners each have a part of the loss. All see the same sums, so all take the step, or none does. `module`
    may be a list of parameters: looking them up takes longer than an update of a small network.
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


def core_parameter_groups(module: nn.Module, core_lr: float | None) -> list[dict[str, Any]]:
    """All parameters for an optimiser; those of cores with a learning rate of their own, where one is given."""
    core = [p for m in module.modules() if isinstance(m, Torso) for p in m.core.parameters()]
    if core_lr is None or not core:
        return [{"params": list(module.parameters())}]
    in_core = {id(p) for p in core}
    rest = [p for p in module.parameters() if id(p) not in in_core]
    return [{"params": rest}, {"params": core, "lr": core_lr}]


def normalized_weights(weight: Tensor, collective: Collective = SINGLE_PROCESS) -> Tensor:
    """[..., T, B]: weights that sum to 1 over time and batch, of all learners together; all zero if they sum to 0."""
    total = collective.all_reduce_sum(weight.sum((-2, -1), keepdim=True))
    return weight / total.clamp(min=torch.finfo(weight.dtype).tiny)


class Learner(Protocol):
    """Owns target networks, critics and optimisers; only the agent's weights are sent to actors.

    A learner that can be one of several also has an attribute `collective`, at first `SINGLE_PROCESS`.
    """

    updates: int

    @property
    def agent(self) -> Agent: ...

    def update(self, batch: Batch) -> Update: ...
    def state_dict(self) -> Snapshot: ...
    def load_state_dict(self, state: Snapshot) -> None: ...


class AlgoConfig(Protocol):
    """The settings of an algorithm, a frozen dataclass, which builds its replay, exploration, agent and learner."""

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
