"""One experiment with several seeds: trained in parallel, evaluated alike, and summarised with a 95% interval."""

import csv
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from bestiary.analysis.seed_runs import seed_runs
from bestiary.config.experiment import Experiment
from bestiary.envs.base import advice
from bestiary.errors import UserError
from bestiary.launch.executor import LOCAL, Executor, JobResult, evaluations, finished, frames_trained, run_all
from bestiary.ops.stats import iqm, stratified_bootstrap, summary
from bestiary.training.checkpoint import BadCheckpoint
from bestiary.training.display import count, duration
from bestiary.training.evaluation import evaluate
from bestiary.training.run import EXPERIMENT, Run
from bestiary.types import Mode

METRICS = ("score", "success")  # columns of evaluations.csv; success only of environments that define it
MAX_SEEDS = 1_000  # a larger number is taken for a typing mistake


class SeedRun(NamedTuple):
    """The run of one seed."""

    seed: int
    experiment: Experiment
    path: Path

    @property
    def name(self) -> str:
        return f"seed {self.seed}"


def parse_seeds(text: str, first: int = 0) -> list[int]:
    """5: five seeds from `first` on; 25..29: a range with both ends; 1,5,9: a list."""
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d{1,19})(?:\.\.(\d{1,19}))?", part)
        if match is None:
            raise UserError(f"seeds={text!r} should be a number of seeds (5), a range (25..29) or a list (1,5,9)")
        low, high = int(match[1]), int(match[2] or match[1])
        if "," not in text and match[2] is None:
            low, high = first, first + low - 1
            if high < low:
                raise UserError(f"seeds={text} must be at least 1")
        if high < low:
            raise UserError(f"seeds={part} is a range that ends before it starts: write it as {high}..{low}")
        if len(found) + high - low >= MAX_SEEDS:
            raise UserError(
                f"seeds={text} are {len(found) + high - low + 1:,} seeds: at most {MAX_SEEDS:,} are allowed"
            )
        found += range(low, high + 1)
    if twice := [seed for seed in found if found.count(seed) > 1]:
        raise UserError(f"seeds={text} contain {twice[0]} twice")
    return found


def plan(experiment: Experiment, seeds: Sequence[int], root: Path) -> list[SeedRun]:
    """A run for each seed, with one thread by default, because the threads of parallel runs compete for the cores."""
    runtime = replace(experiment.runtime, threads=experiment.runtime.threads or 1)
    return [SeedRun(s, replace(experiment, seed=s, runtime=runtime), root / f"seed{s}") for s in seeds]


def train_seeds(
    experiment: Experiment,
    seeds: Sequence[int],
    run: Path | str,
    jobs: int | None = None,
    log: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    progress_seconds: float = 30.0,
    executor: Executor = LOCAL,
) -> dict[str, Any]:
    """Train every seed in RUN/seedN, each in its own process, `jobs` in parallel (None: one per core).

    Finished runs are kept, interrupted ones resumed. Returns the last and the best evaluation of every seed and
    statistics over the finished seeds, and writes them to RUN/seeds.json and RUN/seeds.csv.
    """
    root = Path(run)
    planned = plan(experiment, seeds, root)
    refuse_others(planned, root)
    workers = executor.max_workers(jobs, planned[0].experiment)
    problems: dict[int, str] = {}
    started = time.monotonic()
    done = {job.seed for job in planned if finished(job)}
    log(f"{len(planned)} seed{'s' * (len(planned) > 1)}, {len(done)} finished; {workers} in parallel -> {root}")

    for text in advice(experiment.env, experiment.algo):
        log(f"warning: {text}")

    def on_end(result: JobResult[SeedRun]) -> None:
        job, seconds, problem = result
        if problem is not None:
            problems[job.seed] = problem
            log(f"{job.name} failed: {problem}")
            return
        done.add(job.seed)
        log(f"{job.name} finished in {duration(seconds)} ({len(done)} of {len(planned)}){last_evaluation(job.path)}")

    def on_progress(running: list[SeedRun]) -> None:
        for job in running:
            at, budget = frames_trained(job.path), job.experiment.frames
            percent = f"{min(100, 100 * at / budget):3.0f}%"
            log(
                f"{duration(time.monotonic() - started)}  {job.name}: {percent}, frames {count(at)} of {count(budget)}"
                f"{last_evaluation(job.path)}"
            )

    root.mkdir(parents=True, exist_ok=True)
    Run(root)._point_latest()
    run_all(planned, workers, on_end, stop, on_progress, progress_seconds, executor, log)
    return write(report(planned, problems), root)


def refuse_others(planned: Sequence[SeedRun], root: Path) -> None:
    """Refuse a directory with runs of another experiment, before anything is written."""
    if (root / EXPERIMENT).exists():
        raise UserError(f"{root} is a single run: choose another --run for the runs of several seeds")
    for job in planned:
        if (job.path / EXPERIMENT).exists() and (new := job.experiment.differs_from(Run(job.path).experiment())):
            raise UserError(f"{job.path} holds another experiment ({'; '.join(new[:3])}): choose another --run")


def last_evaluation(path: Path) -> str:
    """The last evaluation in words; empty if there is none."""
    rows = evaluations(path)
    if not rows:
        return ""
    success = rows[-1].get("success", math.nan)
    success_text = "" if math.isnan(success) else f", success {success:.2f}"
    return f", evaluation {rows[-1]['score']:.2f}{success_text} at {count(rows[-1]['frames'])}"


# -- over seeds ---------------------------------------------------------------------------------------------


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean, interquartile mean (IQM) and their 95% bootstrap intervals; one seed has no interval."""
    low, high = (float(bound) for bound in stratified_bootstrap([values], iqm))
    found = summary(values) | {"iqm_ci95_low": low, "iqm_ci95_high": high}
    return {name: None if len(values) < 2 and "ci95" in name else value for name, value in found.items()}


def report(planned: Sequence[SeedRun], problems: dict[int, str]) -> dict[str, Any]:
    """The last and the best evaluation of every seed, and statistics over the finished seeds."""
    rows = []
    for job in planned:
        found = evaluations(job.path)
        row: dict[str, Any] = {
            "seed": job.seed,
            "run": job.path.name,
            "finished": finished(job),
            "frames": max(frames_trained(job.path), int(found[-1]["frames"]) if found else 0),
            "problem": problems.get(job.seed),
        }
        for metric in METRICS:
            known = [e for e in found if not math.isnan(e.get(metric, math.nan))]
            if known:
                best = max(known, key=lambda e: (e[metric], e["frames"]))  # among equals the newest, as for checkpoints
                row[metric] = {"last": known[-1][metric], "best": best[metric], "best_frames": int(best["frames"])}
        rows.append(row)
    over: dict[str, Any] = {}
    for metric in METRICS:
        done = [row[metric] for row in rows if row["finished"] and metric in row]
        if done:
            over[metric] = {which: over_seeds([values[which] for values in done]) for which in ("last", "best")}
    return {"seeds": rows, "over_seeds": over}


def write(result: dict[str, Any], root: Path) -> dict[str, Any]:
    """Write seeds.json, and seeds.csv with a row per seed and rows of statistics over seeds below."""
    Run(root).write("seeds.json", json.dumps(result, indent=2))
    metrics = [metric for metric in METRICS if any(metric in row for row in result["seeds"])]
    with (root / "seeds.csv").open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        columns = [f"{metric}_{which}" for metric in metrics for which in ("last", "best", "best_frames")]
        out.writerow(["seed", "finished", "frames", *columns])
        for row in result["seeds"]:
            values = [row.get(m, {}).get(which, "") for m in metrics for which in ("last", "best", "best_frames")]
            out.writerow([row["seed"], int(row["finished"]), row["frames"], *values])
        for statistic in ("mean", "iqm", "ci95_low", "ci95_high"):
            over = [result["over_seeds"].get(metric, {}) for metric in metrics]
            values = [v for o in over for v in (*(o.get(w, {}).get(statistic, "") for w in ("last", "best")), "")]
            out.writerow([statistic, "", "", *("" if value is None else value for value in values)])
    return result


def table(result: dict[str, Any]) -> Table:
    """A table of the last and the best evaluation of every seed, and of statistics over seeds."""
    metrics = [metric for metric in METRICS if any(metric in row for row in result["seeds"])]
    shown = Table(title="evaluations during training", title_justify="left", box=None)
    for column in ("seed", "frames", *(c for m in metrics for c in (f"last {m}", f"best {m}", "at frames"))):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in result["seeds"]:
        cells: list[str] = []
        for metric in metrics:
            value = row.get(metric)
            numbers = value and (f"{value['last']:.2f}", f"{value['best']:.2f}", count(value["best_frames"]))
            cells += numbers or ("-", "-", "-")
        state = "" if row["finished"] else " (failed)" if row["problem"] else " (unfinished)"
        shown.add_row(f"{row['seed']}{state}", count(row["frames"]), *cells)
    for name, cell in STATISTICS.items():
        over = [result["over_seeds"].get(metric, {}).get(which) for metric in metrics for which in ("last", "best")]
        cells = ["-" if value is None else cell(value) for value in over]
        if any(over):
            shown.add_row(name, "", *(c for i in range(0, len(cells), 2) for c in (*cells[i : i + 2], "")))
    return shown


def interval(over: dict[str, Any]) -> str:
    return "-" if over["ci95_low"] is None else f"[{over['ci95_low']:.2f}, {over['ci95_high']:.2f}]"


STATISTICS: dict[str, Callable[[dict[str, Any]], str]] = {
    "mean": lambda over: f"{over['mean']:.2f}",
    "95% interval": interval,
    "IQM": lambda over: f"{over['iqm']:.2f}",
}


# -- evaluation -------------------------------------------------------------------------------------------


def evaluate_seeds(
    root: Path | str,
    modes: tuple[Mode, ...] = ("greedy", "sampled"),
    checkpoint: str | None = None,
    log: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """`evaluate` every run of a directory of seeds with the same protocol; statistics are over the seeds' means.

    A seed without the requested checkpoint is logged, listed under `missing` and left out. Writes ROOT/eval-*.json.
    """
    root = Path(root)
    runs = seed_runs(root)
    if not runs:
        raise UserError(f"{root} is neither a run nor a directory of seeds; bestiary train PRESET --seeds N makes one")
    results: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for path in runs:
        try:
            result = evaluate(path, modes=modes, checkpoint=checkpoint, **options)
        except BadCheckpoint as e:
            missing[path.name] = str(e)
            log(f"{path.name} is left out: {e}")
            continue
        results.append({"seed": int(path.name.removeprefix("seed")), "run": path.name, **result})
        means = ", ".join(f"{mode} {result[mode]['score']['mean']:.2f}" for mode in modes)
        log(f"{path.name}: {means}  ({len(results)} of {len(runs)})")
    if not results:
        raise UserError(f"none of the {len(runs)} seeds in {root} can be evaluated, the first: {missing[runs[0].name]}")
    out = summarise(results, modes, checkpoint or "last", missing)
    # the file of a seed begins with the frames of its checkpoint, which differ between seeds
    name = re.sub(r"^eval-\d+", f"eval-{out['checkpoint']}", Path(results[0]["file"]).name)
    Run(root).write(name, json.dumps(out, indent=2))
    return out | {"file": str(root / name)}


def summarise(
    results: list[dict[str, Any]], modes: tuple[Mode, ...], checkpoint: str, missing: dict[str, str]
) -> dict[str, Any]:
    """Evaluations of several seeds as one: the means of every seed, and statistics over them."""
    shared = ("environment", "env_changes", "protocol", "references")
    out: dict[str, Any] = {key: results[0][key] for key in shared if key in results[0]}
    out |= {"checkpoint": checkpoint, "missing": missing}
    out["seeds"] = [
        {
            **{key: one[key] for key in ("seed", "run", "checkpoint_frames", "file")},
            **{mode: {per: one[mode][per]["mean"] for per in PER if per in one[mode]} for mode in modes},
        }
        for one in results
    ]
    for mode in modes:
        out[mode] = {
            per: over_seeds([row[mode][per] for row in out["seeds"]])
            for per in PER
            if all(per in row[mode] for row in out["seeds"])
        }
        human = [one[mode].get("human_normalised") for one in results]
        if None not in human:
            out[mode]["human_normalised"] = float(np.mean(human))
    return out


PER = ("score", "success", "life_return")


def evaluation_table(result: dict[str, Any], modes: tuple[Mode, ...]) -> Table:
    """A table of the mean score of every seed, and of statistics over seeds."""
    columns = [(mode, per) for mode in modes for per in ("score", "success") if per in result[mode]]
    title = f"{result['environment']}, {result['checkpoint']} checkpoint of {len(result['seeds'])} seeds"
    shown = Table(title=title, title_justify="left", box=None)
    names = (f"{mode} {per}" for mode, per in columns)
    for column in ("seed", "frames", *names):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in result["seeds"]:
        values = (f"{row[mode][per]:.2f}" for mode, per in columns)
        shown.add_row(str(row["seed"]), count(row["checkpoint_frames"]), *values)
    for name, cell in STATISTICS.items():
        shown.add_row(name, "", *(cell(result[mode][per]) for mode, per in columns))
    return shown
