"""Effect of each CPU setting on learner speed, measured in separate processes."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from bestiary.bench import medians

# setting that is switched off in a child process -> description
SWITCHES = {
    "none": "nothing",
    "allocator": "glibc hands large blocks back to the kernel",
    "layout": "convolutions in the default memory layout",
}


@dataclass(frozen=True)
class FindingsBench:
    """bestiary bench findings"""

    rounds: int = 3
    """child processes per setting, run alternately"""
    envs: int = 32
    """batch size in environment streams"""
    threads: int | None = None
    """CPU threads; None: all cores"""


def child(off: str, net: str, unroll: int, envs: int, threads: int | None) -> float:
    """Time steps per second of the learner, forward and backward, with one setting switched off."""
    import torch

    from bestiary.algos.impala import ImpalaLearner
    from bestiary.config.machine import cores, tune_malloc
    from bestiary.nets import Resnet, Shallow
    from bestiary.presets import preset
    from bestiary.types import Spec, TimeStep, Trajectory

    if off != "allocator":
        tune_malloc()
    torch.set_num_threads(threads or cores())
    torch.manual_seed(0)
    base = preset("impala-shallow")
    spec = Spec("Pong", (1, 84, 84), torch.uint8, 6, 4)
    agent = base.algo.agent(spec, replace(base.net, encoder=Resnet() if net == "resnet" else Shallow()), base.core)
    encoder = agent.torso.encoder
    if off == "layout":
        encoder.to(memory_format=torch.contiguous_format)  # type: ignore
        encoder.layout = torch.contiguous_format
    learner = base.algo.learner(agent, 10**6)
    assert isinstance(learner, ImpalaLearner)
    T = unroll + 1
    flag = torch.zeros(T, envs, dtype=torch.bool)
    obs = torch.randint(0, 255, (T, envs, 1, 84, 84), dtype=torch.uint8)
    action, reward = torch.zeros(T, envs, dtype=torch.long), torch.zeros(T, envs)
    logits = torch.zeros(T, envs, 6)
    step = TimeStep(obs, action, reward, flag, flag)
    trajectory = Trajectory(step, action, {"logits": logits}, agent.initial_state(envs), action[0])

    def learn() -> None:
        agent.zero_grad(set_to_none=True)
        loss, _ = learner.loss(trajectory)
        loss.backward()

    return T * envs / medians({"learn": learn}, 3)["learn"]


def main(cfg: FindingsBench) -> dict[str, Any]:
    results: dict[str, Any] = {}
    table = Table(title="learner time steps/s, forward + backward", title_justify="left", box=None, padding=(0, 2))
    for column in ("network", "T", "switched off", "steps/s", "speedup of the setting"):
        table.add_column(column, justify="right" if column in ("T", "steps/s", "speedup of the setting") else "left")
    for net, unroll in (("shallow", 20), ("shallow", 50), ("resnet", 20), ("resnet", 50)):
        rates: dict[str, list[float]] = {side: [] for side in SWITCHES}
        for _ in range(cfg.rounds):
            for side in SWITCHES:
                rates[side].append(_spawn(side, net, unroll, cfg))
        median = {side: sorted(values)[len(values) // 2] for side, values in rates.items()}
        for side in SWITCHES:
            ratio = "" if side == "none" else f"{median['none'] / median[side]:.2f}x"
            table.add_row(net, str(unroll), SWITCHES[side], f"{median[side]:,.0f}", ratio)
        results[f"{net}-{unroll}"] = median
    Console(width=110).print(table)
    return results


def _spawn(side: str, net: str, unroll: int, cfg: FindingsBench) -> float:
    call = f"child({side!r}, {net!r}, {unroll}, {cfg.envs}, {cfg.threads})"
    code = f"from bestiary.bench.findings import child; print({call})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)
