"""A published figure from one command: plan its runs, train those that are missing, plot the results."""

import csv
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from bestiary.algos import Dqn, SacDiscrete
from bestiary.analysis.curves import Line, Statistic, aggregate
from bestiary.config.experiment import Experiment
from bestiary.config.suggestions import did_you_mean
from bestiary.envs.base import References, references
from bestiary.errors import UserError
from bestiary.launch.executor import LOCAL, Executor, JobResult, evaluations, finished, run_all
from bestiary.presets import memory_rl
from bestiary.presets.budgets import MEMORY_RL
from bestiary.runtime.local import LocalRuntime
from bestiary.runtime.start import start

Scale = Literal["small", "paper"]
FIGURES = {  # the tasks of the panels
    "memory-rl/fig3": ("tmaze-passive", "visual-match"),  # memory
    "memory-rl/fig6": ("tmaze-active", "key-to-door"),  # credit assignment
}
TITLES = {
    "tmaze-passive": "Passive T-Maze",
    "tmaze-active": "Active T-Maze",
    "visual-match": "Visual Match",
    "key-to-door": "Key-to-Door",
}
SMALL_LENGTHS = {
    "tmaze-passive": (10, 50, 250),
    "tmaze-active": (10, 50, 250),
    "visual-match": (10, 30, 60),
    "key-to-door": (10, 30, 60),
}
MEMORIES: dict[Scale, tuple[str, ...]] = {"small": ("ff", "lstm", "gpt", "delta-net"), "paper": ("lstm", "gpt")}
LAST_EVALUATIONS = 0.05  # the result of a run is the mean of this fraction of its evaluations, the last ones


class FigureRun(NamedTuple):
    """One run of a figure."""

    task: str
    length: int
    memory: str
    seed: int
    experiment: Experiment
    path: Path

    @property
    def kind(self) -> str:
        return f"{self.task}-{self.length}-{self.memory}"

    @property
    def name(self) -> str:
        return f"{self.task} {self.length}, {self.memory}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        return finished(self)

    def result(self) -> float:
        known = references(self.experiment.env)
        assert known is not None
        values = [row[known.metric] for row in evaluations(self.path)]
        return float(np.mean(values[-max(1, round(LAST_EVALUATIONS * len(values))) :]))


def plan(figure: str, scale: Scale, seeds: int, memories: Sequence[str], root: Path) -> list[FigureRun]:
    """All runs of a figure, those with the smallest frame budget first."""
    if figure not in FIGURES:
        raise UserError(f"there is no figure {figure!r}: {did_you_mean(figure, FIGURES)}")
    if seeds < 1:
        raise UserError(f"seeds={seeds} must be at least 1")
    known = memory_rl.SMALL_CORES if scale == "small" else MEMORIES["paper"]
    for memory in memories:
        if memory not in known:
            raise UserError(f"there is no core {memory!r} at this scale: {did_you_mean(memory, known)}")
    jobs = []
    for task in FIGURES[figure]:
        for length in SMALL_LENGTHS[task] if scale == "small" else MEMORY_RL[task]:
            for memory in memories or MEMORIES[scale]:
                make = memory_rl.quick if scale == "small" else memory_rl.experiment
                for seed in range(seeds):
                    experiment = make(task, length, memory, seed)
                    jobs.append(
                        FigureRun(task, length, memory, seed, experiment, root / f"{task}-{length}-{memory}-seed{seed}")
                    )
    return sorted(jobs, key=lambda job: job.experiment.frames)


def seconds_per_frame(experiment: Experiment) -> float:
    """Seconds of training per frame, measured by one unroll and three updates on this machine."""
    runtime = start(experiment)
    assert isinstance(runtime, LocalRuntime)
    try:
        acting = learning = 0.0
        trajectory, _ = runtime.actor.unroll()  # the first unroll also compiles
        runtime.replay.add(trajectory)
        while (batch := runtime.replay.sample()) is None or not acting:
            began = time.perf_counter()
            trajectory, _ = runtime.actor.unroll()
            acting = time.perf_counter() - began
            runtime.replay.add(trajectory)
        for _ in range(3):
            began = time.perf_counter()
            runtime.learner.update(batch)
            learning = time.perf_counter() - began
        steps, streams = trajectory.action.shape
        algo = experiment.algo
        assert isinstance(algo, Dqn | SacDiscrete)
        return acting / ((steps - 1) * streams) + algo.replay.updates_per_step * learning
    finally:
        runtime.close()


def estimate_seconds(jobs: Sequence[FigureRun], root: Path) -> dict[str, float]:
    """Seconds of training for each kind of run, whatever its seed; measured once and kept in speed.json."""
    file = root / "speed.json"
    known: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    for job in jobs:
        if job.kind not in known:
            known[job.kind] = seconds_per_frame(job.experiment) * job.experiment.frames
            root.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(known, indent=2) + "\n")
    return known


def train_missing(
    jobs: Sequence[FigureRun],
    max_workers: int,
    log: Callable[[str], None],
    seconds: dict[str, float],
    stop: Callable[[], bool] = lambda: False,
    executor: Executor = LOCAL,
) -> list[str]:
    """Train the unfinished runs, each in its own process. Returns a sentence for each run that failed."""
    remaining = {job.name: seconds[job.kind] for job in jobs if not job.finished}
    problems: list[str] = []

    def report(result: JobResult[FigureRun]) -> None:
        job = result.job
        del remaining[job.name]
        if result.problem is not None:
            problems.append(f"{job.name}: {result.problem}")
            log(problems[-1])
            return
        count, rest = len(jobs) - len(remaining), format_seconds(sum(remaining.values()) / max_workers)
        duration = format_seconds(result.seconds)
        log(f"{count} of {len(jobs)}  {job.name}: {job.result():.2f} in {duration}, about {rest} left")

    run_all(jobs, max_workers, report, stop, executor=executor, log=log)
    return problems


def format_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def lines(jobs: Sequence[FigureRun], task: str, statistic: Statistic) -> list[Line]:
    """Results of the finished runs of a task over its length, a line per core."""
    finished_runs = [job for job in jobs if job.task == task and job.finished]
    found = []
    for memory in dict.fromkeys(job.memory for job in jobs):
        of_core = [job for job in finished_runs if job.memory == memory]
        lengths = sorted({job.length for job in of_core})
        if not lengths:
            continue
        # one length at a time, because an unfinished figure has different numbers of seeds
        scores = [[[job.result()] for job in of_core if job.length == length] for length in lengths]
        points = [aggregate(memory, [n], [x], statistic) for n, x in zip(lengths, scores, strict=True)]
        y, low, high = ([getattr(point, name) for point in points] for name in ("y", "low", "high"))
        known = not any(bound is None for bound in low)
        found.append(
            Line(
                memory,
                np.array(lengths, float),
                np.concatenate(y),
                np.concatenate(low) if known else None,
                np.concatenate(high) if known else None,
                min(point.seeds for point in points),
            )
        )
    return found


def plot_figure(jobs: Sequence[FigureRun], figure: str, out: Path, statistic: Statistic) -> list[Path]:
    """Plot a panel per task to PNG and SVG, and write the numbers to a CSV table."""
    from bestiary.config.extras import require

    require("matplotlib", "plot")
    from matplotlib.figure import Figure
    from matplotlib.style import context

    from bestiary.analysis.plot import draw, style

    tasks = FIGURES[figure]
    panels = {task: lines(jobs, task, statistic) for task in tasks}
    looks = style(dict.fromkeys(job.memory for job in jobs))
    with context(["default", {"svg.hashsalt": "bestiary"}]):
        canvas = Figure(figsize=(9.6, 3.8), layout="constrained")
        for axes, task in zip(canvas.subplots(1, len(tasks)), tasks, strict=True):
            known = next(k for job in jobs if job.task == task and (k := references(job.experiment.env)))
            draw(axes, panels[task], {"optimal": known.optimal, "without memory": known.memoryless}, looks)
            axes.set_title(TITLES[task], loc="left", fontsize=11)
            axes.set_xscale("log")
            lengths = sorted({job.length for job in jobs if job.task == task})
            axes.set_xticks(lengths, [str(n) for n in lengths], minor=False)
            axes.minorticks_off()
            axes.set_xlabel("length (steps)")
            axes.set_ylabel(f"{known.metric} at the end of training")
            axes.set_ylim(min(-0.05, axes.get_ylim()[0]), 1.05)
        named = [pair for axes in canvas.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
        handles = {label: handle for handle, label in named}
        canvas.legend(handles.values(), handles, loc="outside lower center", ncols=8, frameon=False, fontsize=9)
        canvas.savefig(out.with_suffix(".png"), dpi=150, metadata={"Software": None})
        canvas.savefig(out.with_suffix(".svg"), metadata={"Date": None})
    write_table(panels, jobs, out.with_suffix(".csv"), statistic)
    return [out.with_suffix(kind) for kind in (".png", ".svg", ".csv")]


def write_table(panels: dict[str, list[Line]], jobs: Sequence[FigureRun], path: Path, statistic: Statistic) -> None:
    """Every point of the figure; a point without a finished run is marked `not run`."""
    with path.open("w", newline="") as file:
        write = csv.writer(file, lineterminator="\n")
        write.writerow(["task", "memory", "length", "metric", statistic, "low", "high", "seeds", "frames"])
        for task, found in panels.items():
            by_memory = {line.label: line for line in found}
            for job in sorted((j for j in jobs if j.task == task and j.seed == 0), key=lambda j: (j.memory, j.length)):
                known = references(job.experiment.env)
                assert isinstance(known, References)
                line = by_memory.get(job.memory)
                at = np.flatnonzero(line.x == job.length) if line is not None else []
                row = [job.task, job.memory, job.length, known.metric]
                if line is None or not len(at):
                    write.writerow([*row, "not run", "", "", 0, job.experiment.frames])
                    continue
                i = at[0]
                interval = ["" if bound is None else f"{bound[i]:.4f}" for bound in (line.low, line.high)]
                count = sum(j.finished for j in jobs if (j.task, j.memory, j.length) == (task, job.memory, job.length))
                write.writerow([*row, f"{line.y[i]:.4f}", *interval, count, job.experiment.frames])
