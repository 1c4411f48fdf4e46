"""Fifty updates of every algorithm with every memory, held to committed numbers.

After a change that is meant to change numbers: `python tests/test_golden_runs.py` writes them anew, and the
changelog says so under "Numbers changed".
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bestiary.algos import R2d2
from bestiary.algos.off_policy import OffPolicy
from bestiary.config.experiment import Experiment, family
from bestiary.envs import Recall
from bestiary.presets import preset
from bestiary.runtime import Local
from bestiary.runtime.start import start

FILE = Path(__file__).parent / "data" / "golden_runs.json"
NARROW = {"hidden": 16, "width": 16, "heads": 2, "layers": 1, "feedforward": 16, "window": 6}
CASES = [(algo, core) for algo in family("algo") for core in family("core")]


def experiment(algo: str, core: str) -> Experiment:
    base = preset("recall")
    chosen = base.algo if isinstance(base.algo, family("algo")[algo]) else family("algo")[algo]()
    often = {"warmup": 100, "ratio": 0.02} if isinstance(chosen, OffPolicy) else {}  # about an update per round
    short = {"window": 12, "burn_in": 4, "warmup": 300} if isinstance(chosen, R2d2) else {}
    cls = family("core")[core]
    memory = cls(**{name: value for name, value in NARROW.items() if name in cls.__dataclass_fields__})
    return replace(
        base,
        env=Recall(delay=4),
        algo=replace(chosen, unroll=8, batch_size=8, **(often | short)),
        core=memory,
        runtime=Local(envs=8, threads=1),
    )


def numbers(algo: str, core: str) -> dict[str, float]:
    """Metrics once 1, 10 and 50 updates are made, and the mean score on the way."""
    runtime = start(experiment(algo, core))
    out, scores, marks = {}, [], [1, 10, 50]
    for progress in runtime:
        scores += [e.score for e in progress.episodes]
        if progress.metrics and progress.updates >= marks[0]:
            out |= {f"{marks[0]}/{k}": v for k, v in progress.metrics.items()}
            marks = [mark for mark in marks if mark > progress.updates]
        if not marks:
            break
    runtime.close()
    return out | {"score": sum(scores) / len(scores)}


@pytest.mark.parametrize(("algo", "core"), CASES)
def test_fifty_updates_give_the_committed_numbers(algo, core):
    golden = json.loads(FILE.read_text())[f"{algo}+{core}"]
    got = numbers(algo, core)
    assert got.keys() == golden.keys()
    # other processors round otherwise, and fifty updates amplify it a little
    assert got == {k: pytest.approx(v, rel=1e-3, abs=1e-5) for k, v in golden.items()}


if __name__ == "__main__":
    FILE.write_text(json.dumps({f"{a}+{c}": numbers(a, c) for a, c in CASES}, indent=1) + "\n")
    sys.exit(0)
