"""Compiled acting: unrolls of small networks in `BatchedEnv`s that run in compiled code instead of PyTorch.

The actor uses it if its environments and its agent support it (`compiled_actor`). The trajectories are those of the
ordinary loop: the same random numbers select among the same network outputs, up to rounding.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from bestiary.algos.exploration import CountBasedExploration, FixedExploration
from bestiary.envs.batched import VectorEnvBatch
from bestiary.envs.env_batch import VectorStep
from bestiary.ops import interpreter
from bestiary.ops.program import Program, flatten_state, unflatten_state
from bestiary.types import Episode, TimeStep, Trajectory

if TYPE_CHECKING:
    from bestiary.acting.actor import Actor

EMPTY = np.zeros(0, bool)
NO_STEP = VectorStep(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)
MAX_PARAMETERS = 200_000  # for larger networks, matrix products over all environments at once are faster


class CompiledActor:
    """Unrolls an actor's agent in its environments with the interpreter of `ops.interpreter`."""

    def __init__(self, actor: "Actor", env_batch: VectorEnvBatch, program: Program, output_at: int) -> None:
        self.actor, self.env_batch = actor, env_batch
        self.program, self.output_at = program, output_at
        self.code = program.instructions()
        self.scratch = np.zeros(program.scratch_size, np.float32)
        self.version = -1
        self.weights = np.zeros(0, np.float32)
        self.scale = np.float32(1 / 255 if env_batch.spec.obs_dtype == torch.uint8 else 1)
        explorer = actor.explorer
        self.output_key = actor.agent.output_key
        self.samples = explorer is not None and actor.agent.action_selection == "sample"
        self.counts, self.count_epsilon = np.zeros(0, np.int64), 0.0
        self.hash_keys = np.zeros(1, np.uint64)
        if isinstance(explorer, CountBasedExploration):
            self.counts, self.count_epsilon = explorer.counts, explorer.scale
            self.hash_keys = explorer.hash_keys_for(int(np.prod(env_batch.spec.obs_shape)))

    def unroll(self, length: int) -> tuple[Trajectory, list[Episode]]:
        """The compiled form of `Actor.unroll`, once the first time step has been acted on."""
        actor, env = self.actor, self.env_batch.env
        assert actor.current is not None
        if self.version != actor.version:
            self.weights, self.version = self.program.load_weights(), actor.version
        B, A = self.env_batch.num_envs, self.env_batch.spec.num_actions
        T, (first_step, first_action, first_aux) = length + 1, actor.current
        first_obs = first_step.obs.numpy()
        obs = np.empty((T, *first_obs.shape), first_obs.dtype)
        reward, action = np.zeros((T, B)), np.zeros((T, B), np.int64)
        terminated, truncated, first = np.zeros((3, T, B), bool)
        prev, output = np.zeros((T, B), np.int64), np.zeros((T, B, A), np.float32)
        obs[0], action[0] = first_obs, first_action.numpy()
        if self.output_key:
            output[0] = first_aux[self.output_key].numpy()
        noise, epsilon = self._random_numbers(length)
        memory = flatten_state(actor.state, B)
        before, flat, episodes = memory, obs.reshape(T, B, -1), []
        recorded, last = 1, NO_STEP  # steps before `recorded` are in the episode statistics
        for t in range(1, T):
            first[t] = env._ended
            if recorded < t and first[t].any():
                self.env_batch.record_without_resets(reward[recorded:t], last)
            success = env.step_into(action[t - 1], obs[t], reward[t], terminated[t], truncated[t])
            prev[t] = np.where(first[t], 0, action[t - 1])
            if t == length:
                before = memory.copy()
            interpreter.act(
                self.code, self.weights, self.scratch, memory, flat[t], self.scale, reward[t], first[t], prev[t],
                output[t], self.output_at, noise[t - 1], epsilon, self.counts, self.count_epsilon, self.hash_keys,
                self.samples, action[t],
            )  # fmt: skip
            last = VectorStep(obs[t], reward[t], terminated[t], truncated[t], first[t], success=success)
            if first[t].any():
                episodes += self.env_batch.record(last)
                recorded = t + 1
        if recorded < T:
            self.env_batch.record_without_resets(reward[recorded:], last)

        steps = TimeStep(*(torch.from_numpy(x) for x in (obs, prev, reward.astype(np.float32), first, terminated)))
        for entries, first_entry in zip(steps, first_step, strict=True):
            entries[0] = first_entry
        aux = {self.output_key: torch.from_numpy(output)} if self.output_key else {}
        actions = torch.from_numpy(action)
        start = actor.state_before
        final = TimeStep(*(x[-1] for x in steps))
        actor.current = (final, actions[-1], {k: v[-1] for k, v in aux.items()})
        actor.state_before, actor.state = unflatten_state(before, start), unflatten_state(memory, start)
        version = torch.full((B,), actor.version)
        return Trajectory(steps, actions, aux, start, version), episodes

    def _random_numbers(self, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The random numbers that the ordinary loop would generate, step by step, and epsilon per environment."""
        actor, B = self.actor, self.env_batch.num_envs
        epsilon = np.zeros(B, np.float32)
        if actor.explorer is None:
            return np.ones((length, 2, B), np.float32), epsilon
        if self.samples:
            actions = self.env_batch.spec.num_actions
            return torch.empty(length, B, actions).exponential_(generator=actor.rng).numpy(), epsilon
        noise = torch.rand(length, 2, B, generator=actor.rng).numpy()
        epsilon[:] = actor.agent.epsilon  # type: ignore
        if isinstance(actor.explorer, FixedExploration):
            epsilon = np.maximum(epsilon, actor.explorer.values.numpy())
        return noise, epsilon


def compiled_actor(actor: "Actor") -> CompiledActor | None:
    """The compiled form of this actor's unroll; None if its environments, explorer or agent have none."""
    env_batch, spec = actor.env_batch, actor.env_batch.spec
    if actor.device.type != "cpu" or not isinstance(env_batch, VectorEnvBatch):
        return None
    if not isinstance(actor.explorer, FixedExploration | CountBasedExploration | None):
        return None
    if sum(p.numel() for p in actor.agent.parameters()) > MAX_PARAMETERS:
        return None
    program = Program(spec)
    output_at = actor.agent.compile_to(program)
    return None if output_at is None else CompiledActor(actor, env_batch, program, output_at)
