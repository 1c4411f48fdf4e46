"""Visit counts of observations by hash, in compiled code."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bestiary.ops.jit import compiler

BUCKETS = 1 << 20
EPISODES = BUCKETS  # index of the number of episodes, after all buckets
compiled = compiler()

HashKeys = NDArray[np.uint64]  # a random odd number for each entry of an observation, and one for the action
Visits = NDArray[np.int64]


@compiled
def bucket(hash_keys: HashKeys, obs: NDArray[Any], prev_action: int, is_first: bool) -> np.int64:
    """A hash of 20 bits of an observation and the action that led to it; no action led to the first of an episode."""
    h = np.uint64(0 if is_first else prev_action + 1) * hash_keys[len(obs)]
    for j in range(len(obs)):
        h ^= (np.uint64(np.int64(obs[j] * 1024)) + np.uint64(j + 1)) * hash_keys[j]  # fractions: to a thousandth
        h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((h ^ (h >> np.uint64(32))) >> np.uint64(44))


@compiled
def count(
    counts: Visits, hash_keys: HashKeys, obs: NDArray[Any], prev_action: NDArray[np.int64], is_first: NDArray[np.bool_]
) -> None:
    for b in range(len(obs)):
        counts[bucket(hash_keys, obs[b], prev_action[b], is_first[b])] += 1
        counts[EPISODES] += is_first[b]


@compiled
def rarity(counts: Visits, hash_keys: HashKeys, obs: NDArray[Any], prev_action: int, is_first: bool) -> float:
    """min(1, episodes / visits) of a step that has been counted: 1/n for what an episode shows n times on average."""
    return min(1.0, counts[EPISODES] / counts[bucket(hash_keys, obs, prev_action, is_first)])
