"""bestiary study PRESET: sizes, rewards and seeds trained, judged under every reward, and told in one page."""

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

Trains every combination of proxy, width, depth and seed, plays whole games of every checkpoint, counts them under every
reward, and writes DIR/report.html. Run it again with the same --run to go on. With --executor ray
or ray:HOST:PORT, runs are made on a Ray cluster.

`bestiary study riverraid --help` lists every setting."""


@dataclass(frozen=True)
class Settings:
    experiment: Flat
    proxy: str = ""
    """rewards to train on, with commas between them: fuel:10,pacifist:20"""
    width: Counts = (512,)
    """units of the layers behind the convolutions: 256,1024"""
    depth: Counts = (1,)
    """how many of those layers: 1,2"""
    seeds: str = "1"
    """how many from --seed on (3), a range (0..2) or a list (1,5,9)"""
    checkpoints: int = 4
    """that are judged, evenly spaced up to --frames"""
    games: int = 10
    """whole games per checkpoint and mode"""
    true: str = "score"
    """the reward that matters and that nobody is trained on, unless it is named as a proxy too"""
    jobs: int | None = None
    """runs at a time; None: one per core, of this machine or of the cluster of --executor"""
    executor: ExecutorName = "local"
    """local: runs are processes of this machine; ray[:ADDRESS]: of a Ray cluster, at RAY_ADDRESS, auto or HOST:PORT"""
    run: Path | None = None
    """where runs and report go; None: a new one under runs/"""


def main(args: list[str]) -> int:
    load_plugins()
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    cfg = parse(Settings, check_parts(args[1:]), f"bestiary study {args[0]}", Settings(preset(args[0])))
    if not cfg.proxy.strip(", "):
        raise UserError("--proxy is missing: name rewards to train on, such as fuel:10,pacifist:20")
    from bestiary.reward_hacking.study import study

    seeds = parse_seeds(cfg.seeds, cfg.experiment.seed)
    root = cfg.run or new_path(f"{args[0]}-study", seeds[0])
    executor = choose_executor(cfg.executor)
    stop = Signals()
    with executor:
        report = study(
            cfg.experiment,
            [proxy.strip() for proxy in cfg.proxy.split(",") if proxy.strip()],
            cfg.width,
            cfg.depth,
            seeds,
            root,
            cfg.checkpoints,
            cfg.games,
            cfg.true,
            cfg.jobs,
            command=shlex.join(["bestiary", "study", *without_run(args)]),
            say=lambda text: print(text, flush=True),
            stop=stop,
            executor=executor,
        )
    if report is None:
        print(f"stopped; the same command with --run {root} goes on")
        return 128 + stop.received
    print(f"written to {report}")
    return 0


def without_run(args: list[str]) -> list[str]:
    """Where it was kept says nothing of what was done."""
    kept = [word for word in args if not word.startswith("--run=")]
    if "--run" in kept:
        at = kept.index("--run")
        kept = kept[:at] + kept[at + 2 :]
    return kept
