"""What each CPU setting is worth, measured one against the other in processes of their own."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from bestiary.bench import medians

# what is switched off in a child process: (network, T) -> figure in rows/s
SWITCHES = {
    "none": "as shipped",
    "allocator": "glibc hands large blocks back to the kernel",
    "layout": "convolutions in the default memory layout",
}


@dataclass(frozen=True)
class Settings:
    """bestiary bench findings"""

    rounds: int = 3
    """processes per side, in turn"""
    envs: int = 32
    threads: int | None = None


def child(off: str, net: str, unroll: int, envs: int, threads: int | None) -> float:
    """Learner rows per second, forward and backward, with one setting switched off."""
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
    rows = unroll + 1
    flag = torch.zeros(rows, envs, dtype=torch.bool)
    obs = torch.randint(0, 255, (rows, envs, 1, 84, 84), dtype=torch.uint8)
    action, reward = torch.zeros(rows, envs, dtype=torch.long), torch.zeros(rows, envs)
    logits = torch.zeros(rows, envs, 6)
    step = TimeStep(obs, action, reward, flag, flag)
    trajectory = Trajectory(step, action, {"logits": logits}, agent.initial_state(envs), action[0])

    def learn() -> None:
        agent.zero_grad(set_to_none=True)
        loss, _ = learner.loss(trajectory)
        loss.backward()

    return rows * envs / medians({"learn": learn}, 3)["learn"]


def main(cfg: Settings) -> dict[str, Any]:
    results: dict[str, Any] = {}
    table = Table(title="learner rows/s, forward + backward", title_justify="left", box=None, padding=(0, 2))
    for column in ("network", "T", "switched off", "rows/s", "shipped is faster by"):
        table.add_column(column, justify="right" if column in ("T", "rows/s", "shipped is faster by") else "left")
    for net, unroll in (("shallow", 20), ("shallow", 50), ("resnet", 20), ("resnet", 50)):
        rates: dict[str, list[float]] = {side: [] for side in SWITCHES}
        for _ in range(cfg.rounds):
            for side in SWITCHES:
                rates[side].append(_spawn(side, net, unroll, cfg))
        middle = {side: sorted(values)[len(values) // 2] for side, values in rates.items()}
        for side in SWITCHES:
            ratio = "" if side == "none" else f"{middle['none'] / middle[side]:.2f}x"
            table.add_row(net, str(unroll), SWITCHES[side], f"{middle[side]:,.0f}", ratio)
        results[f"{net}-{unroll}"] = middle
    Console(width=110).print(table)
    return results


def _spawn(side: str, net: str, unroll: int, cfg: Settings) -> float:
    call = f"child({side!r}, {net!r}, {unroll}, {cfg.envs}, {cfg.threads})"
    code = f"from bestiary.bench.findings import child; print({call})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)
