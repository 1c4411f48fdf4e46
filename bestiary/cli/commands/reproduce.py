"""bestiary reproduce FIGURE: a published figure, from its runs to its picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bestiary.analysis.curves import Statistic
from bestiary.cli.commands.train import Signals
from bestiary.cli.parse import ExecutorName, parse
from bestiary.errors import UserError
from bestiary.launch.executor import Executor, check_jobs, choose_executor
from bestiary.launch.reproduce import Scale, clock, estimate, make, picture, plan


@dataclass(frozen=True)
class Settings:
    """Plan a figure's runs, make the missing ones, draw. Run it again to go on where it was stopped."""

    figure: Annotated[str, tyro.conf.Positional]
    """memory-rl/fig3 (memory) or memory-rl/fig6 (credit assignment)"""
    scale: Scale = "small"
    """small: short tasks and small networks, minutes; paper: its settings, lengths and budgets, days"""
    seeds: int = 3
    cores: tuple[str, ...] = ()
    """memories to compare; none named: a few (small) or the paper's two"""
    aggregate: Statistic = "mean"
    """over seeds; iqm: mean of the middle half"""
    jobs: int | None = None
    """runs at a time; None: one per processor core, of this machine or of the cluster of --executor"""
    executor: ExecutorName = "local"
    """local: runs are processes of this machine; ray[:ADDRESS]: of a Ray cluster, at RAY_ADDRESS, auto or HOST:PORT"""
    plan: bool = False
    """only say what would be run and how long it would take"""
    out: Path | None = None
    """where runs and pictures go; None: runs/reproduce/FIGURE-SCALE"""


def main(args: list[str]) -> int:
    cfg = parse(Settings, args, "bestiary reproduce")
    check_jobs(cfg.jobs)
    with choose_executor(cfg.executor) as executor:
        return carry_out(cfg, executor)


def carry_out(cfg: Settings, executor: Executor) -> int:
    root = cfg.out or Path("runs/reproduce") / f"{cfg.figure.replace('/', '-')}-{cfg.scale}"
    jobs = plan(cfg.figure, cfg.scale, cfg.seeds, cfg.cores, root)
    missing = [job for job in jobs if not job.finished]
    many = executor.max_workers(cfg.jobs, jobs[0].experiment)
    print(
        f"{len(jobs)} runs, {len(jobs) - len(missing)} of them finished; measuring this machine's speed ...", flush=True
    )
    seconds = estimate(missing, root)
    total = sum(seconds[job.kind] for job in missing)
    print(f"{len(missing)} to go: about {clock(total / many)} with {many} at a time", flush=True)
    if cfg.plan:
        for job in missing:
            print(f"  {job.name}: {job.experiment.frames:,} frames, {clock(seconds[job.kind])}")
        return 0
    stop = Signals()
    problems = make(jobs, many, lambda text: print(text, flush=True), seconds, stop, executor)
    if any(job.finished for job in jobs):
        files = picture(jobs, cfg.figure, root / "figure", cfg.aggregate)
        print(f"written to {', '.join(map(str, files))}")
    if stop.received:
        print("stopped; run this again to go on")
        return 128 + stop.received
    if problems:
        raise UserError(f"{len(problems)} runs did not finish, the first: {problems[0]}; run this again to go on")
    return 0
