"""Benchmarks of speed. Alternatives are timed alternately within one run and compared by their medians."""

import statistics
import time
from collections.abc import Callable

BENCHMARKS = {  # name -> (module:settings class, description)
    "impala-atari": ("impala_atari:ImpalaAtari", "the IMPALA loop on Atari against the sum of its parts"),
    "apex-atari": ("q_atari:ApexAtari", "the Ape-X loop on Atari against the sum of its parts"),
    "r2d2-atari": ("q_atari:R2d2Atari", "the R2D2 loop on Atari against the sum of its parts"),
    "replay": (
        "replay:ReplayBench",
        "prioritized sampling: the sum tree against cpprb and NumPy; the whole replay with images",
    ),
    "cores": ("cores:CoresBench", "every core: rule against the plain loop, core against an LSTM, acting step"),
    "envs": (
        "envs:EnvsBench",
        "steps per second of the memory tasks: vector environment, EnvBatch, single environment",
    ),
    "riverraid": (
        "riverraid:RiverraidBench",
        "Riverraid emulators with readable RAM (ours and envpool's) and without",
    ),
    "cluster": (
        "cluster:ClusterBench",
        "the Ray runtime against one process on the same cores, and its costs",
    ),
    "scaling": (
        "scaling.report:ScalingBench",
        "predicted throughput of clusters with up to 1,000 actors",
    ),
    "findings": ("findings:FindingsBench", "effect of the CPU settings on learner speed: allocator, memory layout"),
}


def medians(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each alternative. They are called alternately, so that noise affects all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()  # warm-up
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
