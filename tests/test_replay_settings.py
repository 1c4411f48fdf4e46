"""The nested settings of replays: old flags are answered with the new ones, and old files load."""

import re
from typing import Any

import pytest

from bestiary.algos import AlgoConfig, Apex, Dqn, Impala, R2d2, SacDiscrete
from bestiary.cli.commands.train import read
from bestiary.config.schema import decode, encode
from bestiary.errors import UserError
from bestiary.replay import Fifo, Prioritized, Uniform


@pytest.mark.parametrize(
    ("preset", "old", "new"),
    [
        ("pong", "batch-size", "replay.batch-size"),
        ("pong", "queue", "replay.capacity"),
        ("tmaze", "ratio", "replay.updates-per-step"),
        ("tmaze", "window", "replay.sequence-length"),
        ("tmaze", "focus", "td-weight-exponent"),
        ("tmaze", "novelty", "count-epsilon"),
        ("tmaze", "period", "target-update-period"),
        ("tmaze", "memory-lr", "core-lr"),
        ("visual-match-60", "warmup", "replay.warmup"),
        ("apex-small", "alpha", "replay.priority-exponent"),
        ("r2d2-small", "beta", "replay.importance-exponent"),
        ("r2d2-small", "stride", "replay.stride"),
        ("r2d2-small", "rescale", "value-rescale-eps"),
    ],
)
def test_an_old_flag_is_answered_with_its_new_name(preset, old, new):
    with pytest.raises(UserError, match=re.escape(f"--algo.{old} is called --algo.{new} now")):
        read([preset, f"--algo.{old}", "1"])


OLD_OFF_POLICY: dict[str, Any] = {
    "unroll": 5,
    "batch_size": 7,
    "capacity": 9_000,
    "warmup": 800,
    "ratio": 0.5,
    "window": 12,
    "stored_state": True,
    "memory_lr": 1e-4,
}
OLD_PRIORITIZED: dict[str, Any] = OLD_OFF_POLICY | {
    "alpha": 0.3,
    "beta": 0.2,
    "priority_floor": 1e-3,
    "eviction": "priority",
    "period": 40,
    "rescale": 1e-2,
    "burn_in": 2,
}
UNIFORM = Uniform(7, 9_000, 800, 0.5, sequence_length=12, stored_state=True)
PRIORITIZED = Prioritized(7, 9_000, 800, 0.5, 0.3, 0.2, 1e-3, 12, 10, True, 0.7, "priority")
OLD = [
    ({"kind": "impala", "batch_size": 4, "queue": 9}, Impala(replay=Fifo(4, 9))),
    (
        {"kind": "dqn", "focus": 1.5, "novelty": 0.1, **OLD_OFF_POLICY},
        Dqn(UNIFORM, unroll=5, core_lr=1e-4, td_weight_exponent=1.5, count_epsilon=0.1),
    ),
    ({"kind": "sac-discrete", **OLD_OFF_POLICY}, SacDiscrete(UNIFORM, unroll=5, core_lr=1e-4)),
    (
        {"kind": "apex", **{k: v for k, v in OLD_PRIORITIZED.items() if k not in ("window", "stored_state")}},
        Apex(
            Prioritized(7, 9_000, 800, 0.5, 0.3, 0.2, 1e-3, eviction="priority"),
            unroll=5, core_lr=1e-4, target_update_period=40, value_rescale_eps=1e-2, burn_in=2,
        ),
    ),
    (
        {"kind": "r2d2", "stride": 10, "eta": 0.7, **OLD_PRIORITIZED},
        R2d2(PRIORITIZED, unroll=5, core_lr=1e-4, target_update_period=40, value_rescale_eps=1e-2, burn_in=2),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("old", "algo"), OLD, ids=[old["kind"] for old, _ in OLD])
def test_the_flat_settings_of_an_old_file_become_nested(old, algo):
    assert decode(AlgoConfig, old) == algo
    assert decode(AlgoConfig, encode(algo)) == algo


def test_no_setting_is_a_field_of_both_an_algorithm_and_its_replay():
    for algo in (Impala(), Dqn(), SacDiscrete(), Apex(), R2d2()):
        assert not vars(algo).keys() & vars(algo.replay).keys()
