"""Training sessions: consume the Progress of a runtime, and log, evaluate, save, record videos and stop."""

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
from bestiary.errors import ProcessLost, UserError
from bestiary.runtime.evaluation import AsyncEvaluation, evaluation_env
from bestiary.runtime.start import Runtime, start
from bestiary.training.checkpoint import Checkpoint, NotSaved
from bestiary.training.display import Display, NullDisplay, TrainingStatus, count
from bestiary.training.evaluation import info_summary
from bestiary.training.logs import Recorder
from bestiary.training.run import Run, new_path
from bestiary.training.video import VideoSettings, check_video, record_video
from bestiary.types import Episode, Progress, Snapshot


class IntervalMetrics:
    """Episodes and learner metrics since the last row of metrics.csv."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.life_returns: list[float] = []
        self.lengths: list[int] = []
        self.components: list[dict[str, float]] = []  # reward components per episode
        self.life_components: list[dict[str, float]] = []
        self.successes: list[bool] = []
        self.sums: dict[str, float] = {}
        self.count = 0

    def add(self, progress: Progress) -> None:
        for e in progress.episodes:
            self.scores.append(e.score)
            self.life_returns += e.life_returns
            self.lengths.append(e.steps)
            self.components.append(e.components)
            self.life_components += e.life_components
            if e.success is not None:
                self.successes.append(e.success)
        if progress.metrics:
            self.sums = {k: self.sums.get(k, 0.0) + v for k, v in progress.metrics.items()}
            self.count += 1

    def row(self) -> dict[str, float]:
        """Means over the interval; NaN where no episode ended."""
        names = [k.removeprefix("per_step_") for k in self.sums if k.startswith("per_step_")]
        return {
            "score": _mean(self.scores),
            "score_std": float(np.std(self.scores)) if self.scores else math.nan,
            "life_return": _mean(self.life_returns),
            "episode_length": _mean(self.lengths),
            "success": _mean(self.successes),
            **{k: v / self.count for k, v in self.sums.items()},
            **component_means("episode", self.components, names),
            **component_means("life", self.life_components, names),
        }

    def state_dict(self) -> Snapshot:
        return dict(vars(self))

    def load_state_dict(self, state: Snapshot) -> None:
        vars(self).update(state)


def component_means(unit: str, components: list[dict[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Mean of every reward component per unit ("episode" or "life"): {"per_episode_fuel": 3.5}."""
    return {f"per_{unit}_{name}": _mean([values[name] for values in components]) for name in names}


def _mean(values: list[float] | list[int] | list[bool]) -> float:
    return float(np.mean(values)) if values else math.nan


def _load_init(experiment: Experiment) -> Checkpoint:
    """The last checkpoint of the run that `init` names."""
    other = Run(experiment.init or "")
    own, others = (kebab(type(e.algo)) for e in (experiment, other.experiment()))
    if own != others:
        raise UserError(f"init={other.path} was trained by {others}: name a run that was trained by {own}")
    return other.load()


class Session:
    """Trains a run from its present state to its frame budget, or until `stop` returns True.

    The session owns everything around the runtime: logs, evaluations, checkpoints, videos and the display.
    """

    def __init__(
        self,
        experiment: Experiment,
        path: Path,
        display: Display,
        stop: Callable[[], bool] = lambda: False,
        checkpoint: str | None = None,
    ) -> None:
        self.experiment = experiment
        self.display = display
        self.stop = stop
        if experiment.log.wandb:
            require("wandb", "wandb")
        if experiment.video.every:
            check_video(evaluation_env(experiment), experiment.seed)
        existing = Run(path)
        saved = existing.load(checkpoint) if existing.saved() or checkpoint else None
        replay = None if saved is None else existing.load_replay(checkpoint)
        if saved is not None and not saved.trainer:
            raise UserError("the best checkpoint holds weights only; continue from another with --checkpoint FRAMES")
        init = None if experiment.init is None or saved is not None else _load_init(experiment)
        self.runtime: Runtime = start(experiment)  # refuses what cannot run, before anything is written
        try:
            if init is not None:
                self.runtime.init_from(init.weights, init.trainer["runtime"]["learner"])
            self.run = Run.create(path, experiment)
            self.interval = IntervalMetrics()
            self.recent_scores: deque[float] = deque(maxlen=100)
            self.episodes = 0
            self.seconds = 0.0
            # frames at which something was last done
            self.logged_at = self.evaluated_at = self.video_at = 0
            self.evaluation_due_at = 0  # a background evaluation was last due: started, or skipped
            self.background: AsyncEvaluation | None = None
            if saved is not None:
                self._load(saved.weights, saved.trainer, replay)
        except BaseException:
            self.runtime.close()
            raise
        self.resumed_at = None if saved is None else self.runtime.frames
        self.log_every = experiment.log.every or max(1, experiment.frames // 1000)
        self.saved_time, self.saved_at = time.monotonic(), self.runtime.frames
        self.finished = False

    def __iter__(self) -> Iterator[Progress]:
        settings: dict[str, Any] = encode(self.experiment)
        with self.display, Recorder(self.run.path, self.experiment.log, self.resumed_at, settings) as self.recorder:
            started, before = time.monotonic(), self.seconds
            self.logged_time, self.logged_updates = started, self.runtime.updates
            self.display.start(self.experiment, self.run, self.runtime.frames)
            for text in self.runtime.startup_messages:
                self.display.info(text)
            for text in advice(self.experiment.env, self.experiment.algo):
                self.display.warning(text)
            try:
                for progress in self.runtime:
                    self.seconds = before + time.monotonic() - started
                    self._warn(progress.notes)
                    self._log(progress)
                    self._do_what_is_due(progress)
                    yield progress
                    if self.stop():
                        break
                if not self.stop() and self.runtime.frames >= self.experiment.frames:
                    self._finish_background_evaluation(self.stop)
                    self._evaluate()
                    self._record_video()
                    self.finished = not self.stop()
                    if not self.runtime.updates:
                        self.display.warning("no update was made: the frame budget ended before the first one was due")
                self._finish_background_evaluation()
                self._warn(self.runtime.notes)
                self.save()
            except GeneratorExit:  # the caller left the loop
                try:
                    self._finish_background_evaluation()
                finally:
                    self.save()
            except Exception as e:
                if isinstance(e, ProcessLost):
                    self.recorder.event(self.runtime.frames, str(e))
                self._save_after_failure()
                raise
            finally:
                if self.background is not None:  # after KeyboardInterrupt
                    self.background.finish()
                self.runtime.close()

    # -- after each Progress ----------------------------------------------------------------------

    def _warn(self, notes: Iterable[str]) -> None:
        for text in notes:
            self.recorder.event(self.runtime.frames, text)
            self.display.warning(text)

    def _log(self, progress: Progress) -> None:
        for e in progress.episodes:
            self.recorder.episode(progress.frames, e)
            self.recent_scores.append(e.score)
        self.episodes += len(progress.episodes)
        self.interval.add(progress)
        self.display.update(self._status(progress))
        if progress.frames - self.logged_at < self.log_every or not self.interval.count:
            return
        now = time.monotonic()
        seconds = max(now - self.logged_time, 1e-9)
        values = {
            "steps": progress.steps,
            "updates": progress.updates,
            "episodes": self.episodes,
            "seconds": self.seconds,
            "frames_per_second": (progress.frames - self.logged_at) / seconds,
            "updates_per_second": (progress.updates - self.logged_updates) / seconds,
        }
        self.recorder.row(progress.frames, values | self.interval.row())
        self.logged_time, self.logged_at, self.logged_updates = now, progress.frames, progress.updates
        self.interval = IntervalMetrics()

    def _do_what_is_due(self, progress: Progress) -> None:
        """Evaluate, record a video and save checkpoints, each at its interval."""
        cfg = self.experiment
        if self.background is not None and not self.background.running:
            self._finish_background_evaluation()
        since = progress.frames - max(self.evaluated_at, self.evaluation_due_at)
        if cfg.evaluation.every and since >= cfg.evaluation.every:
            if cfg.evaluation.background or self.runtime.evaluates_remotely:
                self._start_background_evaluation()
            else:
                self._evaluate()
        if cfg.video.every and progress.frames - self.video_at >= cfg.video.every:
            self._record_video()
        for milestone in cfg.checkpoint.milestones:
            if self.runtime.frames >= milestone and not self.run.has_milestone(milestone):
                self.run.save_milestone(milestone, self.runtime.frames, self.runtime.weights(), self._state())
        by_time = time.monotonic() - self.saved_time >= 60 * cfg.checkpoint.minutes
        by_frames = cfg.checkpoint.frames and progress.frames - self.saved_at >= cfg.checkpoint.frames
        if by_time or by_frames:
            self.save()

    def _evaluate(self) -> None:
        frames, cfg = self.runtime.frames, self.experiment.evaluation
        if cfg.episodes == 0 or (frames == self.evaluated_at and frames > 0):
            return
        self.display.activity(f"evaluating {cfg.episodes} episodes ...")
        weights = self.runtime.weights()
        self._record_evaluation(frames, weights, self.runtime.evaluate(weights, self.stop))

    def _start_background_evaluation(self) -> None:
        """Start an evaluation while training continues; skip it if the previous one is still running."""
        frames, cfg = self.runtime.frames, self.experiment.evaluation
        self.evaluation_due_at = frames
        if cfg.episodes == 0:
            return
        if self.background is not None:
            running = count(self.background.frames)
            self.display.activity(
                f"evaluation at {count(frames)} frames skipped: the one at {running} is still running"
            )
            return
        self.display.activity(f"evaluating {cfg.episodes} episodes in the background ...")
        self.background = self.runtime.evaluate_async(self.runtime.weights())

    def _finish_background_evaluation(self, stop: Callable[[], bool] = lambda: True) -> None:
        """Wait for the background evaluation, or cancel it once `stop` returns True. Record it if it is complete."""
        if self.background is not None:
            self.background.finish(stop)
            background, self.background = self.background, None
            self._record_evaluation(background.frames, background.weights, background.episodes())

    def _record_evaluation(self, frames: int, weights: dict[str, Tensor], episodes: list[Episode]) -> None:
        """Record an evaluation of the weights after `frames` frames, and save them if they are among the best."""
        if len(episodes) < self.experiment.evaluation.episodes:
            return  # cancelled
        self.evaluated_at = frames
        scores = [e.score for e in episodes]
        score = _mean(scores)
        values = {"score": score, "score_std": float(np.std(scores)), "episodes": len(episodes)}
        success = _mean([e.success for e in episodes if e.success is not None])
        values |= {name: found["mean"] for name, found in info_summary(episodes).items()}
        values |= {"episode_length": _mean([e.steps for e in episodes]), "success": success}
        components = [e.components for e in episodes]
        self.recorder.evaluation(frames, values | component_means("episode", components, components[0]))
        self.run.save_best(frames, score, weights, self.experiment.checkpoint.best)
        self.display.evaluation(frames, episodes)

    def _record_video(self) -> None:
        """Record a video of the present agent. A failure is shown and does not stop training."""
        frames, cfg = self.runtime.frames, self.experiment.video
        if cfg.every is None or frames == self.video_at:
            return
        path = self.run.path / "videos" / f"{frames:012d}.mp4"
        self.display.activity(f"recording {path} ...")
        experiment = replace(self.experiment, env=evaluation_env(self.experiment))
        settings = VideoSettings(episodes=cfg.episodes, fps=cfg.fps, epsilon=experiment.evaluation.epsilon)
        weights, device, threads = self.runtime.weights(), self.runtime.device, self.runtime.threads
        try:
            record_video(experiment, weights, device, path, settings, threads, self.stop)
        except UserError as e:
            self.display.activity(f"no video at {count(frames)} frames: {e}")
        if not self.stop():  # a cancelled video is recorded when the run is resumed
            self.video_at = frames

    # -- saving -----------------------------------------------------------------------------------

    def save(self) -> None:
        state = self._state()
        replay = state["runtime"].pop("replay", None)
        self.run.save(self.runtime.frames, self.runtime.weights(), state, self.experiment.checkpoint.keep, replay)
        self.saved_time, self.saved_at = time.monotonic(), self.runtime.frames

    def _save_after_failure(self) -> None:
        """Save what was learnt. The failure itself is what the user must see, so a second one is only shown."""
        try:
            self._finish_background_evaluation()
        except Exception as e:
            self.display.activity(f"the background evaluation failed as well: {e}")
        try:
            state = self._state(at_rest=False)
            self.run.save(self.runtime.frames, self.runtime.weights(), state, self.experiment.checkpoint.keep)
        except (NotSaved, ProcessLost) as e:
            self.display.activity(str(e))

    def _state(self, at_rest: bool = True) -> Snapshot:
        wanted = self.experiment.checkpoint.replay
        with_replay = self.runtime.replay_bytes <= SMALL_BYTES if wanted is None else wanted
        return {
            "runtime": self.runtime.state_dict(at_rest, with_replay),
            "interval": self.interval.state_dict(),
            "recent_scores": list(self.recent_scores),
            "episodes": self.episodes,
            "seconds": self.seconds,
            "logged_at": self.logged_at,
            "evaluated_at": self.evaluated_at,
            "video_at": self.video_at,
        }

    def _load(self, weights: Any, state: Snapshot, replay: Snapshot | None) -> None:
        runtime = state["runtime"] if replay is None else {**state["runtime"], "replay": replay}
        if "replay" not in runtime:
            self.display.activity("the replay was not saved: it is filled anew before learning continues")
        try:
            self.runtime.load_state_dict(weights, runtime)
            self.interval.load_state_dict(state["interval"])
            self.recent_scores.extend(state["recent_scores"])
            self.episodes, self.seconds = state["episodes"], state["seconds"]
            self.logged_at, self.evaluated_at = state["logged_at"], state["evaluated_at"]
            self.video_at = state.get("video_at", 0)  # not in the first checkpoints of 0.1
        except (KeyError, RuntimeError, TypeError) as e:
            reason = str(e).splitlines()[0]
            raise UserError(f"the checkpoint does not belong to this experiment: {reason}") from None

    def _status(self, progress: Progress) -> TrainingStatus:
        return TrainingStatus(
            frames=progress.frames,
            steps=progress.steps,
            updates=progress.updates,
            episodes=self.episodes,
            seconds=self.seconds,
            recent_scores=list(self.recent_scores),
            metrics=progress.metrics,
        )


def iterate(
    experiment: Experiment, run: Path | str | None = None, display: Display | None = None
) -> Iterator[Progress]:
    """Train as a generator: `for progress in bestiary.iterate(experiment): ...`. Leaving the loop saves."""
    yield from Session(experiment, _path(experiment, run), display or NullDisplay())


def train(experiment: Experiment, run: Path | str | None = None, display: Display | None = None) -> Run:
    """Train until the frame budget is used. `run` is the run directory: one that exists is resumed; None: a new one."""
    session = Session(experiment, _path(experiment, run), display or NullDisplay())
    for _ in session:
        pass
    return session.run


def _path(experiment: Experiment, run: Path | str | None) -> Path:
    return new_path("run", experiment.seed) if run is None else Path(run)
