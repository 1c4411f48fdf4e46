"""Consumes a runtime: logs, evaluates, saves, shows and stops. The runtime knows nothing of any of it."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bestiary.config.experiment import Experiment
from bestiary.config.extras import require
from bestiary.config.machine import SMALL_BYTES
from bestiary.config.schema import encode, kebab
from bestiary.envs.base import advice
from bestiary.errors import Lost, UserError
from bestiary.runtime.evaluation import AsyncEvaluation, evaluation_env
from bestiary.runtime.start import Runtime, start
from bestiary.training.checkpoint import Checkpoint, NotSaved
from bestiary.training.display import NullDisplay, Screen, View, count
from bestiary.training.evaluation import info_summary
from bestiary.training.logs import Recorder
from bestiary.training.run import Run, new_path
from bestiary.training.video import check, film
from bestiary.types import Episode, Progress, Snapshot


class Interval:
    """What happened since the last row of metrics.csv."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.lives: list[float] = []
        self.lengths: list[int] = []
        self.games: list[dict[str, float]] = []  # components of whole games, and of their lives
        self.life_parts: list[dict[str, float]] = []
        self.successes: list[bool] = []
        self.sums: dict[str, float] = {}
        self.count = 0

    def add(self, progress: Progress) -> None:
        for e in progress.episodes:
            self.scores.append(e.score)
            self.lives += e.lives
            self.lengths.append(e.steps)
            self.games.append(e.components)
            self.life_parts += e.life_components
            if e.success is not None:
                self.successes.append(e.success)
        if progress.metrics:
            self.sums = {k: self.sums.get(k, 0.0) + v for k, v in progress.metrics.items()}
            self.count += 1

    def row(self) -> dict[str, float]:
        """Means; nothing (NaN) where no game ended."""
        names = [k.removeprefix("per_step_") for k in self.sums if k.startswith("per_step_")]
        return {
            "score": _mean(self.scores),
            "score_std": float(np.std(self.scores)) if self.scores else math.nan,
            "life_return": _mean(self.lives),
            "game_steps": _mean(self.lengths),
            "success": _mean(self.successes),
            **{k: v / self.count for k, v in self.sums.items()},
            **per("game", self.games, names),
            **per("life", self.life_parts, names),
        }

    def state_dict(self) -> Snapshot:
        return dict(vars(self))

    def load_state_dict(self, state: Snapshot) -> None:
        vars(self).update(state)


def per(what: str, found: list[dict[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Mean of every component, under a name that says of what."""
    return {f"per_{what}_{name}": _mean([parts[name] for parts in found]) for name in names}


def _mean(values: list[float] | list[int] | list[bool]) -> float:
    return float(np.mean(values)) if values else math.nan


def _learnt(experiment: Experiment) -> Checkpoint:
    """What the run named by `init` has learnt."""
    other = Run(experiment.init or "")
    mine, theirs = (kebab(type(e.algo)) for e in (experiment, other.experiment()))
    if mine != theirs:
        raise UserError(f"init={other.path} was trained by {theirs}: begin with a run of {mine}")
    return other.load()


class Session:
    """One sitting of a run: from where it stands to its frame budget, or until told to stop."""

    def __init__(
        self,
        experiment: Experiment,
        path: Path,
        screen: Screen,
        stop: Callable[[], bool] = lambda: False,
        checkpoint: str | None = None,
    ) -> None:
        self.experiment = experiment
        self.screen = screen
        self.stop = stop
        if experiment.log.wandb:
            require("wandb", "wandb")
        if experiment.video.every:
            check(evaluation_env(experiment), experiment.seed)
        existing = Run(path)
        saved = existing.load(checkpoint) if existing.saved() or checkpoint else None
        played = None if saved is None else existing.load_replay(checkpoint)
        if saved is not None and not saved.trainer:
            raise UserError("the best checkpoint holds weights only; continue from another with --checkpoint FRAMES")
        first = None if experiment.init is None or saved is not None else _learnt(experiment)
        self.runtime: Runtime = start(experiment)  # refuses what cannot run, before anything is written
        try:
            if first is not None:
                self.runtime.init_from(first.weights, first.trainer["runtime"]["learner"])
            self.run = Run.create(path, experiment)
            self.interval = Interval()
            self.recent: deque[float] = deque(maxlen=100)
            self.games = 0
            self.seconds = 0.0
            self.row_at = self.evaluated_at = 0  # frames
            self.filmed_at = 0  # frames
            self.asked_at = 0  # frames when an evaluation was last begun beside training, or left out
            self.beside: AsyncEvaluation | None = None
            if saved is not None:
                self._load(saved.weights, saved.trainer, played)
        except BaseException:
            self.runtime.close()
            raise
        self.resumed_at = None if saved is None else self.runtime.frames
        self.log_every = experiment.log.every or max(1, experiment.frames // 1000)
        self.saved_at, self.saved_frames = time.monotonic(), self.runtime.frames
        self.finished = False

    def __iter__(self) -> Iterator[Progress]:
        settings: dict[str, Any] = encode(self.experiment)
        with self.screen, Recorder(self.run.path, self.experiment.log, self.resumed_at, settings) as self.recorder:
            started, before = time.monotonic(), self.seconds
            self.row_time, self.row_updates = started, self.runtime.updates
            self.screen.start(self.experiment, self.run, self.runtime.frames)
            for text in self.runtime.startup_messages:
                self.screen.tell(text)
            for text in advice(self.experiment.env, self.experiment.algo):
                self.screen.warn(text)
            try:
                for progress in self.runtime:
                    self.seconds = before + time.monotonic() - started
                    self._tell(progress.notes)
                    self._record(progress)
                    self._keep(progress)
                    yield progress
                    if self.stop():
                        break
                if not self.stop() and self.runtime.frames >= self.experiment.frames:
                    self._end_beside(self.stop)
                    self._evaluate()
                    self._film()
                    self.finished = not self.stop()
                    if not self.runtime.updates:
                        self.screen.warn("nothing was learnt: the frames were over before an update was due")
                self._end_beside()
                self._tell(self.runtime.notes)
                self.save()
            except GeneratorExit:  # whoever iterates has seen enough
                try:
                    self._end_beside()
                finally:
                    self.save()
            except Exception as e:
                if isinstance(e, Lost):
                    self.recorder.event(self.runtime.frames, str(e))
                self._save_after_failure()
                raise
            finally:
                if self.beside is not None:  # interrupted for good
                    self.beside.finish()
                self.runtime.close()

    # -- what each Progress sets off ---------------------------------------------------------------

    def _tell(self, notes: Iterable[str]) -> None:
        for text in notes:
            self.recorder.event(self.runtime.frames, text)
            self.screen.warn(text)

    def _record(self, progress: Progress) -> None:
        for e in progress.episodes:
            self.recorder.episode(progress.frames, e)
            self.recent.append(e.score)
        self.games += len(progress.episodes)
        self.interval.add(progress)
        self.screen.update(self._view(progress))
        if progress.frames - self.row_at < self.log_every or not self.interval.count:
            return
        now = time.monotonic()
        passed = max(now - self.row_time, 1e-9)
        acted, learnt = (progress.frames - self.row_at) / passed, (progress.updates - self.row_updates) / passed
        self.row_time = now
        head = {"steps": progress.steps, "updates": progress.updates, "games": self.games}
        clock = {"seconds": self.seconds, "frames_per_second": acted, "updates_per_second": learnt}
        self.recorder.row(progress.frames, head | clock | self.interval.row())
        self.row_at, self.row_updates, self.interval = progress.frames, progress.updates, Interval()

    def _keep(self, progress: Progress) -> None:
        plan = self.experiment
        if self.beside is not None and not self.beside.running:
            self._end_beside()
        since = progress.frames - max(self.evaluated_at, self.asked_at)
        if plan.evaluation.every and since >= plan.evaluation.every:
            if plan.evaluation.background or self.runtime.evaluates_remotely:
                self._evaluate_beside()
            else:
                self._evaluate()
        if plan.video.every and progress.frames - self.filmed_at >= plan.video.every:
            self._film()
        for milestone in plan.checkpoint.milestones:
            if self.runtime.frames >= milestone and not self.run.has_milestone(milestone):
                self.run.save_milestone(milestone, self.runtime.frames, self.runtime.weights(), self._state())
        by_time = time.monotonic() - self.saved_at >= 60 * plan.checkpoint.minutes
        by_frames = plan.checkpoint.frames and progress.frames - self.saved_frames >= plan.checkpoint.frames
        if by_time or by_frames:
            self.save()

    def _evaluate(self) -> None:
        frames, plan = self.runtime.frames, self.experiment.evaluation
        if plan.episodes == 0 or (frames == self.evaluated_at and frames > 0):
            return
        self.screen.note(f"evaluating {plan.episodes} games ...")
        weights = self.runtime.weights()
        self._enter(frames, weights, self.runtime.evaluate(weights, self.stop))

    def _evaluate_beside(self) -> None:
        """Begin an evaluation that `_end_beside` enters, unless the last one still plays."""
        frames, plan = self.runtime.frames, self.experiment.evaluation
        self.asked_at = frames
        if plan.episodes == 0:
            return
        if self.beside is not None:
            last = count(self.beside.frames)
            self.screen.note(f"evaluation at {count(frames)} frames left out: the one at {last} still plays")
            return
        self.screen.note(f"evaluating {plan.episodes} games beside training ...")
        self.beside = self.runtime.evaluate_async(self.runtime.weights())

    def _end_beside(self, stop: Callable[[], bool] = lambda: True) -> None:
        """Break off the evaluation beside training once told to; if all its games are played, it counts."""
        if self.beside is not None:
            self.beside.finish(stop)
            beside, self.beside = self.beside, None
            self._enter(beside.frames, beside.weights, beside.episodes())

    def _enter(self, frames: int, weights: dict[str, Tensor], games: list[Episode]) -> None:
        """An evaluation of the weights at so many frames."""
        if len(games) < self.experiment.evaluation.episodes:
            return  # told to stop
        self.evaluated_at = frames
        score = _mean([e.score for e in games])
        values = {"score": score, "score_std": float(np.std([e.score for e in games])), "games": len(games)}
        success = _mean([e.success for e in games if e.success is not None])
        values |= {name: found["mean"] for name, found in info_summary(games).items()}
        values |= {"game_steps": _mean([e.steps for e in games]), "success": success}
        parts = [e.components for e in games]
        self.recorder.evaluation(frames, values | per("game", parts, parts[0]))
        self.run.save_best(frames, score, weights, self.experiment.checkpoint.best)
        self.screen.evaluated(frames, games)

    def _film(self) -> None:
        """The agent as it is now; that a video fails is no reason to stop learning."""
        frames, plan = self.runtime.frames, self.experiment.video
        if plan.every is None or frames == self.filmed_at:
            return
        path = self.run.path / "videos" / f"{frames:012d}.mp4"
        self.screen.note(f"filming {path} ...")
        experiment = replace(self.experiment, env=evaluation_env(self.experiment))
        try:
            film(
                experiment,
                self.runtime.weights(),
                self.runtime.device,
                path,
                plan.episodes,
                fps=plan.fps,
                epsilon=experiment.evaluation.epsilon,
                threads=self.runtime.threads,
                stop=self.stop,
            )
        except UserError as e:
            self.screen.note(f"no video at {count(frames)} frames: {e}")
        if not self.stop():  # one that was broken off is made when the run goes on
            self.filmed_at = frames

    # -- saving -----------------------------------------------------------------------------------

    def save(self) -> None:
        state = self._state()
        played = state["runtime"].pop("replay", None)
        self.run.save(self.runtime.frames, self.runtime.weights(), state, self.experiment.checkpoint.keep, played)
        self.saved_at, self.saved_frames = time.monotonic(), self.runtime.frames

    def _save_after_failure(self) -> None:
        """Nothing learnt may be lost; but the failure itself must be what the user sees."""
        try:
            self._end_beside()
        except Exception as e:
            self.screen.note(f"the evaluation beside training failed as well: {e}")
        try:
            state = self._state(at_rest=False)
            self.run.save(self.runtime.frames, self.runtime.weights(), state, self.experiment.checkpoint.keep)
        except (NotSaved, Lost) as e:
            self.screen.note(str(e))

    def _state(self, at_rest: bool = True) -> Snapshot:
        wanted = self.experiment.checkpoint.replay
        with_replay = self.runtime.replay_bytes <= SMALL_BYTES if wanted is None else wanted
        return {
            "runtime": self.runtime.state_dict(at_rest, with_replay),
            "interval": self.interval.state_dict(),
            "recent": list(self.recent),
            "games": self.games,
            "seconds": self.seconds,
            "row_at": self.row_at,
            "evaluated_at": self.evaluated_at,
            "filmed_at": self.filmed_at,
        }

    def _load(self, weights: Any, state: Snapshot, played: Snapshot | None) -> None:
        runtime = state["runtime"] if played is None else {**state["runtime"], "replay": played}
        if "replay" not in runtime:
            self.screen.note("what was played before was not saved: the replay fills anew before learning goes on")
        try:
            self.runtime.load_state_dict(weights, runtime)
            self.interval.load_state_dict(state["interval"])
            self.recent.extend(state["recent"])
            self.games, self.seconds = state["games"], state["seconds"]
            self.row_at, self.evaluated_at = state["row_at"], state["evaluated_at"]
            self.filmed_at = state.get("filmed_at", 0)  # not in checkpoints of 0.1
        except (KeyError, RuntimeError, TypeError) as e:
            reason = str(e).splitlines()[0]
            raise UserError(f"the checkpoint does not belong to this experiment: {reason}") from None

    def _view(self, progress: Progress) -> View:
        return View(
            frames=progress.frames,
            steps=progress.steps,
            updates=progress.updates,
            games=self.games,
            seconds=self.seconds,
            recent=list(self.recent),
            metrics=progress.metrics,
        )


def iterate(experiment: Experiment, run: Path | str | None = None, screen: Screen | None = None) -> Iterator[Progress]:
    """Train as a generator: `for progress in bestiary.iterate(experiment): ...`; leaving the loop saves."""
    yield from Session(experiment, _path(experiment, run), screen or NullDisplay())


def train(experiment: Experiment, run: Path | str | None = None, screen: Screen | None = None) -> Run:
    """Train to the end of the frame budget; a run that is already there continues. Returns the run."""
    session = Session(experiment, _path(experiment, run), screen or NullDisplay())
    for _ in session:
        pass
    return session.run


def _path(experiment: Experiment, run: Path | str | None) -> Path:
    return new_path("run", experiment.seed) if run is None else Path(run)
