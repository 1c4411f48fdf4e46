"""Evaluations of a cluster run: played in a process of their own, while training goes on."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from bestiary.runtime.ray.faults import START, TRIES, fault, short
from bestiary.types import Episode

if TYPE_CHECKING:
    from bestiary.runtime.ray.driver import ClusterRuntime


class RayEvaluation:
    """An evaluation in a process of its own; should it be lost, it is played once more."""

    def __init__(self, runtime: "ClusterRuntime", weights: dict[str, Tensor]) -> None:
        self.runtime = runtime
        self.frames = runtime.frames
        self.weights = weights
        self.flat = runtime.flat.pack(weights)
        self.tries = 0
        self.broken_off = False
        self._begin()

    def _begin(self) -> None:
        self.tries += 1
        self.judge = self.runtime._new_judge()
        self.ref = self.judge.play.remote(self.flat)
        self.pulse = self.judge.pulse.remote()
        self.beat: int | None = None  # how far it is, once that has been heard
        self.felt = time.monotonic() + START  # when that was last news

    @property
    def running(self) -> bool:
        if self.broken_off:
            return False
        if not ray.wait([self.ref], timeout=0)[0]:
            return self._alive() or self._lost(f"it stood still for {self.runtime.cfg.timeout:g} seconds")
        try:
            ray.get(self.ref)
        except RayTaskError:
            pass  # told where the games are asked for
        except RayError as e:
            return self._lost(short(e))
        return False

    def _alive(self) -> bool:
        """Games may be long, but something must happen in them."""
        if ray.wait([self.pulse], timeout=0)[0]:
            with suppress(RayError):  # if it is gone, the games say so
                beat: Any = ray.get(self.pulse)
                if self.beat is not None and beat != self.beat:
                    self.felt = time.monotonic()
                self.beat = beat
            self.pulse = self.judge.pulse.remote()
        return time.monotonic() - self.felt <= self.runtime.cfg.timeout

    def _lost(self, why: str) -> bool:
        """Once, it is played again; says whether it is."""
        ray.kill(self.judge)
        self.runtime.judge = None
        again = self.tries < TRIES
        what = "it is played again" if again else "it is left out"
        self.runtime.notes.append(f"the evaluation at {self.frames} frames was lost ({why}); {what}")
        if again:
            self._begin()
        else:
            self.broken_off = True
        return again

    def finish(self, stop: Callable[[], bool] = lambda: True) -> None:
        while self.running:
            if stop():
                self.broken_off = True
                ray.kill(self.runtime.judge)
                self.runtime.judge = None
                return
            time.sleep(0.05)

    def episodes(self) -> list[Episode]:
        if self.broken_off:
            return []
        try:
            return ray.get(self.ref)
        except RayTaskError as e:
            raise fault(e) from None
