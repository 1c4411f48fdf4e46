"""Sweeps: search spaces, trials, pruning, resuming and results."""

import json
import re
import shlex
import signal
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import fake_run
from helpers.files import modification_times, read_csv

from bestiary.cli.commands.sweep import read
from bestiary.cli.commands.train import read as read_train
from bestiary.cli.main import main
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.errors import UserError
from bestiary.launch import executor
from bestiary.launch.spaces import BUILTIN, Choices, Range, Space, apply, flags, load_space, read_space
from bestiary.launch.sweep_settings import SweepSettings
from bestiary.presets import PRESETS, preset

LR = {"algo.optimizer.lr": {"low": 1e-5, "high": 1e-1, "log": True}}
ROOT = Path(__file__).parent.parent


@pytest.fixture
def fake_training(monkeypatch):
    """Start real processes that only write the files of a training run."""
    pytest.importorskip("optuna")
    monkeypatch.setattr(executor, "command", lambda path: [sys.executable, fake_run.__file__, str(path)])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def experiment() -> Experiment:
    return replace(preset("catch"), frames=400, evaluation=Evaluation(every=100, episodes=4))


def sweep(experiment: Experiment, space: Any, trials: int, run: Path, stop: Any = lambda: False, **options: Any) -> Any:
    from bestiary.launch.sweep import sweep

    jobs = options.pop("jobs", None)
    return sweep(experiment, space, run, SweepSettings(trials, **options), jobs, stop=stop)


def final_score(experiment: Experiment, lr: float, seed: int) -> float:
    changed = apply(replace(experiment, seed=seed), {"algo.optimizer.lr": lr})
    return fake_run.value(json.loads(changed.to_json()))


# -- spaces -------------------------------------------------------------------------------------------------


def test_a_space_is_the_same_in_toml_in_json_and_nested(experiment, tmp_path):
    (tmp_path / "flat.toml").write_text(
        '"algo.optimizer.lr" = {low = 1e-5, high = 1e-2, log = true}\n"algo.replay.batch-size" = {choices = [4, "8"]}\n'
        'frames = {low = "1k", high = "3k", step = 1000}\n'
    )
    (tmp_path / "nested.toml").write_text(
        "[algo.optimizer]\nlr = {low = 1e-5, high = 1e-2, log = true}\n[algo.replay]\nbatch_size = {choices = [4, 8]}\n"
        "[frames]\nlow = 1000\nhigh = 3e3\nstep = '1k'\n"
    )
    entries = {
        "algo": {"optimizer.lr": {"low": 1e-5, "high": 1e-2, "log": True}, "replay.batch-size": {"choices": [4, 8]}},
        "frames": {"low": 1000, "high": 3000, "step": 1000},
    }
    (tmp_path / "space.json").write_text(json.dumps(entries))
    found = [load_space(str(tmp_path / name), experiment) for name in ("flat.toml", "nested.toml", "space.json")]
    assert found[0] == found[1] == found[2]
    assert found[0] == {
        "algo.optimizer.lr": Range(1e-5, 1e-2, log=True),
        "algo.replay.batch_size": Choices((4, 8)),
        "frames": Range(1000, 3000, step=1000, whole=True),
    }


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        ("", "the space is empty"),
        ('"algo.optimizer.lrr" = {low = 1e-5, high = 1e-2}', "there is no setting algo.optimizer.lrr: did you mean"),
        ('"core.hidden" = {low = 1, high = 2}', "there is no setting core.hidden"),
        ('"algo.optimizer.lr" = {low = 1e-2, high = 1e-5}', "low=0.01 must be below high=1e-05"),
        ('"algo.optimizer.lr" = {low = 1e-2, high = 1e-2}', "low=0.01 must be below high=0.01"),
        ('"algo.optimizer.lr" = {low = 0, high = 1, log = true}', "low=0.0 must be positive where log is true"),
        ('"algo.optimizer.lr" = {low = -1, high = 1}', "optimizer.lr=-1.0 must be positive"),
        ('"algo.optimizer.lr" = {low = "small", high = 1}', "low='small' is not a number"),
        ('"algo.optimizer.lr" = {low = 1e-5}', "algo.optimizer.lr has no high"),
        ('"algo.optimizer.lr" = {lo = 1e-5, high = 1}', "did you mean low"),
        ('"algo.optimizer.lr" = {choices = []}', "should be a list of at least one value"),
        ('"algo.optimizer.lr" = {choices = [1, 1.0]}', "the choice 1.0 is given twice"),
        ('"algo.optimizer.lr" = {choices = [1], low = 1}', "low cannot be used with them"),
        ('"algo.optimizer.lr" = {low = 0.1, high = 1, step = 3}', "step=3.0 must lie between 0 and 0.9"),
        ('"algo.optimizer.lr" = 3', "should have low and high, or choices, not 3"),
        (
            '"algo.replay.batch-size" = {low = 0.5, high = 4}',
            "algo.replay.batch_size: low=0.5 is not a whole number",
        ),
        ('"algo.replay.batch-size" = {choices = [4, true]}', "algo.replay.batch_size=True is not a whole number"),
        ('"algo.reward-clip" = {choices = ["abs"]}', "is not one of abs_one"),
        ('"algo.reward-clip" = {low = 1, high = 2}', "is not a number: give choices"),
        ('core = {choices = ["lstm", "grru"]}', "there is no core 'grru': did you mean gru"),
        ('core = {choices = ["lstm", "ff"]}\n"core.hidden" = {choices = [8]}', "no setting core.hidden with core=ff"),
        ("seed = {low = 0, high = 3}", "the seed is no hyper-parameter"),
        ("[evaluation]\nepisodes = {low = 1, high = 3}", "evaluation.episodes is no hyper-parameter"),
        ("algo = ", "cannot be read"),
    ],
)
def test_a_wrong_space_is_refused_in_one_sentence(space, sentence, capsys, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    (tmp_path / "space.toml").write_text(space)
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "catch", "--space", "space.toml"]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and len(printed.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["space.toml"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--space", "urdl"], "there is no space 'urdl': did you mean udrl?"),
        (["--space", "none.toml"], "there is no file none.toml"),
        ([], "--space is missing"),
        (["--space", "lr", "--trials", "0"], "trials=0 must be at least 1"),
        (["--space", "lr", "--seeds-per-trial", "0"], "seeds-per-trial=0"),
        (["--space", "lr", "--jobs", "0"], "jobs=0 must be at least 1"),
        (["--space", "lr", "--evaluation.episodes", "0"], "leaves no metric to compare trials by"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(args, sentence, capsys, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "catch", *args]) == 2
    assert sentence in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_learning_rate_to_search(name):
    assert read_space(BUILTIN["lr"], preset(name))["algo.optimizer.lr"] == Range(1e-5, 1e-2, log=True)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("udrl")])
@pytest.mark.parametrize("which", ["udrl", "udrl-repo"])
def test_the_spaces_of_upside_down_rl_fit_its_presets(which, name):
    space = read_space(BUILTIN[which], preset(name))
    assert len(space["algo.head"].samples()) == 10 and len(space["algo.command_scale"].samples()) == 25
    last = {setting: entry.samples()[-1] for setting, entry in space.items()}
    assert read_train([name, *flags(preset(name), last)]).experiment == apply(preset(name), last)


def test_values_of_a_trial_can_be_given_on_the_command_line():
    space = {
        "core": {"choices": ["lstm", "gru"]},
        "core.hidden": {"choices": [8, "16"]},
        "algo.optimizer": {"choices": ["adam", "rms-prop"]},
        "algo.optimizer.lr": {"low": 1e-4, "high": 0.123456789},
        "net.prev-action": {"choices": [False, "true"]},
        "checkpoint.frames": {"choices": ["None", "5k"]},
        "checkpoint.milestones": {"choices": ["1k,2k", [5]]},
    }
    recall = preset("recall")
    found = read_space(space, recall)
    for which in (0, -1):
        values = {name: entry.samples()[which] for name, entry in found.items()}
        assert read_train(["recall", *flags(recall, values)]).experiment == apply(recall, values)


# -- trials -------------------------------------------------------------------------------------------------


def test_a_sweep_of_three_trials_is_continued_to_five(fake_training, tmp_path, capsys):
    (tmp_path / "space.json").write_text(json.dumps(LR))
    root = tmp_path / "sweep"
    args = ["sweep", "catch", "--frames", "400", "--evaluation.every", "100", "--space", str(tmp_path / "space.json")]
    args += ["--run", str(root), "--seed", "6", "--trials"]
    assert main([*args, "3"]) == 0
    assert "trials: 3 finished" in capsys.readouterr().out
    first = read_csv(root / "trials.csv")
    before = modification_times(root / "trial0002")
    assert main([*args, "5"]) == 0
    printed = capsys.readouterr().out
    assert "3 of 5 trials have ended" in printed and "trials: 5 finished" in printed

    table = read_csv(root / "trials.csv")
    assert [row["trial"] for row in table] == ["0", "1", "2", "3", "4"] and table[:3] == first
    assert modification_times(root / "trial0002") == before
    rates = [float(row["algo.optimizer.lr"]) for row in table]
    assert len(set(rates)) == 5 and all(1e-5 <= rate <= 1e-1 for rate in rates)
    experiment = read_train(["catch", "--frames", "400"]).experiment
    for row, rate in zip(table, rates, strict=True):
        seed_scores = [final_score(experiment, rate, seed) for seed in (6, 7)]
        assert [float(row[name]) for name in ("seed6", "seed7")] == pytest.approx(seed_scores, abs=1e-8)
        assert float(row["score"]) == pytest.approx(sum(seed_scores) / 2, abs=1e-8)
    best = max(table, key=lambda row: float(row["score"]))
    assert f"--algo.optimizer.lr {best['algo.optimizer.lr']}" in printed
    assert (root / "sweep.png").stat().st_size > 5_000
    assert (root / "trial0004" / "seed7" / "experiment.json").exists()


def test_the_value_of_a_trial_is_the_mean_of_its_last_evaluations(fake_training, experiment, tmp_path):
    (trial,) = sweep(experiment, {"algo.optimizer.lr": {"choices": [1e-3]}}, 1, tmp_path, seeds_per_trial=1, last=2)
    assert trial.value == pytest.approx(final_score(experiment, 1e-3, 0) * (0.75 + 1) / 2, abs=1e-8)


def test_an_interrupted_trial_resumes_with_its_own_values(fake_training, experiment, tmp_path, monkeypatch):
    monkeypatch.setenv(fake_run.SECONDS_PER_EVALUATION, "0.1")
    start = time.monotonic()

    def stop() -> bool:
        return (tmp_path / "trial0000" / "seed0" / "metrics.csv").exists() or time.monotonic() - start > 20

    (interrupted,) = sweep(experiment, LR, 2, tmp_path, jobs=1, seeds_per_trial=1, stop=stop)
    assert interrupted.state == "running" and interrupted.value is None
    monkeypatch.setenv(fake_run.SECONDS_PER_EVALUATION, "0")
    trials = sweep(experiment, LR, 2, tmp_path, jobs=1, seeds_per_trial=1)
    assert sorted(trial.number for trial in trials) == [0, 1]
    resumed = next(trial for trial in trials if trial.number == 0)
    assert resumed.state == "complete" and resumed.values == interrupted.values


def test_a_trial_below_the_median_is_pruned(fake_training, experiment, tmp_path, monkeypatch):
    from bestiary.launch import sweep as module

    monkeypatch.setattr(module, "STARTUP_TRIALS", 2)
    monkeypatch.setattr(module, "PRUNE_SECONDS", 0.02)
    monkeypatch.setenv(fake_run.SECONDS_PER_EVALUATION, "0.12")
    trials = sweep(experiment, LR, 8, tmp_path, jobs=2, seeds_per_trial=1, sampler="random")
    pruned = [trial for trial in trials if trial.state == "pruned"]
    complete = [trial.value for trial in trials if trial.state == "complete"]
    assert pruned and len(complete) >= 2
    assert any(not list((tmp_path / f"trial{t.number:04d}").glob("*/checkpoints/*400")) for t in pruned)
    final_scores = [final_score(experiment, t.values["algo.optimizer.lr"], 0) for t in pruned]
    assert max(final_scores) < max(complete)


def test_no_trial_is_pruned_without_prune(fake_training, experiment, tmp_path, monkeypatch):
    from bestiary.launch import sweep as module

    monkeypatch.setattr(module, "STARTUP_TRIALS", 1)
    trials = sweep(experiment, LR, 5, tmp_path, jobs=2, seeds_per_trial=1, prune=False)
    assert {trial.state for trial in trials} == {"complete"}


def test_the_same_settings_are_not_tried_twice(fake_training, experiment, tmp_path):
    trials = sweep(experiment, {"algo.optimizer.lr": {"choices": [1e-3, 1e-2]}}, 6, tmp_path, jobs=1, seeds_per_trial=1)
    assert len(trials) == 6 and {trial.state for trial in trials} == {"complete"}
    assert len(list(tmp_path.glob("trial0*"))) == 2
    for trial in trials:
        assert trial.value == pytest.approx(final_score(experiment, trial.values["algo.optimizer.lr"], 0), abs=1e-8)


def test_a_trial_with_an_invalid_combination_fails_alone(fake_training, experiment, tmp_path):
    # at most 64 trajectories are queued with 32 environments, 32 with 16
    space = {"algo.replay.batch_size": {"choices": [8, 60]}, "runtime.envs": {"choices": [16, 32]}}
    trials = sweep(experiment, space, 12, tmp_path, jobs=1, seeds_per_trial=1)
    failed = [trial for trial in trials if trial.state == "failed"]
    assert failed and all(list(trial.values.values()) == [60, 16] for trial in failed)
    assert "can never be filled" in failed[0].problem
    assert any("can never be filled" in row["problem"] for row in read_csv(tmp_path / "trials.csv"))
    assert trials[0].state == "complete"


def test_a_sweep_ends_if_its_first_trials_fail(fake_training, experiment, tmp_path):
    with pytest.raises(UserError, match="the first 3 trials failed, the last: seed 13: ValueError: sensor"):
        sweep(replace(experiment, seed=13), LR, 50, tmp_path, jobs=1, seeds_per_trial=1)
    assert [row["state"] for row in read_csv(tmp_path / "trials.csv")] == ["failed"] * 3


def test_a_metric_that_is_not_measured_is_refused(fake_training, experiment, tmp_path):
    with pytest.raises(UserError, match="have no success: choose another --metric"):
        sweep(experiment, LR, 5, tmp_path, jobs=1, seeds_per_trial=1, metric="success")
    with pytest.raises(UserError, match="there is no metric 'scores': did you mean score"):
        sweep(experiment, LR, 5, tmp_path / "other", metric="scores")
    assert not (tmp_path / "other").exists()


def test_another_sweep_in_the_same_directory_is_refused(fake_training, experiment, tmp_path):
    sweep(experiment, LR, 1, tmp_path / "s", seeds_per_trial=1)
    before = modification_times(tmp_path)
    with pytest.raises(UserError, match=r"holds another sweep .*space.algo.optimizer.lr.high: 0.1 -> 0.01"):
        sweep(experiment, "lr", 2, tmp_path / "s", seeds_per_trial=1)
    with pytest.raises(UserError, match=r"holds another sweep .*seeds_per_trial: 1 -> 2"):
        sweep(experiment, LR, 2, tmp_path / "s")
    with pytest.raises(UserError, match="neither empty nor a sweep"):
        sweep(experiment, LR, 2, tmp_path)
    assert modification_times(tmp_path) == before


def test_importances_need_at_least_ten_trials():
    optuna = pytest.importorskip("optuna")
    from bestiary.launch.sweep import importances

    space: Space = {name: Range(0.0, 1.0) for name in ("matters", "noise", "other")}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    distributions = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in space}
    for number in range(30):
        if number == 9:
            assert importances(study, space) == {}
        trial = study.ask(distributions)
        study.tell(trial, -((trial.params["matters"] - 0.3) ** 2))
    importance = importances(study, space)
    assert sum(importance.values()) == pytest.approx(1) and importance["matters"] > 0.6


def test_a_sweep_with_real_training(tmp_path, capsys):
    pytest.importorskip("optuna")
    args = ["--runtime.envs", "4", "--algo.replay.batch-size", "4", "--frames", "400", "--evaluation.episodes", "4"]
    args += ["--space", "lr", "--trials", "1", "--seeds-per-trial", "1", "--run", str(tmp_path / "s")]
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    assert main(["sweep", "catch", *args]) == 0
    for number, handler in before.items():
        signal.signal(number, handler)
    printed = capsys.readouterr().out
    assert "no trial is pruned" in printed and "trials: 1 finished" in printed
    (row,) = read_csv(tmp_path / "s" / "trials.csv")
    (last,) = read_csv(tmp_path / "s" / "trial0000" / "seed0" / "evaluations.csv")
    assert float(row["score"]) == float(last["score"])


def test_the_sweeps_in_the_documentation_are_parsed():
    found = []
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        text = page.read_text().replace("\\\n", " ")
        found += re.findall(r"^bestiary sweep ([^#\n]+)|`bestiary sweep ([^`\n]+)`", text, re.M)
    commands = [shlex.split(one or other) for one, other in found if "PRESET" not in one + other]
    assert commands
    for words in commands:
        assert words[0] in PRESETS, words
        read(words)


def test_the_space_in_the_documentation_is_valid():
    text = (ROOT / "docs" / "seeds-and-sweeps.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    assert len(read_space(tomllib.loads(block), preset("recall"))) == 5
