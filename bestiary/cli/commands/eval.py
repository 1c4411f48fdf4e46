"""bestiary eval RUN: evaluate a run's agent on fresh seeds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from bestiary.analysis.seed_runs import seed_runs
from bestiary.cli.parse import FLAT, check_parts, parse
from bestiary.config.plugins import load_plugins
from bestiary.envs.base import References, for_evaluation
from bestiary.errors import UserError
from bestiary.launch import seeds
from bestiary.training.evaluation import EvaluationProtocol, evaluate
from bestiary.training.run import EXPERIMENT, Run
from bestiary.types import Mode

WIDTH = 120  # columns: scores of six digits, with their intervals


@dataclass(frozen=True)
class Eval:
    """Evaluate a run's agent: whole episodes on seeds that training never uses."""

    run: Annotated[Path, tyro.conf.Positional]
    """run directory, or a directory with the runs of several seeds"""
    protocol: Annotated[EvaluationProtocol, FLAT] = field(default_factory=EvaluationProtocol)


def main(args: list[str]) -> int:
    load_plugins()
    cfg = read(args)
    modes = cfg.protocol.modes
    if seed_runs(cfg.run):
        return print_seeds(seeds.evaluate_seeds(cfg.run, log=print, **vars(cfg.protocol)), modes)
    print_report(evaluate(cfg.run, **vars(cfg.protocol)), modes)
    return 0


def read(args: list[str]) -> Eval:
    """Parse arguments. The environment's settings default to those of the run."""
    runs = [p for word in args for p in (Path(word), *seed_runs(Path(word))) if (p / EXPERIMENT).is_file()]
    if not runs and any(word.startswith(("--env.", "env:")) for word in args):
        raise UserError("--env.* changes the environment of a run, but no argument is a run directory")
    default = Eval(runs[0], EvaluationProtocol(env=for_evaluation(Run(runs[0]).experiment().env))) if runs else None
    return parse(Eval, check_parts(args), "bestiary eval", default)


def wide_console() -> Console:
    """A console that is wide enough for every digit: a terminal wraps long lines, but Rich would cut numbers off."""
    return Console(width=max(Console().width, WIDTH))


def print_seeds(result: dict[str, Any], modes: tuple[Mode, ...]) -> int:
    console = wide_console()
    console.print(seeds.evaluation_table(result, modes))
    print_protocol(console, result)
    console.print(f"written to {result['file']}", soft_wrap=True)
    if result["missing"]:
        raise UserError(f"seeds without such a checkpoint were left out: {', '.join(result['missing'])}")
    return 0


def print_report(result: dict[str, Any], modes: tuple[Mode, ...]) -> None:
    title = f"{result['environment']}, checkpoint of {result['checkpoint_frames']:,} frames"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("mode", "metric", "n", "mean", "95% interval", "median", "IQM", "std", "min", "max"):
        table.add_column(column, justify="left" if column in ("mode", "metric") else "right", no_wrap=True)
    for mode in modes:
        for metric in ("score", "success", "life_return"):
            s = result[mode].get(metric)
            if s is None or (metric == "life_return" and s["n"] == result[mode]["score"]["n"]):
                continue  # one life per episode: its return is the score
            numbers = [f"{s[k]:.2f}" for k in ("median", "iqm", "std", "min", "max")]
            interval = f"[{s['ci95_low']:.2f}, {s['ci95_high']:.2f}]"
            table.add_row(mode, metric.replace("_", " "), str(s["n"]), f"{s['mean']:.2f}", interval, *numbers)
    console = wide_console()
    console.print(table)
    print_protocol(console, result)
    for mode in modes:
        found = result[mode]
        if "info" in found:
            console.print(f"{mode}: {info_line(found)}")
        if found.get("human_normalised") is not None:
            console.print(f"{mode}: {100 * found['human_normalised']:.1f}% of human")
        if len(found["repeat_means"]) > 1:
            console.print(f"{mode}: means of the repeats: " + ", ".join(f"{m:.2f}" for m in found["repeat_means"]))
        if found["truncated"]:
            console.print(f"{mode}: {found['truncated']} episodes were truncated by the time limit")
    console.print(f"written to {result['file']}", soft_wrap=True)


def print_protocol(console: Console, result: dict[str, Any]) -> None:
    """Print what differs from the usual protocol, and the reference scores."""
    protocol = result["protocol"]
    if result["env_changes"]:
        console.print("not as in training: " + ", ".join(result["env_changes"]))
    if protocol["reward"]:
        console.print(f"scored by {protocol['reward']}, whatever reward the agent was trained on")
    if protocol["epsilon"]:
        console.print(f"actions are replaced by random ones with probability {protocol['epsilon']:g}")
    if "references" in result:
        console.print(str(References(**result["references"])))


def info_line(found: dict[str, Any]) -> str:
    """Means of the agent's numbers about its episodes, such as the desired return, beside what was reached."""
    info = ", ".join(f"{name.replace('_', ' ')} {numbers['mean']:.2f}" for name, numbers in found["info"].items())
    return f"{info}; reached a score of {found['score']['mean']:.2f} in {found['episode_length']['mean']:.0f} steps"
