"""Run directories of version 0.1 evaluate to the numbers that were recorded with that version, and resume."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.files import read_csv

import bestiary
from bestiary.analysis import curves
from bestiary.config import aliases
from bestiary.errors import UserError
from bestiary.launch.executor import evaluations
from bestiary.training.logs import Table
from bestiary.training.run import Run

OLD_RUNS = Path(__file__).parent / "data" / "old_runs"
EXPECTED = json.loads((OLD_RUNS / "expected.json").read_text())


def copied(name: str, to: Path) -> Run:
    return Run(shutil.copytree(OLD_RUNS / name, to / name))


@pytest.mark.parametrize("name", EXPECTED)
def test_an_old_run_evaluates_to_the_recorded_scores(name, tmp_path):
    result = bestiary.evaluate(copied(name, tmp_path), 8, envs=4, threads=1)
    for mode in ("greedy", "sampled"):
        assert result[mode]["scores"] == pytest.approx(EXPECTED[name][mode], rel=1e-6)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_old_run_resumes_as_its_own_version_did(name, tmp_path):
    run = copied(name, tmp_path)
    experiment = run.experiment()
    bestiary.train(replace(experiment, frames=experiment.frames * 3 // 2), run.path)
    rows = read_csv(run.path / "metrics.csv")
    for table in ("metrics.csv", "evaluations.csv", "episodes.csv"):
        before, after = read_csv(OLD_RUNS / name / table)[-1], read_csv(run.path / table)[-1]
        columns = {aliases.upgrade_metric(column) for column, value in before.items() if value}
        assert columns <= {column for column, value in after.items() if value}, f"{table} lost columns"
    last = {aliases.upgrade_metric(column): value for column, value in EXPECTED[name]["resumed"].items()}
    assert len(rows) == EXPECTED[name]["rows"]
    assert {column: float(rows[-1][column]) for column in last} == {
        column: pytest.approx(float(value), rel=1e-3) for column, value in last.items()
    }


def test_no_name_of_today_is_also_an_old_name():
    for table in (aliases.METRICS, aliases.WEIGHTS):
        assert not set(table.values()) & table.keys()
    paths = {".".join([*old.split(".")[:-1], new]) for old, new in aliases.SNAPSHOTS.items()}
    assert not paths & aliases.SNAPSHOTS.keys()


def test_old_keys_of_weights_and_of_the_learners_modules_are_upgraded(monkeypatch, tmp_path):
    monkeypatch.setitem(aliases.WEIGHTS, "head", "output")
    monkeypatch.setitem(aliases.WEIGHTS, "epsilon", "rate")
    saved = copied("dqn-delta-net", tmp_path).load()
    for keys in (saved.weights.keys(), saved.trainer["runtime"]["learner"]["target"].keys()):
        assert {"output.0.weight", "output.2.bias", "rate"} < keys
        assert not any(key.startswith(("head.", "epsilon")) for key in keys)
    with pytest.raises(UserError, match="another network"):  # as today's code does not know these keys
        bestiary.evaluate(tmp_path / "dqn-delta-net", 1)


def test_old_entries_of_a_snapshot_are_upgraded_by_their_path(monkeypatch, tmp_path):
    monkeypatch.setitem(aliases.METRICS, "loss", "cost")
    monkeypatch.setitem(aliases.SNAPSHOTS, "runtime.steps", "agent_steps")
    monkeypatch.setitem(aliases.SNAPSHOTS, "replay.batches", "samples")
    old = {
        "steps": 1,
        "runtime": {"steps": 2, "learner": {"optimizer": {"state": {0: {"steps": 3}}}}},
        "interval": {"sums": {"loss": 4.0}},
    }
    assert aliases.upgrade_snapshot(old) == {
        "steps": 1,
        "runtime": {"agent_steps": 2, "learner": {"optimizer": {"state": {0: {"steps": 3}}}}},
        "interval": {"sums": {"cost": 4.0}},
    }
    assert "samples" in (copied("r2d2", tmp_path).load_replay() or {})
    assert aliases.upgrade_snapshot([{"batches": 1}, {"batches": 2}], "replay") == [{"samples": 1}, {"samples": 2}]


def test_old_columns_are_read_and_continued_under_the_names_of_today(monkeypatch, tmp_path):
    monkeypatch.setitem(aliases.METRICS, "loss", "cost")
    monkeypatch.setitem(aliases.METRICS, "score_", "return_")
    run = copied("r2d2", tmp_path)
    old = [row["loss"] for row in read_csv(run.path / "metrics.csv")]
    line = curves.curves([run.path], "cost", bins=1).lines[0]
    assert line.y == pytest.approx(np.mean(np.array(old, float)))
    assert "return_std" in curves.offered(run)
    table = Table(run.path / "metrics.csv", keep_frames=4_000)
    table.write({"frames": 9_000, "cost": 0.5, "return_std": 0.25})
    table.close()
    rows = read_csv(run.path / "metrics.csv")
    assert "loss" not in rows[0]
    assert [row["cost"] for row in rows[:-1]] == old[: len(rows) - 1]
    assert (rows[-1]["cost"], rows[-1]["return_std"]) == ("0.5", "0.25")


def test_old_evaluations_are_read_under_the_names_of_today(monkeypatch, tmp_path):
    monkeypatch.setitem(aliases.METRICS, "score", "mean_return")
    run = copied("udrl", tmp_path)
    assert evaluations(run.path)[0]["mean_return"] == pytest.approx(-143.420927)
    assert curves.curves([run.path], "eval.mean_return", bins=1).lines[0].y[0] == pytest.approx(-143.420927)
