"""bestiary study PRESET: a reward-hacking study over network sizes, reward proxies and seeds, with an HTML report."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from bestiary.cli.commands.train import Signals
from bestiary.cli.parse import ExecutorName, Flat, check_parts, parse
from bestiary.config.plugins import load_plugins
from bestiary.config.schema import Counts
from bestiary.errors import UserError
from bestiary.launch.executor import choose_executor
from bestiary.launch.seeds import parse_seeds
from bestiary.presets import preset
from bestiary.training.run import new_path

USAGE = """\
usage: bestiary study riverraid --proxy score,pacifist:20 --width 256,1024 --depth 1,2 --seeds 3 [--run DIR]

Trains every combination of reward proxy, width, depth and seed, evaluates every checkpoint for whole episodes under
every reward, and writes DIR/report.html. The same command with the same --run continues a study. With
--executor ray[:ADDRESS], runs are trained on a Ray cluster.

`bestiary study riverraid --help` lists every setting."""


@dataclass(frozen=True)
class StudyCommand:
    experiment: Flat
    proxy: str = ""
    """training rewards (reward proxies), separated by commas: fuel:10,pacifist:20"""
    width: Counts = (512,)
    """units of the fully connected layers after the convolutions, separated by commas (Pan et al. 2022: 256 to 4096)"""
    depth: Counts = (1,)
    """number of these layers, separated by commas (Pan et al. 2022: 1 to 3)"""
    seeds: str = "1"
    """number of seeds, counted from --seed (3), a range (0..2) or a list (1,5,9)"""
    checkpoints: int = 4
    """checkpoints that are evaluated per run, evenly spaced up to --frames"""
    episodes: int = 10
    """whole episodes per checkpoint and mode (greedy, sampled)"""
    true: str = "score"
    """true reward: measured in every run, and a training reward only if --proxy names it too"""
    jobs: int | None = None
    """runs trained in parallel; None: one per core of this machine, or of the cluster of --executor"""
    executor: ExecutorName = "local"
    """local: runs are processes of this machine; ray[:ADDRESS]: of a Ray cluster, at RAY_ADDRESS, auto or HOST:PORT"""
    run: Path | None = None
    """directory of the runs and the report; None: a new one in runs/"""


def main(args: list[str]) -> int:
    load_plugins()
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    cfg = parse(StudyCommand, check_parts(args[1:]), f"bestiary study {args[0]}", StudyCommand(preset(args[0])))
    if not cfg.proxy.strip(", "):
        raise UserError("--proxy is missing: name training rewards, such as fuel:10,pacifist:20")
    from bestiary.reward_hacking.study import StudyPlan, study

    proxies = [proxy.strip() for proxy in cfg.proxy.split(",") if proxy.strip()]
    seeds = parse_seeds(cfg.seeds, cfg.experiment.seed)
    sizes = cfg.width, cfg.depth
    plan = StudyPlan(cfg.experiment, proxies, *sizes, seeds, cfg.checkpoints, cfg.episodes, cfg.true)
    root = cfg.run or new_path(f"{args[0]}-study", seeds[0])
    executor = choose_executor(cfg.executor)
    stop = Signals()
    with executor:
        report = study(
            plan,
            root,
            cfg.jobs,
            command=shlex.join(["bestiary", "study", *without_run(args)]),
            say=lambda text: print(text, flush=True),
            stop=stop,
            executor=executor,
        )
    if report is None:
        print(f"stopped; the same command with --run {root} continues the study")
        return 128 + stop.received
    print(f"written to {report}")
    return 0


def without_run(args: list[str]) -> list[str]:
    """The arguments without --run, which has no effect on the results."""
    kept = [word for word in args if not word.startswith("--run=")]
    if "--run" in kept:
        at = kept.index("--run")
        kept = kept[:at] + kept[at + 2 :]
    return kept
