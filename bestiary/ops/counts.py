"""How often what is seen was seen before: counts by hash, in compiled code."""

import numpy as np

from bestiary.ops.jit import compiler

PLACES = 1 << 20
EPISODES = PLACES  # the place after all others counts them
compiled = compiler()


@compiled
def place(odd, obs, prev_action, is_first):
    """Where an observation, and the action that led to it, is counted: a hash of 20 bits. No action led to a first."""
    h = np.uint64(0 if is_first else prev_action + 1) * odd[len(obs)]
    for j in range(len(obs)):
        h ^= (np.uint64(np.int64(obs[j] * 1024)) + np.uint64(j + 1)) * odd[j]  # to a thousandth, if it is a fraction
        h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((h ^ (h >> np.uint64(32))) >> np.uint64(44))


@compiled
def count(counts, odd, obs, prev_action, is_first):
    for b in range(len(obs)):
        counts[place(odd, obs[b], prev_action[b], is_first[b])] += 1
        counts[EPISODES] += is_first[b]


@compiled
def rarity(counts, odd, obs, prev_action, is_first):
    """Of a row that has been counted: 1 if an episode shows the like of it once or less, 1/n if n times."""
    return min(1.0, counts[EPISODES] / counts[place(odd, obs, prev_action, is_first)])
