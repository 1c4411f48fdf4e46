"""Metrics of a Ray run: means over actors, replay shards and updates."""

from collections import Counter

from bestiary.runtime.ray.pools import ActorPool, ShardPool
from bestiary.runtime.ray.workers import LearnResult, RolloutResult


class RunMetrics:
    """Collects results until there is an update to report."""

    def __init__(self) -> None:
        self.rollouts: list[RolloutResult] = []  # since the last report

    def report(
        self, learned: list[LearnResult], rollouts: list[RolloutResult], actors: ActorPool, shards: ShardPool
    ) -> dict[str, float]:
        """Means over all rollouts and updates since the last report; empty if there was no update."""
        self.rollouts += rollouts
        updates = mean([r.metrics for r in learned if r.metrics])
        if not updates:
            return {}
        rollouts, self.rollouts = self.rollouts, []
        own = {
            "actors": float(actors.ready),
            "actors_lost": float(actors.lost),
            "learner_idle": sum(r.idle for r in learned) / len(learned),
        }
        if rollouts:
            own["unroll_seconds"] = sum(r.seconds for r in rollouts) / len(rollouts)
        replay = mean([status.metrics for status in shards.status.values()])
        return updates | replay | mean([r.env_metrics for r in rollouts]) | own


def mean(found: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every metric, over the reports that have it."""
    sums: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for values in found:
        counts.update(values.keys())
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value
    return {name: value / counts[name] for name, value in sums.items()}
