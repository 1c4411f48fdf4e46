"""The agent of a run as a policy for one's own code: `policy = bestiary.load(RUN)`, `action = policy.act(obs)`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bestiary.acting.actor import act
from bestiary.acting.episodes import explore_rates
from bestiary.algos.base import Agent
from bestiary.algos.exploration import Explorer
from bestiary.config.experiment import Experiment
from bestiary.config.machine import choose_device
from bestiary.envs.base import for_evaluation
from bestiary.errors import UserError
from bestiary.runtime.evaluation import build_agent
from bestiary.seeding import ACTIONS, EVAL, derive, substream
from bestiary.training.run import Run
from bestiary.types import Mode, Spec, State, TimeStep


class Policy:
    """An agent that chooses actions for environments which the caller steps.

    It holds what an agent needs besides the observation: the recurrent state, the previous action, and whether an
    episode starts. One observation gives one action; a batch of observations gives an array of actions, and every
    entry of the batch is an environment stream of its own. It acts exactly as `bestiary.evaluate` with the same mode.
    """

    def __init__(self, agent: Agent, spec: Spec, mode: Mode, rng: torch.Generator) -> None:
        self.agent, self.spec, self.rng = agent, spec, rng
        self.mode: Mode = mode
        self.batch_size: int | None = None  # None: single observations, or no observation yet
        self.started = False
        self.state: State = ()
        self.explorer: Explorer | None = None
        self.prev_action = torch.zeros(0)
        self.is_first = torch.zeros(0)

    def reset(self, mask: ArrayLike | None = None) -> None:
        """Start new episodes: forget the recurrent state and the previous action.

        `mask` [B]: only in these environments of a batch. Without it in all, and the batch size may change.
        """
        if mask is None:
            self.started = False
            return
        chosen = np.asarray(mask)
        if not self.started or self.batch_size is None or chosen.shape != (self.batch_size,) or chosen.dtype != bool:
            batch = f"a batch of {self.batch_size}" if self.started and self.batch_size else "no batch of observations"
            raise UserError(f"reset(mask) needs a boolean for each environment, but {batch} was given before")
        self.is_first = self.is_first | torch.from_numpy(chosen)

    @torch.no_grad()
    def act(
        self, obs: ArrayLike, reward: ArrayLike = 0.0, is_first: ArrayLike | None = None
    ) -> int | NDArray[np.int64]:
        """The action for an observation, or [B] actions for a batch of observations [B, ...].

        `reward` is the unclipped reward of the previous action, a number or [B]. `is_first` is True where an episode
        starts with this observation, which is the same as calling `reset` before.
        """
        observation, batch_size = self._checked(obs)
        n = 1 if batch_size is None else batch_size
        if not self.started:
            self.state = self.agent.initial_state(n)
            self.prev_action = torch.zeros(n, dtype=torch.int64)
            self.is_first = torch.ones(n, dtype=torch.bool)
            self.explorer = explore_rates(self.mode, n)
            self.started, self.batch_size = True, batch_size
        if is_first is not None:
            self.is_first = self.is_first | self._entries(is_first, n, "is_first", torch.bool)
        step = TimeStep(
            obs=observation,
            prev_action=self.prev_action.masked_fill(self.is_first, 0),
            reward=self._entries(reward, n, "reward", torch.float32).masked_fill(self.is_first, 0),
            is_first=self.is_first,
            is_terminal=torch.zeros(n, dtype=torch.bool),
        )
        (_, action, _), self.state = act(self.agent, step, self.state, self.explorer, self.rng)
        self.prev_action, self.is_first = action.cpu(), torch.zeros(n, dtype=torch.bool)
        return int(action) if batch_size is None else self.prev_action.numpy().copy()

    def _checked(self, obs: ArrayLike) -> tuple[Tensor, int | None]:
        """An observation as [B, ...], and its batch size (None: a single observation)."""
        x, shape = np.asarray(obs), self.spec.obs_shape
        if x.shape != shape and (x.ndim != len(shape) + 1 or x.shape[1:] != shape or not len(x)):
            raise UserError(f"{self.spec.name} has observations of shape {shape}, or [B, ...] of them, not {x.shape}")
        batch_size = None if x.shape == shape else len(x)
        if self.started and batch_size != self.batch_size:
            given, before = (
                "one observation" if n is None else f"a batch of {n}" for n in (batch_size, self.batch_size)
            )
            raise UserError(f"{given} follows {before}: call reset() before the number of environments changes")
        dtype: Any = np.uint8 if self.spec.obs_dtype == torch.uint8 else np.float32
        if not np.can_cast(x.dtype, dtype, "same_kind"):
            raise UserError(f"{self.spec.name} has observations of type {np.dtype(dtype)}, not {x.dtype}")
        batch = np.array(x, dtype)
        return torch.from_numpy(batch[None] if batch_size is None else batch), batch_size

    def _entries(self, value: ArrayLike, n: int, name: str, dtype: torch.dtype) -> Tensor:
        """A number for every environment, or [B] numbers, as a tensor [B]."""
        x = np.asarray(value)
        if x.shape not in ((), (n,)):
            raise UserError(f"{name} must be a number or have shape ({n},), not {x.shape}")
        return torch.as_tensor(np.array(np.broadcast_to(x, (n,))), dtype=dtype)


def load(
    run: Run | Path | str,
    checkpoint: str | int | None = None,
    mode: Mode = "greedy",
    seed: int = 0,
    device: str = "auto",
    command: tuple[float, ...] | None = None,
) -> Policy:
    """Load the agent of a run as a `Policy`. Needs only the run directory.

    `checkpoint`: frames of a checkpoint, or "last", or "best"; None: the last. `mode`: "greedy" chooses the best
    action, "sampled" samples from the policy with `seed`. `command` is for return-conditioned agents: desired return
    and horizon; None: as in the run's evaluations; (): commands as the agent learnt them.
    """
    if mode not in ("greedy", "sampled"):
        raise UserError(f"mode={mode!r} must be 'greedy' or 'sampled'")
    run = run if isinstance(run, Run) else Run(run)
    experiment = run.experiment()
    saved = run.load(None if checkpoint is None else str(checkpoint))
    where = choose_device(device)
    stream = substream(EVAL, seed, 0)  # as in `bestiary.evaluate` with this seed
    spec = environment_spec(experiment, stream)
    with torch.random.fork_rng(devices=[]):  # building a network must not advance the caller's random numbers
        agent = build_agent(experiment, spec, saved.weights, where, command)
    return Policy(agent, spec, mode, torch.Generator(where).manual_seed(derive(experiment.seed, stream, ACTIONS)))


def environment_spec(experiment: Experiment, stream: int) -> Spec:
    """The properties of an experiment's environment."""
    env_batch = for_evaluation(experiment.env).make(1, experiment.seed, stream, 1)
    try:
        return env_batch.spec
    finally:
        env_batch.close()
