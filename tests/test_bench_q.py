"""Benchmarks of the replay and of Ape-X and R2D2: small ones run and report all their results."""

import json
import math
import sys
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

from bestiary.bench import BENCHMARKS, q_atari, replay
from bestiary.cli.main import main as bestiary
from bestiary.errors import UserError

SMALL = replay.ReplayBench(capacity=1_000, batch=16, steps=1_000, batches=3, rounds=2)
PARTS = {"emulator", "acting", "writing", "sampling", "learning", "write_back"}


class Buffer:
    """The part of cpprb's buffer that the benchmark calls."""

    def __init__(self, size, env_dict, alpha, eps):
        self.priorities = np.zeros(size)
        assert env_dict == {"obs": {"shape": 1}}
        assert 0 < eps < alpha < 1

    def add(self, obs, priorities):
        assert obs.shape == (len(self.priorities), 1)
        self.priorities[:] = priorities

    def sample(self, batch_size, beta):
        assert 0 < beta < 1
        assert (self.priorities > 0).all()
        return {"obs": None, "weights": np.ones(batch_size), "indexes": np.arange(batch_size)}

    def update_priorities(self, indexes, priorities):
        self.priorities[indexes] = priorities


def check_positive(figures: dict[str, float]) -> None:
    assert all(math.isfinite(x) and x > 0 for x in figures.values()), figures


# -- replay -----------------------------------------------------------------------------------------------------------


def test_a_missing_cpprb_is_reported_and_is_no_error(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cpprb", None)
    results = replay.main(SMALL)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "cpprb is not installed, so nothing is compared with it: pip install cpprb"
    assert results.keys() == {"sampling", "apex-16", "apex-32"}
    assert results["sampling"].keys() == {"tree", "sums"}
    for batch in ("apex-16", "apex-32"):
        assert results[batch].keys() == {"whole", "tree", "copying", "rate", "share"}
    for figures in results.values():
        check_positive(figures)


def test_an_installed_cpprb_is_measured_too(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cpprb", SimpleNamespace(PrioritizedReplayBuffer=Buffer))
    rates = replay.trees(SMALL)
    assert rates.keys() == {"tree", "cpprb", "sums"}
    check_positive(rates)
    assert "install" not in capsys.readouterr().out


def test_a_replay_that_cannot_hold_a_batch_is_refused():
    with pytest.raises(UserError, match="raise it to 736"):
        replay.ReplayBench(steps=700)
    with pytest.raises(UserError, match="at least 1"):
        replay.ReplayBench(rounds=0)


# -- Ape-X and R2D2 -----------------------------------------------------------------------------------------------


@pytest.fixture
def brief(monkeypatch):
    for name, value in {"CAPACITY": 1_000, "UPDATES": 1, "RUN_UP": 1, "UNROLLS": 1}.items():
        monkeypatch.setattr(q_atari, name, value)


@pytest.mark.parametrize(
    ("cfg", "cores", "ideal"),
    [
        (q_atari.ApexAtari(envs=2, warmup=64, rounds=1, threads=1), 2, "in_turn"),
        (q_atari.ApexAtari(envs=2, warmup=64, rounds=1, threads=1, runtime="overlap"), 2, "side_by_side"),
        (q_atari.ApexAtari(envs=2, warmup=64, rounds=1, threads=1, runtime="overlap"), 1, "in_turn"),
        (q_atari.R2d2Atari(envs=4, warmup=400, rounds=1, threads=1), 1, "in_turn"),
    ],
    ids=["apex", "apex-overlap", "apex-overlap-on-one-core", "r2d2"],
)
def test_the_loop_is_compared_with_its_parts(cfg, cores, ideal, brief, monkeypatch, capsys):
    monkeypatch.setattr(q_atari, "cores", lambda: cores)
    r = q_atari.main(cfg)
    assert r.keys() == PARTS | {"in_turn", "side_by_side", "ideal", "loop", "updates", "share", "waiting"}
    check_positive(r)
    acting, learning = 1 / r["emulator"] + 1 / r["acting"], 1 / r["learning"]
    assert r["in_turn"] == pytest.approx(1 / (acting + learning))
    assert r["side_by_side"] == pytest.approx(1 / max(acting, learning))
    assert r["ideal"] == r[ideal]
    assert r["share"] == pytest.approx(r["loop"] / r["ideal"])
    assert r["waiting"] == pytest.approx(r["loop"] * (1 / r["sampling"] + 1 / r["write_back"]))
    out = capsys.readouterr().out
    assert out.count("at the same time as learning: ") == (cfg.runtime == "overlap")
    assert out.count("the ideal here") == 1


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help(name, capsys):
    place, _, settings = BENCHMARKS[name][0].partition(":")
    module = import_module(f"bestiary.bench.{place}")
    assert getattr(module, settings).__doc__ == f"bestiary bench {name}"
    with pytest.raises(SystemExit, match="0"):
        bestiary(["bench", name, "--help"])
    assert "--rounds" in capsys.readouterr().out


def test_results_are_written_to_a_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cpprb", None)
    out = tmp_path / "replay.json"
    flags = {"capacity": "1k", "batch": 16, "steps": "1k", "batches": 2, "rounds": 1, "json": out}
    words = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
    assert bestiary(["bench", "replay", *words]) == 0
    check_positive(json.loads(out.read_text())["sampling"])
