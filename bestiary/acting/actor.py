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
        self.episode_info: dict[str, torch.Tensor] = {}  # name -> [B], of the running episodes
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
            episodes += [self._with_info(e) for e in ended] if self.episode_info else ended
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
        self._update_info(step, aux)

    def _update_info(self, step: TimeStep, aux: dict[str, torch.Tensor]) -> None:
        """Keep what the agent says at the first step of an episode until the episode ends."""
        for name, value in self.agent.episode_info(aux).items():
            self.episode_info[name] = torch.where(step.is_first, value, self.episode_info.get(name, value))

    def _with_info(self, episode: Episode) -> Episode:
        return episode._replace(info={name: value[episode.slot].item() for name, value in self.episode_info.items()})

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
            "episode_info": torch.stack([*self.episode_info.values()], 1) if self.episode_info else torch.zeros(0, 0),
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
        names = self.agent.episode_info(aux)
        if "episode_info" in state and len(names) == state["episode_info"].shape[1]:
            self.episode_info = dict(zip(names, state["episode_info"].to(self.device).unbind(1), strict=True))
        self.env_batch.load_state_dict(state["world"])
