"""One experiment with many seeds: trained side by side, evaluated alike, told as one number with an interval."""

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

METRICS = ("score", "success")  # of evaluations.csv; the second only where the environment says what success is
MANY = 1_000  # more seeds than these are a slip of the finger


class SeedRun(NamedTuple):
    seed: int
    experiment: Experiment
    path: Path

    @property
    def name(self) -> str:
        return f"seed {self.seed}"


def parse_seeds(text: str, first: int = 0) -> list[int]:
    """5: so many, counted from the first; 25..29: a range with both ends; 1,5,9: these."""
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d{1,19})(?:\.\.(\d{1,19}))?", part)
        if match is None:
            raise UserError(f"seeds={text!r} should be how many (5), a range (25..29) or a list (1,5,9)")
        low, high = int(match[1]), int(match[2] or match[1])
        if "," not in text and match[2] is None:
            low, high = first, first + low - 1
            if high < low:
                raise UserError(f"seeds={text} must be at least 1")
        if high < low:
            raise UserError(f"seeds={part} runs backwards: write {high}..{low}")
        if len(found) + high - low >= MANY:
            raise UserError(f"seeds={text} are {len(found) + high - low + 1:,}: at most {MANY:,} at once")
        found += range(low, high + 1)
    if twice := [seed for seed in found if found.count(seed) > 1]:
        raise UserError(f"seeds={text} name {twice[0]} twice")
    return found


def plan(experiment: Experiment, seeds: Sequence[int], root: Path) -> list[SeedRun]:
    """A run for each seed, with one thread unless told otherwise: side by side, more would be in each other's way."""
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
    """Train every seed in RUN/seedN, `jobs` at a time (None: one per core), each in a process of its own.

    What is finished is left alone, what was broken off goes on. Returns, and writes to RUN/seeds.json and
    RUN/seeds.csv, the last and the best evaluation of every seed, and over those that are finished.
    """
    root = Path(run)
    planned = plan(experiment, seeds, root)
    refuse_others(planned, root)
    many = executor.max_workers(jobs, planned[0].experiment)
    problems: dict[int, str] = {}
    started = time.monotonic()
    done = {job.seed for job in planned if finished(job)}
    log(f"{len(planned)} seed{'s' * (len(planned) > 1)}, {len(done)} finished; {many} at a time -> {root}")

    for text in advice(experiment.env, experiment.algo):
        log(f"warning: {text}")

    def tell(ended: JobResult[SeedRun]) -> None:
        job, _, problem = ended
        if problem is not None:
            problems[job.seed] = problem
            log(f"{job.name} failed: {problem}")
            return
        done.add(job.seed)
        log(f"{job.name} finished in {duration(ended.seconds)} ({len(done)} of {len(planned)}){_evaluated(job.path)}")

    def watch(working: list[SeedRun]) -> None:
        for job in working:
            at, budget = frames_trained(job.path), job.experiment.frames
            share = f"{min(100, 100 * at / budget):3.0f}%"
            log(
                f"{duration(time.monotonic() - started)}  {job.name}: {share}, frames {count(at)} of {count(budget)}"
                f"{_evaluated(job.path)}"
            )

    root.mkdir(parents=True, exist_ok=True)
    Run(root)._point_latest()
    run_all(planned, many, tell, stop, watch, progress_seconds, executor, log)
    return write(report(planned, problems), root)


def refuse_others(planned: Sequence[SeedRun], root: Path) -> None:
    """Before anything is started or written: what is there already must be the same experiment."""
    if (root / EXPERIMENT).exists():
        raise UserError(f"{root} is a run itself; choose another --run to hold the runs of several seeds")
    for job in planned:
        if (job.path / EXPERIMENT).exists() and (new := job.experiment.differs_from(Run(job.path).experiment())):
            raise UserError(f"{job.path} holds another experiment ({'; '.join(new[:3])}); choose another --run")


def _evaluated(path: Path) -> str:
    """The last evaluation in words, if there is one."""
    rows = evaluations(path)
    if not rows:
        return ""
    success = rows[-1].get("success", math.nan)
    also = "" if math.isnan(success) else f", success {success:.2f}"
    return f", evaluation {rows[-1]['score']:.2f}{also} at {count(rows[-1]['frames'])}"


# -- over seeds ---------------------------------------------------------------------------------------------


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean, interquartile mean and their 95% bootstrap intervals; one seed has no interval."""
    low, high = (float(bound) for bound in stratified_bootstrap([values], iqm))
    found = summary(values) | {"iqm_ci95_low": low, "iqm_ci95_high": high}
    return {name: None if len(values) < 2 and "ci95" in name else value for name, value in found.items()}


def report(planned: Sequence[SeedRun], problems: dict[int, str]) -> dict[str, Any]:
    """The last and the best evaluation of every seed; and over the seeds that are finished, which can be compared."""
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
                best = max(known, key=lambda e: (e[metric], e["frames"]))  # of equals the newer, as checkpoints do
                row[metric] = {"last": known[-1][metric], "best": best[metric], "best_frames": int(best["frames"])}
        rows.append(row)
    over: dict[str, Any] = {}
    for metric in METRICS:
        done = [row[metric] for row in rows if row["finished"] and metric in row]
        if done:
            over[metric] = {which: over_seeds([values[which] for values in done]) for which in ("last", "best")}
    return {"seeds": rows, "over_seeds": over}


def write(result: dict[str, Any], root: Path) -> dict[str, Any]:
    """seeds.json, and seeds.csv: a row per seed, and below them what is over seeds."""
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
    """The last and the best evaluation of every seed, and over seeds."""
    metrics = [metric for metric in METRICS if any(metric in row for row in result["seeds"])]
    shown = Table(title="evaluations while training", title_justify="left", box=None)
    for column in ("seed", "frames", *(c for m in metrics for c in (f"last {m}", f"best {m}", "at frames"))):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in result["seeds"]:
        cells: list[str] = []
        for metric in metrics:
            value = row.get(metric)
            known = value and (f"{value['last']:.2f}", f"{value['best']:.2f}", count(value["best_frames"]))
            cells += known or ("-", "-", "-")
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
    """`evaluate` every run of a directory of seeds alike; statistics over seeds are those of their means.

    A seed without the checkpoint asked for is told, named in the result, and left out. Writes ROOT/eval-*.json.
    """
    root = Path(root)
    runs = seed_runs(root)
    if not runs:
        raise UserError(f"{root} is not a run and holds none: seeds are trained with bestiary train PRESET --seeds N")
    found: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for path in runs:
        try:
            result = evaluate(path, modes=modes, checkpoint=checkpoint, **options)
        except BadCheckpoint as e:
            missing[path.name] = str(e)
            log(f"{path.name} is left out: {e}")
            continue
        found.append({"seed": int(path.name.removeprefix("seed")), "run": path.name, **result})
        means = ", ".join(f"{mode} {result[mode]['game']['mean']:.2f}" for mode in modes)
        log(f"{path.name}: {means}  ({len(found)} of {len(runs)})")
    if not found:
        raise UserError(f"none of the {len(runs)} seeds in {root} can be evaluated, the first: {missing[runs[0].name]}")
    out: dict[str, Any] = {
        key: found[0][key] for key in ("environment", "elsewhere", "protocol", "references") if key in found[0]
    }
    out["checkpoint"] = checkpoint or "last"
    out["missing"] = missing
    out["seeds"] = [
        {
            **{key: one[key] for key in ("seed", "run", "checkpoint_frames", "file")},
            **{mode: {per: one[mode][per]["mean"] for per in PER if per in one[mode]} for mode in modes},
        }
        for one in found
    ]
    for mode in modes:
        out[mode] = {
            per: over_seeds([row[mode][per] for row in out["seeds"]])
            for per in PER
            if all(per in row[mode] for row in out["seeds"])
        }
        human = [one[mode].get("human_normalised") for one in found]
        if None not in human:
            out[mode]["human_normalised"] = float(np.mean(human))
    # a seed's file begins with its own frames, which need not be those of the others
    name = re.sub(r"^eval-\d+", f"eval-{out['checkpoint']}", Path(found[0]["file"]).name)
    Run(root).write(name, json.dumps(out, indent=2))
    return out | {"file": str(root / name)}


PER = ("game", "success", "life")


def evaluation_table(result: dict[str, Any], modes: tuple[Mode, ...]) -> Table:
    """Means of every seed, and over seeds."""
    columns = [(mode, per) for mode in modes for per in ("game", "success") if per in result[mode]]
    title = f"{result['environment']}, {result['checkpoint']} checkpoint of {len(result['seeds'])} seeds"
    shown = Table(title=title, title_justify="left", box=None)
    names = (f"{mode} {'score' if per == 'game' else per}" for mode, per in columns)
    for column in ("seed", "frames", *names):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in result["seeds"]:
        values = (f"{row[mode][per]:.2f}" for mode, per in columns)
        shown.add_row(str(row["seed"]), count(row["checkpoint_frames"]), *values)
    for name, cell in STATISTICS.items():
        shown.add_row(name, "", *(cell(result[mode][per]) for mode, per in columns))
    return shown
