"""bestiary reproduce: the plan of a figure, its runs, interrupted runs and the files it writes."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.files import read_csv

from bestiary.cli.main import main
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.launch import reproduce
from bestiary.presets import memory_rl
from bestiary.presets.budgets import MEMORY_RL
from bestiary.training.run import Run


def tiny(task: str, length: int, memory: str, seed: int = 0) -> Experiment:
    experiment = memory_rl_quick(task, length, memory, seed)
    return replace(experiment, frames=16 * (length + 40), evaluation=Evaluation(episodes=4))


memory_rl_quick = memory_rl.quick


@pytest.fixture
def short_lengths(monkeypatch):
    """Two short lengths per task, trained for a few episodes."""
    monkeypatch.setattr(reproduce, "SMALL_LENGTHS", {"tmaze-passive": (1, 3), "visual-match": (1, 2)})
    monkeypatch.setattr(memory_rl, "quick", tiny)


def test_every_task_and_length_of_the_paper_is_planned():
    for figure, tasks in reproduce.FIGURES.items():
        jobs = reproduce.plan(figure, "paper", 2, (), Path("nowhere"))
        assert {(j.task, j.length, j.memory, j.seed) for j in jobs} == {
            (task, length, memory, seed)
            for task in tasks
            for length in MEMORY_RL[task]
            for memory in ("lstm", "gpt")
            for seed in (0, 1)
        }
        for job in jobs:
            env = job.experiment.env
            assert getattr(env, "length", None) == job.length and job.experiment.seed == job.seed
            assert type(env).__name__ == {"t": "TMaze", "v": "VisualMatch", "k": "KeyToDoor"}[job.task[0]]


def test_a_second_call_trains_no_finished_run_again(short_lengths, tmp_path, capsys):
    args = ["reproduce", "memory-rl/fig3", "--seeds", "2", "--cores", "ff", "delta-net", "--out", str(tmp_path)]
    assert main(args) == 0
    output = capsys.readouterr().out
    assert "16 runs, 0 of them finished" in output and "16 of 16" in output
    for kind in ("png", "svg", "csv"):
        assert (tmp_path / f"figure.{kind}").stat().st_size > 200
    table = read_csv(tmp_path / "figure.csv")
    assert len(table) == 8 and {row["seeds"] for row in table} == {"2"}
    row = next(r for r in table if (r["task"], r["memory"], r["length"]) == ("tmaze-passive", "ff", "3"))
    finals = [
        float(read_csv(tmp_path / f"tmaze-passive-3-ff-seed{s}" / "evaluations.csv")[-1]["score"]) for s in (0, 1)
    ]
    assert float(row["mean"]) == pytest.approx(sum(finals) / 2, abs=1e-4)
    assert {r["metric"] for r in table if r["task"] == "visual-match"} == {"success"}

    modified = {p: p.stat().st_mtime for p in tmp_path.glob("*/evaluations.csv")}
    assert main(args) == 0
    assert "16 of them finished" in capsys.readouterr().out
    assert modified == {p: p.stat().st_mtime for p in tmp_path.glob("*/evaluations.csv")}


def test_an_interrupted_run_is_finished(short_lengths, tmp_path):
    job = reproduce.plan("memory-rl/fig3", "small", 1, ("delta-net",), tmp_path)[0]
    Run.create(job.path, job.experiment)  # started, and stopped before anything was saved
    (job.path / "evaluations.csv").write_text("")
    assert not job.finished
    assert reproduce.train_missing([job], 1, lambda text: None, {job.kind: 1.0}) == []
    assert job.finished


def test_runs_not_yet_trained_are_marked_in_the_table(short_lengths, tmp_path):
    jobs = reproduce.plan("memory-rl/fig3", "small", 1, ("ff",), tmp_path)
    reproduce.train_missing(jobs[:1], 1, lambda text: None, {jobs[0].kind: 1.0})
    reproduce.plot_figure(jobs, "memory-rl/fig3", tmp_path / "figure", "mean")
    means = {(r["task"], r["length"]): r["mean"] for r in read_csv(tmp_path / "figure.csv")}
    assert list(means.values()).count("not run") == 3


def test_a_failed_run_is_named_and_the_others_continue(short_lengths, tmp_path):
    jobs = reproduce.plan("memory-rl/fig3", "small", 1, ("ff",), tmp_path)[:2]
    broken = jobs[0]._replace(
        experiment=replace(jobs[0].experiment, runtime=replace(jobs[0].experiment.runtime, device="no"))
    )
    problems = reproduce.train_missing([broken, jobs[1]], 1, lambda text: None, {job.kind: 1.0 for job in jobs})
    assert len(problems) == 1 and broken.name in problems[0] and "device='no'" in problems[0]
    assert jobs[1].finished


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["memory-rl/fig4"], "there is no figure 'memory-rl/fig4': did you mean memory-rl/fig6"),
        (["memory-rl/fig3", "--seeds", "0"], "seeds=0 must be at least 1"),
        (["memory-rl/fig3", "--cores", "lsmt"], "there is no core 'lsmt' at this scale: did you mean lstm"),
        (["memory-rl/fig3", "--scale", "paper", "--cores", "gru"], "there is no core 'gru' at this scale"),
        (["memory-rl/fig3", "--jobs", "0"], "jobs=0 must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *args]) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
