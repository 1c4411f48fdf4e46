"""Evaluations of a Ray run, in their own process while training continues."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from bestiary.runtime.ray.faults import MAX_FAILURES, START_TIMEOUT, original_error, summary
from bestiary.types import Episode

if TYPE_CHECKING:
    from bestiary.runtime.ray.driver import RayRuntime


class RayEvaluation:
    """An evaluation by the evaluator process. If the process is lost or hangs, the evaluation is repeated once."""

    def __init__(self, runtime: "RayRuntime", weights: dict[str, Tensor]) -> None:
        self.runtime = runtime
        self.frames = runtime.frames
        self.weights = weights
        self.flat = runtime.codec.encode(weights)
        self.attempts = 0
        self.cancelled = False
        self._start()

    def _start(self) -> None:
        self.attempts += 1
        self.evaluator = self.runtime.new_evaluator()
        self.ref = self.evaluator.evaluate.remote(self.flat)
        self.heartbeat = self.evaluator.heartbeat.remote()
        self.last_beat: int | None = None
        self.alive_at = time.monotonic() + START_TIMEOUT  # when the heartbeat last changed

    @property
    def running(self) -> bool:
        if self.cancelled:
            return False
        if not ray.wait([self.ref], timeout=0)[0]:
            timeout = self.runtime.cfg.timeout
            return self._alive() or self._repeat(f"it made no progress for {timeout:g} seconds")
        try:
            ray.get(self.ref)
        except RayTaskError:
            pass  # raised by `episodes`
        except RayError as e:
            return self._repeat(summary(e))
        return False

    def _alive(self) -> bool:
        """Whether the evaluation made progress within the timeout; episodes may be long."""
        if ray.wait([self.heartbeat], timeout=0)[0]:
            with suppress(RayError):  # a dead process is noticed through `ref`
                beat: Any = ray.get(self.heartbeat)
                if self.last_beat is not None and beat != self.last_beat:
                    self.alive_at = time.monotonic()
                self.last_beat = beat
            self.heartbeat = self.evaluator.heartbeat.remote()
        return time.monotonic() - self.alive_at <= self.runtime.cfg.timeout

    def _repeat(self, reason: str) -> bool:
        """Start the evaluation again in a new process, or skip it after too many attempts; returns which."""
        ray.kill(self.evaluator)
        self.runtime.evaluator = None
        repeat = self.attempts < MAX_FAILURES
        action = "repeating it" if repeat else "skipping it"
        self.runtime.notes.append(f"the evaluation at {self.frames} frames was lost ({reason}); {action}")
        if repeat:
            self._start()
        else:
            self.cancelled = True
        return repeat

    def finish(self, stop: Callable[[], bool] = lambda: True) -> None:
        """Wait for the result; cancel the evaluation as soon as `stop` returns True."""
        while self.running:
            if stop():
                self.cancelled = True
                ray.kill(self.runtime.evaluator)
                self.runtime.evaluator = None
                return
            time.sleep(0.05)

    def episodes(self) -> list[Episode]:
        """The episodes; none if the evaluation was cancelled."""
        if self.cancelled:
            return []
        try:
            return ray.get(self.ref)
        except RayTaskError as e:
            raise original_error(e) from None
