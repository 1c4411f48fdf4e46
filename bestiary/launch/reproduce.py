"""A published figure from one command: plan its runs, make those that are missing, draw what came out."""

import csv
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

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
FIGURES = {  # which tasks its panels show
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
LAST = 0.05  # of the evaluations, at the end of a run, whose mean is its result


class Job(NamedTuple):
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
        return float(np.mean(values[-max(1, round(LAST * len(values))) :]))


def plan(figure: str, scale: Scale, seeds: int, memories: Sequence[str], root: Path) -> list[Job]:
    """Every run of a figure, short ones first."""
    if figure not in FIGURES:
        raise UserError(f"there is no figure {figure!r}: {did_you_mean(figure, FIGURES)}")
    if seeds < 1:
        raise UserError(f"seeds={seeds} must be at least 1")
    offered = memory_rl.SMALL_CORES if scale == "small" else MEMORIES["paper"]
    for memory in memories:
        if memory not in offered:
            raise UserError(f"there is no memory {memory!r} at this scale: {did_you_mean(memory, offered)}")
    jobs = []
    for task in FIGURES[figure]:
        for length in SMALL_LENGTHS[task] if scale == "small" else MEMORY_RL[task]:
            for memory in memories or MEMORIES[scale]:
                make = memory_rl.quick if scale == "small" else memory_rl.experiment
                for seed in range(seeds):
                    experiment = make(task, length, memory, seed)
                    jobs.append(
                        Job(task, length, memory, seed, experiment, root / f"{task}-{length}-{memory}-seed{seed}")
                    )
    return sorted(jobs, key=lambda job: job.experiment.frames)


def seconds_per_frame(experiment: Experiment) -> float:
    """Measured here and now: an unroll and a few updates, weighed as the run would."""
    runtime = start(experiment)
    assert isinstance(runtime, LocalRuntime)
    try:
        acting = learning = 0.0
        trajectory, _ = runtime.actor.unroll()  # the first one also compiles
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
        rows, streams = trajectory.action.shape
        algo = experiment.algo
        per_frame = getattr(algo, "ratio", 1 / (algo.batch_size * algo.unroll))
        return acting / ((rows - 1) * streams) + per_frame * learning
    finally:
        runtime.close()


def estimate(jobs: Sequence[Job], root: Path) -> dict[str, float]:
    """Seconds for each kind of run (seeds apart); measured once, then remembered beside the runs."""
    file = root / "speed.json"
    known: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    for job in jobs:
        if job.kind not in known:
            known[job.kind] = seconds_per_frame(job.experiment) * job.experiment.frames
            root.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(known, indent=2) + "\n")
    return known


def make(
    jobs: Sequence[Job],
    workers: int,
    log: Callable[[str], None],
    seconds: dict[str, float],
    stop: Callable[[], bool] = lambda: False,
    executor: Executor = LOCAL,
) -> list[str]:
    """Run what is not finished, several at once, each in a process of its own. Returns what went wrong."""
    left = {job.name: seconds[job.kind] for job in jobs if not job.finished}
    problems: list[str] = []

    def tell(ended: JobResult[Job]) -> None:
        job = ended.job
        del left[job.name]
        if ended.problem is not None:
            problems.append(f"{job.name}: {ended.problem}")
            log(problems[-1])
            return
        count, rest = len(jobs) - len(left), clock(sum(left.values()) / workers)
        log(f"{count} of {len(jobs)}  {job.name}: {job.result():.2f} in {clock(ended.seconds)}, about {rest} left")

    run_all(jobs, workers, tell, stop, executor=executor, log=log)
    return problems


def clock(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def lines(jobs: Sequence[Job], task: str, statistic: Statistic) -> list[Line]:
    """Results against length, a line per memory; of the runs that are finished."""
    done = [job for job in jobs if job.task == task and job.finished]
    found = []
    for memory in dict.fromkeys(job.memory for job in jobs):
        mine = [job for job in done if job.memory == memory]
        lengths = sorted({job.length for job in mine})
        if not lengths:
            continue
        # a length at a time: not all of them need have as many seeds yet
        scores = [[[job.result()] for job in mine if job.length == length] for length in lengths]
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


def picture(jobs: Sequence[Job], figure: str, out: Path, statistic: Statistic) -> list[Path]:
    """A panel per task, as PNG and SVG, and the numbers as a table."""
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


def write_table(panels: dict[str, list[Line]], jobs: Sequence[Job], path: Path, statistic: Statistic) -> None:
    """Every point, also of runs that were not made: those say so."""
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
