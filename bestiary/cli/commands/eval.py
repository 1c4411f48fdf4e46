"""bestiary eval RUN: whole games on fresh seeds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from bestiary.analysis.seed_runs import seed_runs
from bestiary.cli.parse import check_parts, parse
from bestiary.config.plugins import load_plugins
from bestiary.config.schema import parse_command
from bestiary.envs import EnvConfig
from bestiary.envs.base import References, for_evaluation
from bestiary.errors import UserError
from bestiary.launch import seeds
from bestiary.training.evaluation import evaluate
from bestiary.training.run import EXPERIMENT, Run
from bestiary.types import Mode

WIDTH = 120  # columns: scores of six digits, with their intervals


@dataclass(frozen=True)
class Eval:
    run: Annotated[Path, tyro.conf.Positional]
    """run directory, or one that holds the runs of several seeds"""
    episodes: int = 100
    """whole games per mode (and repetition)"""
    mode: Literal["both", "greedy", "sampled"] = "both"
    checkpoint: str | None = None
    """frames of a checkpoint, last or best; None: last"""
    positive_only: bool = False
    """replay a game, from a fresh start, until its final score is positive (BattleZone, Up'n Down)"""
    runs: int = 1
    """repeat the protocol on other seeds and list the means"""
    envs: int = 16
    """games played at once"""
    seed: int = 0
    """of the evaluation; never one of training's"""
    epsilon: float = 0.0
    """chance that an action is replaced by one at random"""
    command: str | None = None
    """what an agent that follows commands is to reach, for example 200,300: a return, and in how many moves; own: what
    it asks of itself; None: as the run was evaluated"""
    reward: str | None = None
    """by which reward to count, where rewards have names, whatever it was trained on: score, fuel:10, ..."""
    device: str = "auto"
    threads: int | None = None
    env: EnvConfig | None = None
    """where to play, if not where it was trained: --env.length 10000"""


def main(args: list[str]) -> int:
    load_plugins()
    cfg = read(args)
    modes: tuple[Mode, ...] = ("greedy", "sampled") if cfg.mode == "both" else (cfg.mode,)
    options = {k: v for k, v in vars(cfg).items() if k not in ("run", "mode")}
    if cfg.command is not None:
        options["command"] = parse_command(cfg.command)
    if seed_runs(cfg.run):
        return print_seeds(seeds.evaluate_seeds(cfg.run, modes=modes, log=print, **options), modes)
    print_report(evaluate(cfg.run, modes=modes, **options), modes)
    return 0


def read(args: list[str]) -> Eval:
    """Settings of the environment are those of the run, unless changed."""
    runs = [p for word in args for p in (Path(word), *seed_runs(Path(word))) if (p / EXPERIMENT).is_file()]
    elsewhere = any(word.startswith(("--env.", "env:")) for word in args)
    if elsewhere and not runs:
        raise UserError("--env.* plays a run elsewhere than it was trained: none of the words is a run directory")
    default = Eval(runs[0], env=for_evaluation(Run(runs[0]).experiment().env)) if runs else None
    return parse(Eval, check_parts(args), "bestiary eval", default)


def wide() -> Console:
    """Room for every digit: a line that the terminal wraps can be read, a number that is cut off cannot."""
    return Console(width=max(Console().width, WIDTH))


def print_seeds(result: dict[str, Any], modes: tuple[Mode, ...]) -> int:
    console = wide()
    console.print(seeds.evaluation_table(result, modes))
    if result["elsewhere"]:
        console.print("not as in training: " + ", ".join(result["elsewhere"]))
    if result["protocol"]["reward"]:
        console.print(f"counted by {result['protocol']['reward']}, whatever it was trained on")
    if "references" in result:
        console.print(str(References(**result["references"])))
    console.print(f"written to {result['file']}", soft_wrap=True)
    if result["missing"]:
        raise UserError(f"seeds without such a checkpoint were left out: {', '.join(result['missing'])}")
    return 0


def print_report(result: dict[str, Any], modes: tuple[Mode, ...]) -> None:
    title = f"{result['environment']}, checkpoint of {result['checkpoint_frames']:,} frames"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("policy", "per", "n", "mean", "95% interval", "median", "IQM", "std", "min", "max"):
        table.add_column(column, justify="left" if column in ("policy", "per") else "right", no_wrap=True)
    for mode in modes:
        for per in ("game", "success", "life"):
            s = result[mode].get(per)
            if s is None or (per == "life" and s["n"] == result[mode]["game"]["n"]):
                continue  # one life a game: nothing to add
            numbers = [f"{s[k]:.2f}" for k in ("median", "iqm", "std", "min", "max")]
            interval = f"[{s['ci95_low']:.2f}, {s['ci95_high']:.2f}]"
            table.add_row(mode, per, str(s["n"]), f"{s['mean']:.2f}", interval, *numbers)
    console = wide()
    console.print(table)
    if result["elsewhere"]:
        console.print("not as in training: " + ", ".join(result["elsewhere"]))
    if result["protocol"]["reward"]:
        console.print(f"counted by {result['protocol']['reward']}, whatever it was trained on")
    if result["protocol"]["epsilon"]:
        console.print(f"an action is at random with a chance of {result['protocol']['epsilon']:g}")
    if "references" in result:
        console.print(str(References(**result["references"])))
    for mode in modes:
        extra = result[mode]
        if "info" in extra:
            console.print(f"{mode}: {info_line(extra)}")
        if extra.get("human_normalised") is not None:
            console.print(f"{mode}: {100 * extra['human_normalised']:.1f}% of human")
        if len(extra["run_means"]) > 1:
            console.print(f"{mode}: means of the repetitions: " + ", ".join(f"{m:.2f}" for m in extra["run_means"]))
        if extra["truncated"]:
            console.print(f"{mode}: {extra['truncated']} games were cut by the time limit")
    console.print(f"written to {result['file']}", soft_wrap=True)


def info_line(extra: dict[str, Any]) -> str:
    """Means of what the agent says of its episodes, such as the desired return, beside what was reached."""
    said = ", ".join(f"{name.replace('_', ' ')} {numbers['mean']:.2f}" for name, numbers in extra["info"].items())
    return f"{said}; reached a score of {extra['game']['mean']:.2f} in {extra['steps']['mean']:.0f} steps"
