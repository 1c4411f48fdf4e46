"""Hyper-parameter search with Optuna: trials of several seeds run in parallel, are pruned early, and can be resumed."""

import csv
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bestiary.config.compat import optuna_trial
from bestiary.config.experiment import Experiment
from bestiary.config.extras import available, require
from bestiary.config.schema import decode, differences, encode
from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError
from bestiary.launch.executor import LOCAL, POLL_SECONDS, Executor, JobPool, evaluations, finished, frames_trained
from bestiary.launch.seeds import METRICS, SeedRun, plan
from bestiary.launch.spaces import Choices, Range, Space, apply, as_text, flags, load_space, read_space
from bestiary.launch.sweep_settings import SweepSettings
from bestiary.training.display import count, duration
from bestiary.training.run import Run

require("optuna", "sweep")  # before the imports that fail without it
import optuna  # type: ignore[import-not-found]  # noqa: E402
from optuna.storages import JournalStorage  # type: ignore[import-not-found]  # noqa: E402
from optuna.storages.journal import JournalFileBackend  # type: ignore[import-not-found]  # noqa: E402
from optuna.trial import FrozenTrial, TrialState  # type: ignore[import-not-found]  # noqa: E402

STARTUP_TRIALS = 5  # trials that must finish before the pruner stops one
WARMUP = 0.25  # fraction of a run's evaluations before which it is not pruned, because early scores predict little
PRUNE_SECONDS = 1.0  # time between two reports of intermediate values to the pruner
MIN_TRIALS = 10  # finished trials that are needed to estimate importances
MAX_FAILURES = 3  # failed trials without a finished one, after which the sweep ends: not the settings are the cause
HOW_IT_RUNS = ("runtime", "checkpoint", "log", "video")  # parts of an experiment that may change when a sweep resumes


@dataclass(frozen=True)
class Sweep:
    """An experiment, the search space, and how to search."""

    experiment: Experiment
    space: Space
    settings: SweepSettings

    def __post_init__(self) -> None:
        settings = self.settings
        if settings.metric not in METRICS:
            raise UserError(f"there is no metric {settings.metric!r}: {did_you_mean(settings.metric, METRICS)}")
        if settings.seeds_per_trial < 1 or settings.last < 1:
            raise UserError(f"seeds-per-trial={settings.seeds_per_trial} and last={settings.last} must be at least 1")
        if settings.trials < 1:
            raise UserError(f"trials={settings.trials} must be at least 1")
        if self.experiment.evaluation.episodes < 1:
            raise UserError("evaluation.episodes=0 leaves no metric to compare trials by: it must be at least 1")

    def to_json(self) -> dict[str, Any]:
        """What must be equal for a sweep to resume."""
        kept = {name: value for name, value in encode(self.experiment).items() if name not in HOW_IT_RUNS}
        entries = {name: {k: encode(v) for k, v in entry._asdict().items()} for name, entry in self.space.items()}
        numbers = {name: getattr(self.settings, name) for name in ("seeds_per_trial", "metric", "last")}
        return {"experiment": kept, "space": entries, **numbers}

    def values(self, path: Path) -> list[float]:
        """The metric at every evaluation of a run; empty where the environment does not define it."""
        found = [row.get(self.settings.metric, math.nan) for row in evaluations(path)]
        return [value for value in found if not math.isnan(value)]

    def result(self, job: SeedRun) -> float:
        values = self.values(job.path)
        if not values:
            raise UserError(f"the evaluations of {job.path} have no {self.settings.metric}: choose another --metric")
        return float(np.mean(values[-self.settings.last :]))

    def curve(self, job: SeedRun) -> dict[int, float]:
        """The metric by the number of the evaluation, because its frames differ a little between trials."""
        every = self.experiment.evaluation.every
        if every is None:
            return {}
        metric = self.settings.metric
        rows = [row for row in evaluations(job.path) if not math.isnan(row.get(metric, math.nan))]
        return {round(row["frames"] / every): row[metric] for row in rows}


@dataclass
class ActiveTrial:
    """A trial whose runs are waiting or running."""

    number: int
    trial: optuna.Trial
    jobs: list[SeedRun]
    waiting: list[SeedRun]
    problem: str | None = None
    pruned: bool = False

    @property
    def started(self) -> list[SeedRun]:
        return [job for job in self.jobs if job not in self.waiting]


class TrialResult(NamedTuple):
    number: int
    state: str  # complete, pruned, running, waiting or failed
    value: float | None  # of a pruned trial: its last intermediate value
    seeds: dict[str, float]
    values: dict[str, Any]  # the hyper-parameters
    problem: str


def sweep(
    experiment: Experiment,
    space: Mapping[str, Any] | str,
    run: Path | str,
    settings: SweepSettings | None = None,
    jobs: int | None = None,
    log: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    progress_seconds: float = 30.0,
    executor: Executor = LOCAL,
) -> list[TrialResult]:
    """Search a space of hyper-parameters, or resume the sweep in the directory `run`. Returns the trials, best first.

    The space is the name of a builtin one, a file, or a mapping such as
    {"algo.optimizer.lr": {"low": 1e-5, "high": 1e-2, "log": True}}. The value of a trial is the mean over its seeds of
    their last evaluations. Writes RUN/trials.csv and, if matplotlib is installed, RUN/sweep.png. The runs are
    RUN/trial0000/seed0 and so on.
    """
    entries = load_space(space, experiment) if isinstance(space, str) else read_space(space, experiment)
    search = Sweep(experiment, entries, settings or SweepSettings())
    root = Path(run)
    refuse_others(search, root)
    workers = executor.max_workers(jobs, experiment)
    with JobPool[SeedRun](workers, root, executor, log) as pool:
        Run(root)._point_latest()
        Run(root).write("sweep.json", json.dumps(search.to_json(), indent=2))
        study = open_study(search, root)
        if search.settings.prune and experiment.evaluation.every is None:
            log("no trial is pruned, because runs are evaluated only at their end: --evaluation.every changes that")
        try:
            _TrialRunner(search, study, pool, root, log).run(stop, progress_seconds)
        finally:
            trials = results(search, study)
            write(search, trials, root)
    if available("plot"):
        from bestiary.launch.sweep_plot import plot_sweep

        shares = importances(study, search.space)
        plot_sweep(search.space, search.settings.metric, trials, shares, root / "sweep.png")
    else:
        log('no figure is written: the extra "plot" is not installed')
    return trials


def refuse_others(search: Sweep, root: Path) -> None:
    """Refuse a directory of another sweep: trials of other spaces or seeds cannot be compared."""
    file = root / "sweep.json"
    if file.exists():
        known = json.loads(file.read_text())
        current = {name: encode(getattr(search.experiment, name)) for name in HOW_IT_RUNS}
        known["experiment"] = encode(decode(Experiment, known["experiment"] | current))  # under the names of today
        known["experiment"] = {name: v for name, v in known["experiment"].items() if name not in HOW_IT_RUNS}
        if different := differences(known, json.loads(json.dumps(search.to_json()))):
            raise UserError(f"{root} holds another sweep ({'; '.join(different[:3])}): choose another --run")
    elif root.exists() and any(path.name != ".lock" for path in root.iterdir()):
        raise UserError(f"{root} is neither empty nor a sweep: choose another --run")


def open_study(search: Sweep, root: Path) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="sweep",
        storage=JournalStorage(JournalFileBackend(str(root / "journal.log"))),
        direction="maximize",
        load_if_exists=True,
    )
    # the seed depends on the number of trials, or a resumed sweep would suggest the values of its first trials again
    seed = search.experiment.seed + len(study.get_trials(deepcopy=False))
    random, tpe = optuna.samplers.RandomSampler, optuna.samplers.TPESampler
    study.sampler = random(seed=seed) if search.settings.sampler == "random" else tpe(seed=seed)
    every = search.experiment.evaluation.every
    if search.settings.prune and every is not None:
        warmup = math.ceil(WARMUP * search.experiment.frames / every)
        study.pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=warmup)
    else:
        study.pruner = optuna.pruners.NopPruner()
    return study


class _TrialRunner:
    """Runs trials until there are as many as wanted, or until it is asked to stop."""

    def __init__(
        self, search: Sweep, study: optuna.Study, pool: JobPool[SeedRun], root: Path, log: Callable[[str], None]
    ) -> None:
        self.search, self.study, self.pool, self.root, self.log = search, study, pool, root, log
        self.wanted = search.settings.trials
        self.active: list[ActiveTrial] = []
        self.failures = 0
        self.any_complete = bool(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))

    def run(self, stop: Callable[[], bool], progress_seconds: float) -> None:
        started = last_progress = last_report = time.monotonic()
        self._resume_trials()
        known = len(self.study.get_trials(deepcopy=False)) - len(self.active)
        self.log(f"{known} of {self.wanted} trials have ended; {self.pool.max_workers} runs in parallel")
        while not stop():
            while self.pool.free and (active := self._next()) is not None:
                self.pool.start(active.waiting.pop(0))
            if not self.active:
                break
            time.sleep(POLL_SECONDS)
            ended = self.pool.poll()
            for job, _, problem in ended:
                active = next(one for one in self.active if job in one.jobs)
                if problem is not None and active.problem is None:
                    self._stop_runs(active)
                    active.problem = f"{job.name}: {problem}"
            if ended or time.monotonic() - last_report >= PRUNE_SECONDS:
                last_report = time.monotonic()
                for active in list(self.active):
                    self._report(active)
                    self._close(active)
            if time.monotonic() - last_progress >= progress_seconds:
                last_progress = time.monotonic()
                self._log_progress(duration(last_progress - started))

    # -- start ------------------------------------------------------------------------------------

    def _resume_trials(self) -> None:
        """Reopen interrupted trials with their own hyper-parameters."""
        for frozen in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._open(optuna_trial(self.study, frozen))

    def _next(self) -> ActiveTrial | None:
        """An active trial with a run to start, else a new trial; None: there are as many trials as wanted."""
        while True:
            if waiting := [active for active in self.active if active.waiting]:
                return waiting[0]
            if len(self.study.get_trials(deepcopy=False)) >= self.wanted:
                return None
            self._open(self.study.ask())

    def _open(self, trial: optuna.Trial) -> None:
        values = {name: suggest(trial, name, entry) for name, entry in self.search.space.items()}
        if (same := self._same_values(trial)) is not None:  # and the same seeds: the result is known
            trial.set_user_attr("same_as", same.number)
            trial.set_user_attr("seeds", same.user_attrs["seeds"])
            self.study.tell(trial, same.value)
            self.log(f"trial {trial.number}: the same hyper-parameters as trial {same.number}")
            return
        path = self.root / f"trial{trial.number:04d}"
        try:
            experiment = apply(self.search.experiment, values)
            first = experiment.seed
            jobs = plan(experiment, range(first, first + self.search.settings.seeds_per_trial), path)
        except UserError as e:  # each value is valid, but not in this combination
            self._fail(trial, str(e))
            return
        waiting = [job for job in jobs if not finished(job)]
        self.active.append(ActiveTrial(trial.number, trial, jobs, waiting))
        if not waiting:
            self._close(self.active[-1])

    def _same_values(self, trial: optuna.Trial) -> FrozenTrial | None:
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return next((other for other in complete if other.params == trial.params), None)

    # -- end --------------------------------------------------------------------------------------

    def _report(self, active: ActiveTrial) -> None:
        """Report the intermediate values that all started runs have reached, and prune the trial if Optuna says so."""
        if active.pruned or active.problem is not None or not active.started:
            return
        curves = [self.search.curve(job) for job in active.started]
        reported = self.study.get_trials(deepcopy=False)[active.number].intermediate_values
        for step in sorted(set.intersection(*map(set, curves)) - set(reported)):
            active.trial.report(float(np.mean([curve[step] for curve in curves])), step)
            if not all(map(finished, active.jobs)) and active.trial.should_prune():
                active.pruned = True
                self._stop_runs(active)
                return

    def _stop_runs(self, active: ActiveTrial) -> None:
        active.waiting.clear()
        for job in active.jobs:
            self.pool.stop(job)

    def _close(self, active: ActiveTrial) -> None:
        """Tell Optuna the outcome of a trial without waiting and running runs."""
        if active.waiting or any(running.job in active.jobs for running in self.pool.running):
            return
        self.active.remove(active)
        if active.problem is not None:
            self._fail(active.trial, active.problem)
            return
        if active.pruned:
            self.study.tell(active.trial, state=TrialState.PRUNED)
            self._log_end(active.number, "pruned: it is below the median of the other trials")
            return
        seeds = {str(job.seed): self.search.result(job) for job in active.jobs}
        value = float(np.mean(list(seeds.values())))
        active.trial.set_user_attr("seeds", seeds)
        self.study.tell(active.trial, value)
        self.any_complete = True
        best = self.study.best_trial
        listed = ", ".join(f"{score:.2f}" for score in seeds.values())
        rank = "the best" if best.number == active.number else f"the best is trial {best.number}: {best.value:.2f}"
        self._log_end(active.number, f"{self.search.settings.metric} {value:.2f} ({listed}); {rank}")

    def _fail(self, trial: optuna.Trial, problem: str) -> None:
        trial.set_user_attr("problem", problem)
        self.study.tell(trial, state=TrialState.FAIL)
        self._log_end(trial.number, f"failed: {problem}")
        self.failures += 1
        if not self.any_complete and self.failures >= MAX_FAILURES:
            raise UserError(f"the first {self.failures} trials failed, the last: {problem}")

    def _log_end(self, number: int, text: str) -> None:
        ended = len(self.study.get_trials(deepcopy=False)) - len(self.active)
        self.log(f"trial {number}: {text}  ({ended} of {self.wanted})")
        write(self.search, results(self.search, self.study), self.root)

    def _log_progress(self, passed: str) -> None:
        for running in self.pool.running:
            job = running.job
            values = self.search.values(job.path)
            frames = f"frames {count(frames_trained(job.path))} of {count(job.experiment.frames)}"
            latest = f", {self.search.settings.metric} {values[-1]:.2f}" if values else ""
            self.log(f"{passed}  {job.path.parent.name}, {job.name}: {frames}{latest}")


def suggest(trial: optuna.Trial, name: str, entry: Range | Choices) -> Any:
    """The sampler's value of a hyper-parameter. Optuna knows a tuple by its JSON text."""
    if isinstance(entry, Choices):
        return by_label(entry)[trial.suggest_categorical(name, list(by_label(entry)))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that high is not a multiple of the step above low
        if entry.whole:
            return trial.suggest_int(name, int(entry.low), int(entry.high), step=int(entry.step or 1), log=entry.log)
        return trial.suggest_float(name, entry.low, entry.high, step=entry.step, log=entry.log)


def by_label(entry: Choices) -> dict[Any, Any]:
    return {json.dumps(value) if isinstance(value, tuple) else value: value for value in entry.values}


def results(search: Sweep, study: optuna.Study) -> list[TrialResult]:
    """Every trial: the complete ones from best to worst, then those that were pruned, are running, or failed."""
    found = []
    for frozen in study.get_trials(deepcopy=False):
        state = {"FAIL": "failed"}.get(frozen.state.name, frozen.state.name.lower())
        value = frozen.value if state == "complete" else None
        if state == "pruned" and frozen.last_step is not None:
            value = frozen.intermediate_values[frozen.last_step]
        values = {}
        for name, entry in search.space.items():
            if name in frozen.params:
                chosen = frozen.params[name]
                values[name] = by_label(entry)[chosen] if isinstance(entry, Choices) else chosen
        attrs = frozen.user_attrs
        found.append(TrialResult(frozen.number, state, value, attrs.get("seeds", {}), values, attrs.get("problem", "")))
    order = ("complete", "pruned", "running", "waiting", "failed")
    return sorted(found, key=lambda t: (order.index(t.state), -(t.value if t.value is not None else 0), t.number))


def write(search: Sweep, trials: Sequence[TrialResult], root: Path) -> None:
    """trials.csv: a row per trial, in order of their numbers."""
    first, settings = search.experiment.seed, search.settings
    seeds = [str(seed) for seed in range(first, first + settings.seeds_per_trial)]
    with (root / "trials.csv").open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["trial", "state", settings.metric, *(f"seed{seed}" for seed in seeds), *search.space, "problem"])
        for trial in sorted(trials):
            values = [as_text(trial.values.get(name, "")) for name in search.space]
            value = "" if trial.value is None else trial.value
            scores = [trial.seeds.get(seed, "") for seed in seeds]
            out.writerow([trial.number, trial.state, value, *scores, *values, trial.problem])


def best_flags(experiment: Experiment, trials: Sequence[TrialResult]) -> list[str]:
    """The hyper-parameters of the best trial as flags of the command line; empty if no trial is complete."""
    return flags(experiment, trials[0].values) if trials and trials[0].state == "complete" else []


def importances(study: optuna.Study, space: Space) -> dict[str, float]:
    """Importance of each hyper-parameter, by PED-ANOVA (Watanabe et al. 2023); empty if too few trials are complete."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < MIN_TRIALS or len({trial.value for trial in complete}) < 2:
        return {}
    names = [name for name, entry in space.items() if len(entry.samples()) > 1]
    # Optuna's default quantile, the best tenth, is two trials of twenty: any value that they share would seem important
    quantile = min(0.5, max(0.25, MIN_TRIALS / 2 / len(complete)))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator, params=names, normalize=False)
        except (ValueError, RuntimeError):
            return {}
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()} if total > 0 else {}
