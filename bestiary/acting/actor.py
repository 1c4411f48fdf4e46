"""Plays many environments at once and writes down what happened."""

import torch

from bestiary import tree
from bestiary.acting.compiled import compiled_actor
from bestiary.algos.base import Agent
from bestiary.algos.exploration import Explorer
from bestiary.envs.env_batch import EnvBatch
from bestiary.types import Episode, Snapshot, State, TimeStep, Trajectory


class Actor:
    """`unroll()` plays T moves in every environment with the weights it was last given.

    The last row, with the action already chosen for it, opens the next trajectory. Without an explorer the best action
    is always taken.
    """

    def __init__(
        self, env_batch: EnvBatch, agent: Agent, explorer: Explorer | None, unroll: int, seed: int, device: torch.device
    ) -> None:
        self.env_batch = env_batch
        self.agent = agent.to(device).eval()
        self.length = unroll
        self.device = device
        self.rng = torch.Generator(device).manual_seed(seed)
        self.version = 0
        self.explorer = explorer
        self.row: tuple[TimeStep, torch.Tensor, dict[str, torch.Tensor]] | None = None
        self.before: State = ()  # memory just before that row
        self.after: State = ()
        self.asked = torch.zeros(env_batch.num_envs, 0)  # with what command the running episodes began
        self.compiled_actor = compiled_actor(self)  # None where a part of it cannot be compiled

    def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        if version != self.version:
            self.agent.load_state_dict(weights)
            self.version = version

    @torch.no_grad()
    def unroll(self) -> tuple[Trajectory, list[Episode]]:
        if self.row is None:
            self.after = self.agent.initial_state(self.env_batch.num_envs)
            self._act(self.env_batch.reset())
        assert self.row is not None
        if self.compiled_actor is not None:
            return self.compiled_actor.unroll(self.length)
        # a copy: a core may go on writing into its state while it acts
        rows, start, episodes = [self.row], tree.map(torch.clone, self.before), []
        for _ in range(self.length):
            step, ended = self.env_batch.step(self.row[1])
            episodes += [e._replace(asked=tuple(self.asked[e.slot].tolist())) for e in ended]
            self._act(step)
            rows.append(self.row)
        step, action, aux = tree.stack(rows)
        version = torch.full((self.env_batch.num_envs,), self.version)
        return Trajectory(step, action, aux, start, version), episodes

    def _act(self, step: TimeStep) -> None:
        step = tree.to_device(step, self.device)
        self.before = self.after
        explore = None if self.explorer is None else self.explorer(step)
        action, aux, self.after = self.agent.act(step, self.before, explore, self.rng)
        self.row = (step, action, aux)
        if "command" in aux:
            before = self.asked if self.asked.shape[1] else aux["command"]
            self.asked = torch.where(step.is_first[:, None], aux["command"], before)

    def state_dict(self) -> Snapshot:
        """Everything that decides the next row."""
        if self.row is None:
            return {"rng": self.rng.get_state(), "explorer": self.explorer.state_dict() if self.explorer else {}}
        step, action, aux = self.row
        return {
            "rng": self.rng.get_state(),
            "explorer": self.explorer.state_dict() if self.explorer else {},
            "row": [tuple(step), action, aux],
            "before": self.before,
            "after": self.after,
            "asked": self.asked,
            "world": self.env_batch.state_dict(),
        }

    def load_state_dict(self, state: Snapshot) -> None:
        self.rng.set_state(state["rng"].cpu())
        if self.explorer is not None:
            self.explorer.load_state_dict(state.get("explorer", {}))
        if "row" not in state:
            return
        step, action, aux = tree.map(lambda x: x.to(self.device), state["row"])
        self.row = (TimeStep(*step), action, aux)
        self.before, self.after = tree.map(lambda x: x.to(self.device), (state["before"], state["after"]))
        self.asked = state.get("asked", self.asked)  # not in checkpoints of 0.1
        self.env_batch.load_state_dict(state["world"])
