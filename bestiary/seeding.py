"""Seeds of independent random streams, derived from one seed and an address, so that their order does not matter."""

from typing import Any

import numpy as np

TRAIN, EVAL, ACTIONS, WEIGHTS, LEARNING, INSPECTION, REPLAY, DETECTION = range(8)  # kinds of streams


def derive(*address: int) -> int:
    """A 31-bit seed for an address such as (seed, TRAIN, slot, episode)."""
    # SeedSequence pads with zeros and splits large numbers: length and width make every address distinct
    words = [len(address), *(word for part in address for word in (part & 0xFFFFFFFF, part >> 32))]
    return int(np.random.SeedSequence(words).generate_state(1)[0] & 0x7FFFFFFF)


def substream(stream: int, *address: int) -> int:
    """One of many streams of a kind, such as (EVAL, seed, number). Streams of different kinds never coincide."""
    return stream + 64 * (1 + derive(*address))  # there are fewer than 64 kinds


def mix(z: Any, counter: Any) -> Any:
    """One round of SplitMix64 in uint64, for arrays or, compiled, for single numbers."""
    z = z + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hash64(key: np.ndarray, *counters: int | np.ndarray) -> np.ndarray:
    """Counter-based random bits [B] in uint64 (SplitMix64): a function of key and counters alone."""
    z = key.astype(np.uint64)
    with np.errstate(over="ignore"):
        for counter in counters:
            z = mix(z, np.asarray(counter, np.uint64))
    return z
