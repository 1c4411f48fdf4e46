"""A figure of one episode: observations, actions, rewards, and the recurrent state of the agent's core."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bestiary.acting.actor import act
from bestiary.algos.base import Agent
from bestiary.config.extras import require
from bestiary.config.machine import choose_device, cores
from bestiary.cores.base import Core
from bestiary.envs.env_batch import EnvBatch
from bestiary.errors import UserError
from bestiary.runtime.evaluation import build_agent
from bestiary.seeding import INSPECTION, substream
from bestiary.training.run import Run

UNITS_SHOWN = 64


class InspectedEpisode(NamedTuple):
    """An episode of T steps, and the core's state at each of them."""

    obs: Tensor  # [T, ...]
    action: Tensor  # [T]
    reward: Tensor  # [T] of the action before
    memory: dict[str, Tensor]  # name -> [T, n]


@torch.no_grad()
def play(agent: Agent, env_batch: EnvBatch, rng: torch.Generator, max_steps: int) -> InspectedEpisode:
    """One greedy episode. The core's inputs are recorded, and its states are computed from them afterwards."""
    core: Core = agent.torso.core  # type: ignore
    core_inputs: list[Tensor] = []
    hook = core.register_forward_pre_hook(lambda _, inputs: core_inputs.append(inputs[0]))
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        step, state = env_batch.reset(), agent.initial_state(1)
        while len(steps) < max_steps and not (steps and bool(step.is_first[0])):
            (_, action, _), state = act(agent, step, state, None, rng)
            steps.append((step.obs[0], action[0], step.reward[0]))
            step, _ = env_batch.step(action)
    finally:
        hook.remove()
    obs, action, reward = (torch.stack(column) for column in zip(*steps, strict=True))
    return InspectedEpisode(obs, action, reward, core.diagnostics(torch.cat(core_inputs)))


def inspect(
    run: Run | Path | str, checkpoint: str | None = None, seed: int = 0, max_steps: int = 400, out: Path | None = None
) -> Path:
    """Draw one greedy episode of a run's agent with its recurrent state. Writes inspect-FRAMES-SEED.png."""
    if max_steps < 2:
        raise UserError(f"max-steps={max_steps} must be at least 2")
    require("matplotlib", "plot")
    run = run if isinstance(run, Run) else Run(run)
    experiment = run.experiment()
    saved = run.load(checkpoint)
    device = choose_device("cpu")
    env_batch = experiment.env.make(1, experiment.seed, substream(INSPECTION, seed), cores())
    try:
        agent = build_agent(experiment, env_batch.spec, saved.weights, device)
        episode = play(agent, env_batch, torch.Generator().manual_seed(seed), max_steps)
    finally:
        env_batch.close()
    path = out or run.path / f"inspect-{saved.meta['frames']}-{seed}.png"
    title = f"{env_batch.spec.name}, {type(experiment.core).__name__}, {saved.meta['frames']:,} frames, seed {seed}"
    draw(episode, title, path)
    return path


def draw(episode: InspectedEpisode, title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    T = len(episode.action)
    panels: list[tuple[float, Callable[[Any], None]]] = [(1.3, lambda a: _observations(a, episode.obs))]
    panels.append((0.7, lambda a: _actions(a, episode)))
    panels += [(_height(table), lambda a, n=name, t=table: _memory(a, n, t)) for name, table in episode.memory.items()]
    if not episode.memory:
        panels.append((0.4, lambda a: a.set_title("this core has no memory", loc="left", fontsize=9)))
    heights = [h for h, _ in panels]
    figure = Figure(figsize=(10, 0.9 + 1.25 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axis, (_, fill) in zip(axes, panels, strict=True):
        fill(axis)
    axes[-1].set_xlim(-0.5, T - 0.5)
    axes[-1].set_xlabel("step of the episode")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)


def _height(table: Tensor) -> float:
    return 2.2 if table.shape[1] == len(table) and len(table) > 8 else 1.3


def _observations(axis: Any, obs: Tensor) -> None:
    """Vectors as columns of a heat map; images as a row of thumbnails."""
    T = len(obs)
    if obs.dim() == 4:
        shown = min(T, 12)
        at = torch.linspace(0, T - 1, shown).round().long()
        for i in at.tolist():
            image = obs[i].float().mean(0) if obs.shape[1] != 3 else obs[i].permute(1, 2, 0)
            half = T / shown / 2 * 0.95
            axis.imshow(image.numpy(), extent=(i - half, i + half, 0, 1), aspect="auto", cmap="gray")
        axis.set_ylim(0, 1)
        axis.set_yticks([])
    else:
        axis.imshow(obs.float().flatten(1).T.numpy(), aspect="auto", cmap="viridis", interpolation="nearest")
        axis.set_ylabel("entry", fontsize=8)
    axis.set_title("observation", loc="left", fontsize=9)


def _actions(axis: Any, episode: InspectedEpisode) -> None:
    axis.plot(episode.action.numpy(), drawstyle="steps-mid", color="tab:gray", label="action")
    rewards = axis.twinx()
    rewards.stem(range(len(episode.reward)), episode.reward.numpy(), linefmt="tab:orange", markerfmt=" ", basefmt=" ")
    rewards.tick_params(colors="tab:orange", labelsize=7)
    axis.tick_params(labelsize=7)
    axis.set_title("action (grey) and reward of the previous action (orange)", loc="left", fontsize=9)


def _memory(axis: Any, name: str, table: Tensor) -> None:
    """Up to eight numbers as curves, more as a heat map."""
    T, n = table.shape
    if n <= 8 and not (n == T and "attention" in name):
        for i in range(n):
            axis.plot(table[:, i].numpy(), linewidth=1, label=str(i + 1))
        axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    else:
        signed = bool((table < 0).any())
        units = table if "attention" in name else table[:, :UNITS_SHOWN]
        limit = float(units.abs().max()) or 1.0
        heat_map = axis.imshow(
            units.T.float().numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap="RdBu_r" if signed else "magma",
            vmin=-limit if signed else 0,
            vmax=limit,
            origin="lower",
        )
        axis.figure.colorbar(heat_map, ax=axis, pad=0.01, fraction=0.02).ax.tick_params(labelsize=6)
        axis.set_ylabel("past step" if "attention" in name else "unit", fontsize=8)
        if units.shape[1] < n:
            name += f" (the first {units.shape[1]} of {n} units)"
    axis.tick_params(labelsize=7)
    axis.set_title(name, loc="left", fontsize=9)
