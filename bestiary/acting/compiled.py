"""Unrolls without PyTorch in the loop: for small networks on batched environments.

The actor asks once whether its world and agent allow it. The same rows come out as from the ordinary loop: the same
random numbers choose among the same values, up to rounding.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from bestiary.algos.exploration import Fixed, Novelty
from bestiary.envs.batched import VectorEnvBatch
from bestiary.envs.env_batch import VectorStep
from bestiary.ops import interpreter
from bestiary.ops.program import Program, flatten, unflatten
from bestiary.types import Episode, TimeStep, Trajectory

if TYPE_CHECKING:
    from bestiary.acting.actor import Actor

NONE = np.zeros(0, bool)
NOTHING = VectorStep(NONE, NONE, NONE, NONE, NONE)
SMALL = 200_000  # weights: above, matrix products over all environments at once are faster


class CompiledActor:
    """What an actor needs to unroll in compiled code, made from its agent and world."""

    def __init__(self, actor: "Actor", env_batch: VectorEnvBatch, program: Program, at: int) -> None:
        self.actor, self.env_batch = actor, env_batch
        self.program, self.at = program, at
        self.code = program.finish()
        self.scratch = np.zeros(program.scratch_size, np.float32)
        self.version = -1
        self.weights = np.zeros(0, np.float32)
        self.scale = np.float32(1 / 255 if env_batch.spec.obs_dtype == torch.uint8 else 1)
        explorer = actor.explorer
        self.keeps = actor.agent.keeps
        self.samples = explorer is not None and actor.agent.picks == "sample"
        self.counts, self.novelty = np.zeros(0, np.int64), 0.0
        self.odd = np.zeros(1, np.uint64)
        if isinstance(explorer, Novelty):
            self.counts, self.novelty = explorer.counts, explorer.chance
            self.odd = explorer.numbers(int(np.prod(env_batch.spec.obs_shape)))

    def unroll(self, length: int) -> tuple[Trajectory, list[Episode]]:
        """What `Actor.unroll` does once its first row is there."""
        actor, env = self.actor, self.env_batch.env
        assert actor.row is not None
        if self.version != actor.version:
            self.weights, self.version = self.program.load(), actor.version
        B, A = self.env_batch.num_envs, self.env_batch.spec.num_actions
        T, row = length + 1, actor.row
        opening = row[0].obs.numpy()
        obs = np.empty((T, *opening.shape), opening.dtype)
        reward, action = np.zeros((T, B)), np.zeros((T, B), np.int64)
        terminated, truncated, first = np.zeros((3, T, B), bool)
        prev, answer = np.zeros((T, B), np.int64), np.zeros((T, B, A), np.float32)
        obs[0], action[0] = opening, row[1].numpy()
        if self.keeps:
            answer[0] = row[2][self.keeps].numpy()

        # the numbers the ordinary loop would draw, row by row
        epsilon = np.zeros(B, np.float32)
        if actor.explorer is None:
            lots = np.ones((length, 2, B), np.float32)
        elif self.samples:
            lots = torch.empty(length, B, A).exponential_(generator=actor.rng).numpy()
        else:
            lots = torch.rand(length, 2, B, generator=actor.rng).numpy()
            epsilon[:] = actor.agent.epsilon  # type: ignore
            if isinstance(actor.explorer, Fixed):
                epsilon = np.maximum(epsilon, actor.explorer.values.numpy())
        memory = flatten(actor.after, B)
        before, flat, episodes = memory, obs.reshape(T, B, -1), []
        settled, raw = 1, NOTHING  # rows before this one are in the books
        for t in range(1, T):
            first[t] = env._ended
            if settled < t and first[t].any():
                self.env_batch.record_without_resets(reward[settled:t], raw)
            success = env.step_into(action[t - 1], obs[t], reward[t], terminated[t], truncated[t])
            prev[t] = np.where(first[t], 0, action[t - 1])
            if t == length:
                before = memory.copy()
            interpreter.act(
                self.code, self.weights, self.scratch, memory, flat[t], self.scale, reward[t], first[t], prev[t],
                answer[t], self.at, lots[t - 1], epsilon, self.counts, self.novelty, self.odd,
                self.samples, action[t],
            )  # fmt: skip
            raw = VectorStep(obs[t], reward[t], terminated[t], truncated[t], first[t], success=success)
            if first[t].any():
                episodes += self.env_batch.record(raw)
                settled = t + 1
        if settled < T:
            self.env_batch.record_without_resets(reward[settled:], raw)

        shown = TimeStep(*(torch.from_numpy(x) for x in (obs, prev, reward.astype(np.float32), first, terminated)))
        for whole, opened in zip(shown, row[0], strict=True):
            whole[0] = opened
        aux = {self.keeps: torch.from_numpy(answer)} if self.keeps else {}
        actions = torch.from_numpy(action)
        start = actor.before
        last = TimeStep(*(x[-1] for x in shown))
        actor.row = (last, actions[-1], {k: v[-1] for k, v in aux.items()})
        actor.before, actor.after = unflatten(before, start), unflatten(memory, start)
        version = torch.full((B,), actor.version)
        return Trajectory(shown, actions, aux, start, version), episodes


def compiled_actor(actor: "Actor") -> CompiledActor | None:
    """A compiled unroll for this actor, if its parts have one."""
    env_batch, spec = actor.env_batch, actor.env_batch.spec
    if actor.device.type != "cpu" or not isinstance(env_batch, VectorEnvBatch):
        return None
    if not isinstance(actor.explorer, Fixed | Novelty | None):
        return None
    if sum(p.numel() for p in actor.agent.parameters()) > SMALL:
        return None
    program = Program(spec)
    at = actor.agent.compile_to(program)
    return None if at is None else CompiledActor(actor, env_batch, program, at)
