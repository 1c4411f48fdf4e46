"""Learning curves of runs: episodes are averaged in bins, seeds are aggregated, and settings name the lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from bestiary.analysis.seed_runs import seed_runs
from bestiary.config.aliases import upgrade_metric
from bestiary.config.experiment import Experiment
from bestiary.config.schema import encode
from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError
from bestiary.ops.stats import iqm, stratified_bootstrap
from bestiary.training.logs import read_table
from bestiary.training.run import EXPERIMENT, Run

Clock = Literal["frames", "steps", "seconds", "updates"]
Statistic = Literal["mean", "iqm"]
Interval = Literal["bootstrap", "range", "none"]

STATISTICS = {"mean": np.mean, "iqm": iqm}
TABLES = {"episodes": "finished episodes", "evaluations": "evaluations", "metrics": "rows in metrics.csv"}
TOLERANCE = 0.02  # relative difference up to which two ends of x are equal: last episodes never end at the same frame
CHOICES = ("env", "core", "algo")  # the settings that a label names first
# runs that differ only in these settings share a line
SAME_LEARNING = ("seed", "evaluation", "checkpoint", "log", "video", "runtime.threads", "runtime.device")


class Line(NamedTuple):
    """A line of a figure: an aggregate over seeds at each x and, for more than one seed, its interval."""

    label: str
    x: np.ndarray  # [N]
    y: np.ndarray  # [N]
    low: np.ndarray | None  # [N]
    high: np.ndarray | None  # [N]
    seeds: int


class Curves(NamedTuple):
    lines: list[Line]
    notes: list[str]  # sentences on runs that were skipped, cut or pooled although their settings differ
    experiments: list[Experiment]  # of every run


class Metric(NamedTuple):
    """A column of a table of the run directory."""

    table: str  # file name without .csv
    column: str
    name: str  # label of the y axis


@dataclass(frozen=True, eq=False)
class SeedCurve:
    """The curve of one run: values of the metric in order of x."""

    path: Path
    experiment: Experiment
    x: np.ndarray
    y: np.ndarray


def aggregate(
    label: str,
    x: ArrayLike,
    tasks: Sequence[ArrayLike],
    statistic: Statistic = "mean",
    interval: Interval = "bootstrap",
) -> Line:
    """A line through values [seeds, N] of one or more tasks; the bootstrap is stratified by task."""
    groups = [np.asarray(values, float) for values in tasks]
    pooled = np.concatenate(groups)
    low = high = None
    if interval == "bootstrap" and max(map(len, groups)) > 1:  # one seed per task cannot be resampled
        low, high = stratified_bootstrap(groups, STATISTICS[statistic])
    elif interval == "range" and len(pooled) > 1:
        low, high = pooled.min(0), pooled.max(0)
    return Line(label, np.asarray(x, float), STATISTICS[statistic](pooled, axis=0), low, high, len(pooled))


def curves(
    runs: Sequence[Path | str],
    metric: str = "score",
    x: Clock = "frames",
    statistic: Statistic = "mean",
    interval: Interval = "bootstrap",
    bins: int = 60,
    smooth: int = 1,
    labels: Mapping[str, Sequence[str]] | None = None,
) -> Curves:
    """One line for each label, and one for each experiment among the runs without a label.

    A path is a run, or a directory of seeds, which stands for all of its runs.
    """
    if bins < 1 or smooth < 1:
        raise UserError(f"bins={bins} and smooth={smooth} must be at least 1")
    wanted = find_metric(metric)
    paths, skipped = find_runs(runs)
    seeds = [load(path, wanted, x) for path in paths]
    chosen = {label: named(seeds, label, patterns) for label, patterns in (labels or {}).items()}
    rest = [s for s in seeds if not any(s in line for line in chosen.values())]
    automatic, notes = by_experiment(rest)
    notes = [*skipped, *notes]
    lines = []
    for label, members in {**chosen, **automatic}.items():
        grid, values = common(members, wanted, bins)
        if not len(grid):
            raise UserError(f"the runs of {label!r} have no range of {x} in common in which all of them have {metric}")
        longest, end = max(s.x[-1] for s in members), min(s.x[-1] for s in members)
        if longest - end > TOLERANCE * longest:
            notes.append(
                f"the runs of {label!r} end between {end:,.0f} and {longest:,.0f} {x}; the line ends with the first"
            )
        tasks: dict[str, list[np.ndarray]] = {}
        for seed, row in zip(members, smoothed(values, smooth), strict=True):
            tasks.setdefault(str(encode(seed.experiment.env)), []).append(row)
        lines.append(aggregate(label, grid, list(tasks.values()), statistic, interval))
    return Curves(lines, notes, [s.experiment for s in seeds])


def find_runs(paths: Sequence[Path | str]) -> tuple[list[Path], list[str]]:
    """The runs that paths name, and a note on every path that names none, as the seeds.csv that `seed*` matches."""
    given = unique(paths)
    found: list[Path] = []
    notes = []
    for path in given:
        runs = seed_runs(path) or [path]
        if path.exists() and not (runs[0] / EXPERIMENT).is_file():
            notes.append(f"{path} is neither a run nor a directory of seeds: skipped")
        else:
            found += runs
    return unique(found or given), notes


def unique(runs: Sequence[Path | str]) -> list[Path]:
    """Each path once, although `runs/*` also matches the link runs/latest."""
    if not runs:
        raise UserError("name at least one run")
    return list({path.resolve(): path for path in reversed([Path(run) for run in runs])}.values())[::-1]


def named(seeds: Sequence[SeedCurve], label: str, patterns: Sequence[str]) -> list[SeedCurve]:
    """The runs that a label selects, by path, name or pattern."""
    found = []
    for pattern in patterns:
        matching = [s for s in seeds if s.path.resolve() == Path(pattern).resolve() or s.path.match(pattern)]
        if not matching:
            given = did_you_mean(pattern, [str(s.path) for s in seeds])
            raise UserError(f"label {label!r} names {pattern}, which matches none of the runs: {given}")
        found += [s for s in matching if s not in found]
    return found


def by_experiment(seeds: Sequence[SeedCurve]) -> tuple[dict[str, list[SeedCurve]], list[str]]:
    """Runs by experiment, each group under the settings that distinguish it; and a note on settings not in a label."""
    encoded = [encode(seed.experiment) for seed in seeds]
    groups: list[tuple[dict[str, str], list[SeedCurve]]] = []
    for seed, found in zip(seeds, distinctions(encoded), strict=True):
        free = [name for name in found if any(f"{name}.".startswith(f"{setting}.") for setting in SAME_LEARNING)]
        settings = {name: text for name, text in found.items() if name not in free}
        members = next((members for other, members in groups if other == settings), None)
        if members is None:
            groups.append((settings, [seed]))
        else:
            members.append(seed)
    if len(groups) == 1:
        return {", ".join(f"{name}={encoded[0][name]['kind']}" for name in CHOICES): list(seeds)}, []
    names, others = distinguishing([settings for settings, _ in groups])
    lines = {", ".join(f"{n}={settings[n]}" for n in names if n in settings): members for settings, members in groups}
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return lines, [f"the lines also differ in {', '.join(others[:5])}{more}"] if others else []


def distinctions(configs: Sequence[Any], name: str = "") -> list[dict[str, str]]:
    """For each encoded configuration the settings in which not all agree: {"core": "lstm", "env.delay": "30"}."""
    found: list[dict[str, str]] = [{} for _ in configs]
    shown = [str(c.get("kind", c) if isinstance(c, dict) else c) for c in configs]
    if len(set(shown)) > 1:
        found = [{name: text} for text in shown]
    for text in dict.fromkeys(shown):  # settings of parts of the same kind are compared
        same = [i for i, c in enumerate(configs) if shown[i] == text and isinstance(c, dict)]
        for key in dict.fromkeys(k for i in same for k in configs[i] if k != "kind"):
            deeper = distinctions([configs[i].get(key) for i in same], f"{name}.{key}" if name else key)
            for i, distinction in zip(same, deeper, strict=True):
                found[i] |= distinction
    return found


def distinguishing(found: Sequence[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Names of settings that suffice to distinguish all lines, and the names of the other differing settings."""
    parts = [
        *CHOICES,
        *(f.name for f in fields(Experiment)),
    ]  # env.delay before algo.unroll, which often follows from it
    names = {name for f in found for name in f}
    names = sorted(names, key=lambda name: (name not in CHOICES, parts.index(name.split(".")[0]), name))

    def groups(chosen: list[str]) -> int:
        return len({tuple(f.get(name) for name in chosen) for f in found})

    kept: list[str] = []
    for name in names:
        if groups([*kept, name]) > groups(kept):
            kept.append(name)
    return kept, [name for name in names if name not in kept]


def find_metric(name: str) -> Metric:
    """score, success: of training episodes; eval, eval.COLUMN: of evaluations; else a column of metrics.csv."""
    if name in ("score", "success"):
        return Metric("episodes", name, f"{name} while training")
    head, _, column = name.partition(".")
    if head == "eval":
        return Metric("evaluations", column or "score", f"{column or 'score'} of evaluations".replace("_", " "))
    return Metric("metrics", name, name.replace("_", " "))


def offered(run: Run) -> list[str]:
    """The metrics of a run, as `find_metric` knows them."""
    evaluations = ["eval" if c == "score" else f"eval.{c}" for c in header(run, "evaluations")]
    episodes = [c for c in ("score", "success") if c in header(run, "episodes")]
    names = dict.fromkeys((*episodes, *evaluations, *header(run, "metrics")))
    return [name for name in names if name not in ("frames", "eval.frames")]


def load(path: Path, metric: Metric, x: Clock) -> SeedCurve:
    """The curve of a run. Tables count frames; other values of x are interpolated from metrics.csv."""
    run = Run(path)
    experiment = run.experiment()
    at, y = read(run, metric.table, metric.column).T
    if x != "frames":
        frames, clock = read(run, "metrics", x).T
        at = np.interp(at, [0, *frames], [0, *clock])
    return SeedCurve(path, experiment, at, y)


def header(run: Run, table: str) -> list[str]:
    return read_table(run.path / f"{table}.csv")[0]


def read(run: Run, table: str, column: str) -> np.ndarray:
    """[N, 2]: frames and a column, without empty cells and without a last row that a crash left incomplete."""
    columns, table_rows = read_table(run.path / f"{table}.csv")
    column = upgrade_metric(column)
    rows: list[tuple[str, str]] = []
    if table_rows:
        if column not in columns:
            name = {"evaluations": f"eval.{column}"}.get(table, column)
            raise UserError(f"{run.path} has no {name!r}: {did_you_mean(name, offered(run))}")
        frames, value = columns.index("frames"), columns.index(column)
        rows = [(row[frames], row[value] or "nan") for row in table_rows]
    values = np.array(rows, float).reshape(-1, 2)
    values = values[np.isfinite(values).all(1)]
    if not len(values):
        raise UserError(f"{run.path} has no {TABLES[table]} yet" + (f" with {column}" if rows else ""))
    return values


def common(seeds: Sequence[SeedCurve], metric: Metric, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """x [N] and values [seeds, N] where all seeds have values: evaluations at their own x, other metrics in bins."""
    end = min(s.x[-1] for s in seeds)
    if metric.table == "evaluations":  # few, and usually at the same frames: interpolation rarely matters
        grid = min((s.x for s in seeds), key=len)
        near = TOLERANCE * end
        grid = grid[(grid >= max(s.x[0] for s in seeds) - near) & (grid <= end + near)]
        return grid, np.stack([np.interp(grid, s.x, s.y) for s in seeds])
    values = np.stack([binned(s.x, s.y, end, bins) for s in seeds])
    known = np.isfinite(values).all(0)
    return (np.arange(1, bins + 1) * end / bins)[known], values[:, known]


def binned(x: np.ndarray, y: np.ndarray, end: float, bins: int) -> np.ndarray:
    """Means over bins of equal width, each with its right edge; an empty bin repeats the one before it."""
    at = np.ceil(x * bins / end).astype(int).clip(1) - 1
    inside = at < bins
    counts = np.bincount(at[inside], minlength=bins)
    with np.errstate(invalid="ignore"):
        means = np.bincount(at[inside], y[inside], bins) / counts
    return means[np.maximum.accumulate(np.where(counts > 0, np.arange(bins), 0))]


def smoothed(y: np.ndarray, window: int) -> np.ndarray:
    """Trailing moving average over `window` points; over fewer at the start."""
    before = np.cumsum(y, axis=-1)
    sums = before.copy()
    sums[..., window:] -= before[..., :-window]
    return sums / np.minimum(np.arange(1, y.shape[-1] + 1), window)
