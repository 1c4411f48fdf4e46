"""The actor: steps environments with an agent and records trajectories."""

import torch
from torch import Tensor

from bestiary import tree
from bestiary.acting.compiled import compiled_actor
from bestiary.algos.base import Agent
from bestiary.algos.exploration import Explorer
from bestiary.envs.env_batch import EnvBatch
from bestiary.types import Episode, Snapshot, State, TimeStep, Trajectory

Acted = tuple[TimeStep, Tensor, dict[str, Tensor]]  # a time step, the actions chosen at it, and what is kept with them


def act(
    agent: Agent, step: TimeStep, state: State, explorer: Explorer | None, rng: torch.Generator
) -> tuple[Acted, State]:
    """Choose actions at one time step; also returns the recurrent state after it. Every agent acts through here.

    The agent resets the state of environments where `is_first` is True. Without an explorer the best action is chosen.
    """
    step = tree.to_device(step, rng.device)
    explore = None if explorer is None else explorer(step)
    action, aux, state = agent.act(step, state, explore, rng)
    return (step, action, aux), state


class Actor:
    """Steps a batch of environments with an agent; `unroll()` returns the trajectory of the next T steps.

    The last step of a trajectory, with the action chosen at it, is the first step of the next one (the overlapping
    step). Without an explorer the best action is chosen.
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
        self.current: Acted | None = None  # the latest step
        self.state_before: State = ()  # recurrent state before that step
        self.state: State = ()  # recurrent state after it
        self.episode_info: dict[str, Tensor] = {}  # name -> [B], of the running episodes
        self.compiled_actor = compiled_actor(self)  # None if environments, explorer or agent cannot be compiled

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        if version != self.version:
            self.agent.load_state_dict(weights)
            self.version = version

    @torch.no_grad()
    def unroll(self) -> tuple[Trajectory, list[Episode]]:
        if self.current is None:
            self.state = self.agent.initial_state(self.env_batch.num_envs)
            self._act(self.env_batch.reset())
        assert self.current is not None
        if self.compiled_actor is not None:
            return self.compiled_actor.unroll(self.length)
        # a copy, because a core may write into its state while it acts
        steps, start, episodes = [self.current], tree.map(torch.clone, self.state_before), []
        for _ in range(self.length):
            step, ended = self.env_batch.step(self.current[1])
            episodes += [self._with_info(e) for e in ended] if self.episode_info else ended
            self._act(step)
            steps.append(self.current)
        step, action, aux = tree.stack(steps)
        version = torch.full((self.env_batch.num_envs,), self.version)
        return Trajectory(step, action, aux, start, version), episodes

    def _act(self, step: TimeStep) -> None:
        self.state_before = self.state
        self.current, self.state = act(self.agent, step, self.state_before, self.explorer, self.rng)
        self._update_info(self.current[0], self.current[2])

    def _update_info(self, step: TimeStep, aux: dict[str, Tensor]) -> None:
        """Store the agent's numbers about an episode, from its first step, until the episode ends."""
        for name, value in self.agent.episode_info(aux).items():
            self.episode_info[name] = torch.where(step.is_first, value, self.episode_info.get(name, value))

    def _with_info(self, episode: Episode) -> Episode:
        return episode._replace(info={name: value[episode.slot].item() for name, value in self.episode_info.items()})

    def state_dict(self) -> Snapshot:
        """Everything that determines the next step."""
        if self.current is None:
            return {"rng": self.rng.get_state(), "explorer": self.explorer.state_dict() if self.explorer else {}}
        step, action, aux = self.current
        return {
            "rng": self.rng.get_state(),
            "explorer": self.explorer.state_dict() if self.explorer else {},
            "current": [tuple(step), action, aux],
            "state_before": self.state_before,
            "state": self.state,
            "episode_info": torch.stack([*self.episode_info.values()], 1) if self.episode_info else torch.zeros(0, 0),
            "env_batch": self.env_batch.state_dict(),
        }

    def load_state_dict(self, state: Snapshot) -> None:
        self.rng.set_state(state["rng"].cpu())
        if self.explorer is not None:
            self.explorer.load_state_dict(state.get("explorer", {}))
        if "current" not in state:
            return
        step, action, aux = tree.map(lambda x: x.to(self.device), state["current"])
        self.current = (TimeStep(*step), action, aux)
        states = state["state_before"], state["state"]
        self.state_before, self.state = tree.map(lambda x: x.to(self.device), states)
        names = self.agent.episode_info(aux)
        if "episode_info" in state and len(names) == state["episode_info"].shape[1]:
            self.episode_info = dict(zip(names, state["episode_info"].to(self.device).unbind(1), strict=True))
        self.env_batch.load_state_dict(state["env_batch"])
