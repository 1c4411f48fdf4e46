"""Visit counts of observations by hash, in compiled code."""

import numpy as np

from bestiary.ops.jit import compiler

BUCKETS = 1 << 20
EPISODES = BUCKETS  # index of the number of episodes, after all buckets
compiled = compiler()


@compiled
def bucket(hash_keys, obs, prev_action, is_first):
    """A hash of 20 bits of an observation and the action that led to it; no action led to the first of an episode."""
    h = np.uint64(0 if is_first else prev_action + 1) * hash_keys[len(obs)]
    for j in range(len(obs)):
        h ^= (np.uint64(np.int64(obs[j] * 1024)) + np.uint64(j + 1)) * hash_keys[j]  # fractions: to a thousandth
        h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((h ^ (h >> np.uint64(32))) >> np.uint64(44))


@compiled
def count(counts, hash_keys, obs, prev_action, is_first):
    for b in range(len(obs)):
        counts[bucket(hash_keys, obs[b], prev_action[b], is_first[b])] += 1
        counts[EPISODES] += is_first[b]


@compiled
def rarity(counts, hash_keys, obs, prev_action, is_first):
    """min(1, episodes / visits) of a step that has been counted: 1/n for what an episode shows n times on average."""
    return min(1.0, counts[EPISODES] / counts[bucket(hash_keys, obs, prev_action, is_first)])
