"""Measured speed. Alternatives are timed in turn within one run and compared by their medians."""

import statistics
import time
from collections.abc import Callable

BENCHMARKS = {  # name -> (module, or module:settings where it has several, what it measures)
    "impala-atari": ("impala_atari", "the IMPALA loop on Atari against the sum of its parts"),
    "apex-atari": ("q_atari:ApexAtari", "the Ape-X loop on Atari against the sum of its parts"),
    "r2d2-atari": ("q_atari:R2d2Atari", "the R2D2 loop on Atari against the sum of its parts"),
    "replay": ("replay", "drawing by priority: the tree against cpprb and plain NumPy, the whole replay with pictures"),
    "cores": ("cores", "every memory: its rule against the plain loop, the core against an LSTM, a step of acting"),
    "envs": ("envs", "the memory tasks: steps per second as a vector environment, as a world and alone"),
    "riverraid": (
        "riverraid",
        "consoles whose memory can be read, ours and envpool's, and those of which it cannot",
    ),
    "cluster": ("cluster", "the same experiment by Ray and in one process, and where the time goes"),
    "scaling": ("scaling.report", "what a cluster of up to 1,000 actors would do, by simulation and on paper"),
    "findings": ("findings", "what the CPU settings are worth to the learner: allocator, memory layout"),
}


def medians(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each side, called in turn so that a noisy moment hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()  # warm
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
