"""A search for good settings: trials of several seeds side by side, the hopeless ones stopped, all of it resumable."""

import csv
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bestiary.config.compat import optuna_trial
from bestiary.config.experiment import Experiment
from bestiary.config.extras import available, require
from bestiary.config.schema import differences, encode
from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError
from bestiary.launch.executor import LOCAL, POLL_SECONDS, Executor, JobPool, evaluations, finished, frames_trained
from bestiary.launch.seeds import METRICS, SeedRun, plan
from bestiary.launch.spaces import Choices, Range, Space, apply, as_text, flags, load_space, read_space
from bestiary.training.display import count, duration
from bestiary.training.run import Run

require("optuna", "sweep")  # this module is nothing without it
import optuna  # type: ignore[import-not-found]  # noqa: E402
from optuna.storages import JournalStorage  # type: ignore[import-not-found]  # noqa: E402
from optuna.storages.journal import JournalFileBackend  # type: ignore[import-not-found]  # noqa: E402
from optuna.trial import FrozenTrial, TrialState  # type: ignore[import-not-found]  # noqa: E402

Sampler = Literal["tpe", "random"]
UNJUDGED = 5  # trials that are finished before any is stopped early
WARM_UP = 0.25  # of the evaluations of a run, before which it is not judged: the start says little about the end
JUDGE = 1.0  # seconds between two looks at what running trials have reached
ENOUGH = 10  # finished trials, to say which settings matter
HOPELESS = 3  # trials that fail before any does not: then something else is wrong than the settings


@dataclass(frozen=True)
class Sweep:
    """What is searched for, and where; enough to go on with it."""

    experiment: Experiment
    space: Space
    seeds_per_trial: int = 2
    metric: str = "score"
    last: int = 1

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise UserError(f"there is no metric {self.metric!r}: {did_you_mean(self.metric, METRICS)}")
        if self.seeds_per_trial < 1 or self.last < 1:
            raise UserError(f"seeds-per-trial={self.seeds_per_trial} and last={self.last} must be at least 1")
        if self.experiment.evaluation.episodes < 1:
            raise UserError("evaluation.episodes=0 leaves nothing to compare trials by")

    def to_json(self) -> dict[str, Any]:
        free = ("runtime", "checkpoint", "log", "video")  # how it runs may change from one sitting to the next
        kept = {name: value for name, value in encode(self.experiment).items() if name not in free}
        entries = {name: {k: encode(v) for k, v in entry._asdict().items()} for name, entry in self.space.items()}
        numbers = {"seeds_per_trial": self.seeds_per_trial, "metric": self.metric, "last": self.last}
        return {"experiment": kept, "space": entries, **numbers}

    def values(self, path: Path) -> list[float]:
        """The metric at every evaluation of a run; nothing where the environment does not know it."""
        found = [row.get(self.metric, math.nan) for row in evaluations(path)]
        return [value for value in found if not math.isnan(value)]

    def result(self, job: SeedRun) -> float:
        values = self.values(job.path)
        if not values:
            raise UserError(f"{job.path} was evaluated, but there is no {self.metric} of it: choose another --metric")
        return float(np.mean(values[-self.last :]))

    def curve(self, job: SeedRun) -> dict[int, float]:
        """The metric by the number of the evaluation: frames differ a little from one trial to the next."""
        every = self.experiment.evaluation.every
        if every is None:
            return {}
        rows = [row for row in evaluations(job.path) if not math.isnan(row.get(self.metric, math.nan))]
        return {round(row["frames"] / every): row[self.metric] for row in rows}


@dataclass
class Trial:
    """One choice of settings, and its runs."""

    number: int
    told: optuna.Trial
    jobs: list[SeedRun]
    waiting: list[SeedRun]
    problem: str | None = None
    pruned: bool = False

    @property
    def begun(self) -> list[SeedRun]:
        return [job for job in self.jobs if job not in self.waiting]


class Told(NamedTuple):
    """What became of a trial."""

    number: int
    state: str  # complete, pruned, failed, running
    value: float | None  # of a pruned one: where it stood
    seeds: dict[str, float]
    values: dict[str, Any]  # the settings
    problem: str


def sweep(
    experiment: Experiment,
    space: Mapping[str, Any] | str,
    trials: int,
    run: Path | str,
    jobs: int | None = None,
    seeds_per_trial: int = 2,
    metric: str = "score",
    last: int = 1,
    sampler: Sampler = "tpe",
    prune: bool = True,
    log: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    every: float = 30.0,
    executor: Executor = LOCAL,
) -> list[Told]:
    """Search a space with so many trials, or go on until there are.

    The space is a builtin one, a file, or itself: {"algo.optimizer.lr": {"low": 1e-5, "high": 1e-2, "log": True}}.
    A trial is worth the mean over its seeds of their last evaluations. Writes RUN/trials.csv and, where matplotlib is
    there, RUN/sweep.png; its runs are RUN/trial0000/seed0 and so on. Returns the trials, the best first.
    """
    entries = load_space(space, experiment) if isinstance(space, str) else read_space(space, experiment)
    search = Sweep(experiment, entries, seeds_per_trial, metric, last)
    if trials < 1:
        raise UserError(f"trials={trials} must be at least 1")
    root = Path(run)
    refuse_others(search, root)
    many = executor.max_workers(jobs, experiment)
    with JobPool[SeedRun](many, root, executor, log) as pool:
        Run(root)._point_latest()
        Run(root).write("sweep.json", json.dumps(search.to_json(), indent=2))
        study = open_study(search, root, sampler, prune)
        if prune and experiment.evaluation.every is None:
            log(
                "nothing is stopped early: runs are only evaluated at their end; give --evaluation.every to change that"
            )
        try:
            _Sitting(search, study, pool, root, trials, log).run(stop, every)
        finally:
            told = results(search, study)
            write(search, told, root)
    if available("plot"):
        from bestiary.launch.sweep_plot import picture

        picture(search.space, search.metric, told, importances(study, search.space), root / "sweep.png")
    else:
        log('no picture: it needs the extra "plot"')
    return told


def refuse_others(search: Sweep, root: Path) -> None:
    """Trials of another space, or of other seeds, do not compare."""
    file = root / "sweep.json"
    if file.exists():
        if different := differences(json.loads(file.read_text()), json.loads(json.dumps(search.to_json()))):
            raise UserError(f"{root} holds another sweep ({'; '.join(different[:3])}); choose another --run")
    elif root.exists() and any(path.name != ".lock" for path in root.iterdir()):
        raise UserError(f"{root} is not empty and not a sweep; choose another --run")


def open_study(search: Sweep, root: Path, sampler: Sampler, prune: bool) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="sweep",
        storage=JournalStorage(JournalFileBackend(str(root / "journal.log"))),
        direction="maximize",
        load_if_exists=True,
    )
    # a sampler that began with the same seed in every sitting would propose the same again
    seed = search.experiment.seed + len(study.get_trials(deepcopy=False))
    random, tpe = optuna.samplers.RandomSampler, optuna.samplers.TPESampler
    study.sampler = random(seed=seed) if sampler == "random" else tpe(seed=seed)
    each = search.experiment.evaluation.every
    if prune and each is not None:
        warm_up = math.ceil(WARM_UP * search.experiment.frames / each)
        study.pruner = optuna.pruners.MedianPruner(n_startup_trials=UNJUDGED, n_warmup_steps=warm_up)
    else:
        study.pruner = optuna.pruners.NopPruner()
    return study


class _Sitting:
    """From where the search stands to its last trial, or until told to stop."""

    def __init__(
        self,
        search: Sweep,
        study: optuna.Study,
        pool: JobPool[SeedRun],
        root: Path,
        wanted: int,
        log: Callable[[str], None],
    ) -> None:
        self.search, self.study, self.pool, self.root, self.wanted, self.log = search, study, pool, root, wanted, log
        self.open: list[Trial] = []
        self.failures = 0
        self.any_good = bool(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))

    def run(self, stop: Callable[[], bool], every: float) -> None:
        started = looked = judged = time.monotonic()
        self._take_up()
        known = self.study.get_trials(deepcopy=False)
        self.log(
            f"{len(known) - len(self.open)} of {self.wanted} trials are known; {self.pool.max_workers} runs at a time"
        )
        while not stop():
            while self.pool.free and (trial := self._next()) is not None:
                self.pool.start(trial.waiting.pop(0))
            if not self.open:
                break
            time.sleep(POLL_SECONDS)
            ended = self.pool.poll()
            for job, _, problem in ended:
                trial = next(t for t in self.open if job in t.jobs)
                if problem is not None and trial.problem is None:
                    self._give_up(trial)
                    trial.problem = f"{job.name}: {problem}"
            if ended or time.monotonic() - judged >= JUDGE:
                judged = time.monotonic()
                for trial in list(self.open):
                    self._judge(trial)
                    self._close(trial)
            if time.monotonic() - looked >= every:
                looked = time.monotonic()
                self._tell(duration(looked - started))

    # -- what is begun ----------------------------------------------------------------------------

    def _take_up(self) -> None:
        """Trials that were broken off go on, with their own settings."""
        for frozen in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._open(optuna_trial(self.study, frozen))

    def _next(self) -> Trial | None:
        """A trial with a run to start: one that is open, else a new one."""
        while True:
            if waiting := [trial for trial in self.open if trial.waiting]:
                return waiting[0]
            if len(self.study.get_trials(deepcopy=False)) >= self.wanted:
                return None
            self._open(self.study.ask())

    def _open(self, told: optuna.Trial) -> None:
        values = {name: suggest(told, name, entry) for name, entry in self.search.space.items()}
        if (twin := self._twin(told)) is not None:  # same settings, same seeds: nothing new
            told.set_user_attr("same_as", twin.number)
            told.set_user_attr("seeds", twin.user_attrs["seeds"])
            self.study.tell(told, twin.value)
            self.log(f"trial {told.number}: the settings of trial {twin.number} again")
            return
        path = self.root / f"trial{told.number:04d}"
        try:
            experiment = apply(self.search.experiment, values)
            first = experiment.seed
            jobs = plan(experiment, range(first, first + self.search.seeds_per_trial), path)
        except UserError as e:  # each value is possible, but not together
            self._fail(told, str(e))
            return
        waiting = [job for job in jobs if not finished(job)]
        self.open.append(Trial(told.number, told, jobs, waiting))
        if not waiting:
            self._close(self.open[-1])

    def _twin(self, told: optuna.Trial) -> FrozenTrial | None:
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return next((trial for trial in done if trial.params == told.params), None)

    # -- what becomes of it -----------------------------------------------------------------------

    def _judge(self, trial: Trial) -> None:
        """Report what all its runs so far have reached, and stop it if half of the others were better there."""
        if trial.pruned or trial.problem is not None or not trial.begun:
            return
        curves = [self.search.curve(job) for job in trial.begun]
        reported = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step in sorted(set.intersection(*map(set, curves)) - set(reported)):
            trial.told.report(float(np.mean([curve[step] for curve in curves])), step)
            if not all(map(finished, trial.jobs)) and trial.told.should_prune():
                trial.pruned = True
                self._give_up(trial)
                return

    def _give_up(self, trial: Trial) -> None:
        trial.waiting.clear()
        for job in trial.jobs:
            self.pool.stop(job)

    def _close(self, trial: Trial) -> None:
        """Nothing of it is to come: tell what it was worth."""
        if trial.waiting or any(one.job in trial.jobs for one in self.pool.running):
            return
        self.open.remove(trial)
        if trial.problem is not None:
            self._fail(trial.told, trial.problem)
            return
        if trial.pruned:
            self.study.tell(trial.told, state=TrialState.PRUNED)
            self._ended(trial.number, "stopped early, worse than half of the others")
            return
        seeds = {str(job.seed): self.search.result(job) for job in trial.jobs}
        value = float(np.mean(list(seeds.values())))
        trial.told.set_user_attr("seeds", seeds)
        self.study.tell(trial.told, value)
        self.any_good = True
        best = self.study.best_trial
        listed = ", ".join(f"{score:.2f}" for score in seeds.values())
        also = "the best" if best.number == trial.number else f"the best is trial {best.number}: {best.value:.2f}"
        self._ended(trial.number, f"{self.search.metric} {value:.2f} ({listed}); {also}")

    def _fail(self, told: optuna.Trial, problem: str) -> None:
        told.set_user_attr("problem", problem)
        self.study.tell(told, state=TrialState.FAIL)
        self._ended(told.number, f"failed: {problem}")
        self.failures += 1
        if not self.any_good and self.failures >= HOPELESS:
            raise UserError(f"{self.failures} trials failed and none did not, the last: {problem}")

    def _ended(self, number: int, text: str) -> None:
        done = len(self.study.get_trials(deepcopy=False)) - len(self.open)
        self.log(f"trial {number}: {text}  ({done} of {self.wanted})")
        write(self.search, results(self.search, self.study), self.root)

    def _tell(self, passed: str) -> None:
        for one in self.pool.running:
            job = one.job
            values = self.search.values(job.path)
            where = f"frames {count(frames_trained(job.path))} of {count(job.experiment.frames)}"
            also = f", {self.search.metric} {values[-1]:.2f}" if values else ""
            self.log(f"{passed}  {job.path.parent.name}, {job.name}: {where}{also}")


def suggest(told: optuna.Trial, name: str, entry: Range | Choices) -> Any:
    """A value of a setting. What is not a plain value is chosen by its JSON."""
    if isinstance(entry, Choices):
        return by_label(entry)[told.suggest_categorical(name, list(by_label(entry)))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the last step of a range does not end at high
        if entry.whole:
            return told.suggest_int(name, int(entry.low), int(entry.high), step=int(entry.step or 1), log=entry.log)
        return told.suggest_float(name, entry.low, entry.high, step=entry.step, log=entry.log)


def by_label(entry: Choices) -> dict[Any, Any]:
    return {json.dumps(value) if isinstance(value, tuple) else value: value for value in entry.values}


def results(search: Sweep, study: optuna.Study) -> list[Told]:
    """Every trial, the best first, then those that were stopped, are running, or failed."""
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
        found.append(Told(frozen.number, state, value, attrs.get("seeds", {}), values, attrs.get("problem", "")))
    order = ("complete", "pruned", "running", "waiting", "failed")
    return sorted(found, key=lambda t: (order.index(t.state), -(t.value if t.value is not None else 0), t.number))


def write(search: Sweep, told: Sequence[Told], root: Path) -> None:
    """trials.csv: a row per trial, in the order in which they were tried."""
    first = search.experiment.seed
    seeds = [str(seed) for seed in range(first, first + search.seeds_per_trial)]
    with (root / "trials.csv").open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["trial", "state", search.metric, *(f"seed{seed}" for seed in seeds), *search.space, "problem"])
        for trial in sorted(told):
            settings = [as_text(trial.values.get(name, "")) for name in search.space]
            value = "" if trial.value is None else trial.value
            scores = [trial.seeds.get(seed, "") for seed in seeds]
            out.writerow([trial.number, trial.state, value, *scores, *settings, trial.problem])


def best_flags(experiment: Experiment, told: Sequence[Told]) -> list[str]:
    """The best trial's settings as words of the command line; none if no trial is complete."""
    return flags(experiment, told[0].values) if told and told[0].state == "complete" else []


def importances(study: optuna.Study, space: Space) -> dict[str, float]:
    """How much each setting tells the better trials from the rest (PED-ANOVA); empty where too few are finished."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(done) < ENOUGH or len({trial.value for trial in done}) < 2:
        return {}
    names = [name for name, entry in space.items() if len(entry.samples()) > 1]
    # Optuna's default, the best tenth, is two trials of twenty: any setting they happen to share would matter
    better = min(0.5, max(0.25, ENOUGH / 2 / len(done)))
    judge = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=better)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            shares = optuna.importance.get_param_importances(study, evaluator=judge, params=names, normalize=False)
        except (ValueError, RuntimeError):
            return {}
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()} if total > 0 else {}
