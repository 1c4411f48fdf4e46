"""Fifty updates of every algorithm with every core must equal committed numbers.

After a change that is meant to change numbers, `python tests/test_golden_runs.py` writes the file again, and the
changelog lists the change under "Numbers changed".
"""

import json
import sys
from pathlib import Path

import pytest
from helpers.golden import experiment

from bestiary.config.experiment import family
from bestiary.runtime.start import start

FILE = Path(__file__).parent / "data" / "golden_runs.json"
CASES = [(algo, core) for algo in family("algo") for core in family("core")]


def numbers(algo: str, core: str) -> dict[str, float]:
    """Metrics after 1, 10 and 50 updates, and the mean score until then."""
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
