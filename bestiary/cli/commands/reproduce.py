"""bestiary reproduce FIGURE: train the runs of a published figure and plot it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bestiary.analysis.curves import Statistic
from bestiary.cli.commands.train import Signals
from bestiary.cli.parse import ExecutorName, parse
from bestiary.errors import UserError
from bestiary.launch.executor import Executor, check_jobs, choose_executor
from bestiary.launch.reproduce import Scale, estimate_seconds, format_seconds, plan, plot_figure, train_missing


@dataclass(frozen=True)
class ReproduceCommand:
    """Plan the runs of a figure, train the missing ones, plot. The same command resumes after a stop."""

    figure: Annotated[str, tyro.conf.Positional]
    """memory-rl/fig3 (memory) or memory-rl/fig6 (credit assignment), both of Ni et al. 2023"""
    scale: Scale = "small"
    """small: short tasks and small networks, minutes to hours; paper: the published settings and budgets, days"""
    seeds: int = 3
    """number of seeds of each point, from 0 on"""
    cores: tuple[str, ...] = ()
    """memory cores to compare; none: ff, lstm, gpt and delta-net (small), or lstm and gpt (paper)"""
    aggregate: Statistic = "mean"
    """statistic over seeds; iqm: interquartile mean, the mean of the middle half"""
    jobs: int | None = None
    """runs in parallel; None: one per core, of this machine or of the cluster of --executor"""
    executor: ExecutorName = "local"
    """local: runs are processes of this machine; ray[:ADDRESS]: of a Ray cluster, at RAY_ADDRESS, auto or HOST:PORT"""
    plan: bool = False
    """only list the missing runs and the time they would take"""
    out: Path | None = None
    """directory of runs and figure; None: runs/reproduce/FIGURE-SCALE"""


def main(args: list[str]) -> int:
    cfg = parse(ReproduceCommand, args, "bestiary reproduce")
    check_jobs(cfg.jobs)
    with choose_executor(cfg.executor) as executor:
        return reproduce(cfg, executor)


def reproduce(cfg: ReproduceCommand, executor: Executor) -> int:
    root = cfg.out or Path("runs/reproduce") / f"{cfg.figure.replace('/', '-')}-{cfg.scale}"
    jobs = plan(cfg.figure, cfg.scale, cfg.seeds, cfg.cores, root)
    missing = [job for job in jobs if not job.finished]
    workers = executor.max_workers(cfg.jobs, jobs[0].experiment)
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them finished; measuring the speed ...", flush=True)
    seconds = estimate_seconds(missing, root)
    total = sum(seconds[job.kind] for job in missing)
    print(
        f"{len(missing)} runs to train: about {format_seconds(total / workers)} with {workers} in parallel", flush=True
    )
    if cfg.plan:
        for job in missing:
            print(f"  {job.name}: {job.experiment.frames:,} frames, {format_seconds(seconds[job.kind])}")
        return 0
    stop = Signals()
    problems = train_missing(jobs, workers, lambda text: print(text, flush=True), seconds, stop, executor)
    if any(job.finished for job in jobs):
        files = plot_figure(jobs, cfg.figure, root / "figure", cfg.aggregate)
        print(f"written to {', '.join(map(str, files))}")
    if stop.received:
        print("stopped; the same command resumes")
        return 128 + stop.received
    if problems:
        raise UserError(f"{len(problems)} runs did not finish, the first: {problems[0]}; the same command retries them")
    return 0
