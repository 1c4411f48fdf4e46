"""Sequence priorities, importance sampling weights and per-actor epsilons: reference data and edge cases."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bestiary.algos.exploration import per_actor_epsilon
from bestiary.ops.priorities import importance_weights, sequence_priority

R2D2 = np.load(Path(__file__).parent / "data" / "r2d2.npz")


def arrays(prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): torch.as_tensor(R2D2[k]) for k in R2D2.files if k.startswith(prefix)}


@pytest.mark.parametrize("case", ["priority/seq0/", "priority/seq1/"])
def test_sequence_priorities_match_golden(case):
    z = arrays(case)
    valid = torch.arange(z["td"].shape[1])[:, None] < z["valid_len"]
    noise = torch.where(valid, z["td"].T, 1e6)  # invalid transitions must not count
    for eta, wanted in zip(z["eta"].reshape(-1).tolist(), z["priority"].reshape(-1, len(z["td"])), strict=True):
        torch.testing.assert_close(sequence_priority(noise, valid, eta), wanted, rtol=1e-12, atol=0)


def test_a_sequence_without_a_valid_transition_has_priority_zero():
    assert sequence_priority(torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.bool), 0.9).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("case", ["per/case0/", "per/case1/"])
def test_importance_weights_match_golden(case):
    z = arrays(case)
    probability = z["priority"] ** z["alpha"]
    probability = probability / probability.sum()
    torch.testing.assert_close(probability, z["probability"], rtol=1e-12, atol=0)
    weights = importance_weights(probability[z["index"]], len(probability), z["beta"].item())
    torch.testing.assert_close(weights, z["is_weight_batch_max"], rtol=1e-12, atol=0)
    assert weights.max() == 1


@pytest.mark.parametrize("name", [k for k in R2D2.files if k.startswith("ladder/")])
def test_the_per_actor_epsilons_match_golden(name):
    wanted = torch.from_numpy(R2D2[name]).float()
    torch.testing.assert_close(per_actor_epsilon(len(wanted), 0.4, 7.0), wanted, rtol=1e-6, atol=0)
