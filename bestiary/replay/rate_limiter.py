"""How often a replay may be sampled: a fixed number of updates per environment step."""

import numpy as np

from bestiary.types import Snapshot


class RateLimiter:
    """Allows a fixed number of updates per transition, once there are `warmup` transitions.

    A replay of episodes may count episodes in place of transitions.
    """

    def __init__(self, updates_per_step: float, warmup: int) -> None:
        self.updates_per_step, self.warmup = updates_per_step, warmup
        self.steps = 0  # transitions ever added
        self.batches = 0  # batches ever sampled
        self.last_added = 0  # transitions of the last trajectory

    def add(self, steps: int) -> None:
        self.last_added = steps
        self.steps += steps

    @property
    def due(self) -> float:
        """Updates that the transitions so far allow and that have not been made."""
        return self.updates_per_step * self.steps - self.batches if self.steps >= self.warmup else 0.0

    @property
    def behind(self) -> bool:
        """More updates are due than the last trajectory allowed, and at least one, so actors should pause."""
        return self.due >= 1 and self.due > self.updates_per_step * self.last_added

    def metrics(self) -> dict[str, float]:
        return {"updates_per_step": self.batches / max(1, self.steps)}

    def state_dict(self) -> Snapshot:  # keys as in checkpoints of 0.1
        return {
            "moves": self.steps,
            "batches": self.batches,
            "latest": self.last_added,
            "ratio": self.updates_per_step,
        }

    def load_state_dict(self, state: Snapshot) -> None:
        """With other updates per step than before, updates that are due scale in proportion: none are made up for."""
        self.steps, self.batches, self.last_added = state["moves"], state["batches"], state["latest"]
        before = state.get("ratio", self.updates_per_step)  # not in checkpoints of 0.1
        if before != self.updates_per_step:
            self.batches = max(0, round(self.batches * self.updates_per_step / before))


class SampledReplay:
    """A replay that samples at random: random numbers by address, and actors that pause when learning lags behind."""

    rate_limiter: RateLimiter
    seed: int

    def is_empty(self) -> bool:
        """True when there is nothing to sample."""
        raise NotImplementedError

    def next_rng(self) -> np.random.Generator | None:
        """The random numbers of the next batch; None: no update is due, or there is nothing to sample.

        They depend on the seed and the number of the batch alone, so there is no generator to save.
        """
        if self.rate_limiter.due < 1 or self.is_empty():
            return None
        self.rate_limiter.batches += 1
        return np.random.Generator(np.random.Philox(key=[self.seed, self.rate_limiter.batches - 1]))

    @property
    def full(self) -> bool:
        # an empty replay needs actors that go on
        return self.rate_limiter.behind and not self.is_empty()
