"""Several seeds with one command: trained in parallel, resumed, stopped, and summarised."""

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import fake_run
from helpers.fake_run import SECONDS_PER_EVALUATION, value
from helpers.files import modification_times

from bestiary.analysis.seed_runs import seed_runs
from bestiary.cli.commands.eval import read as read_eval
from bestiary.cli.commands.train import Signals
from bestiary.cli.main import main
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.envs import Catch
from bestiary.errors import UserError
from bestiary.launch import executor, seeds
from bestiary.presets import preset
from bestiary.training.display import count
from bestiary.training.run import Run

QUICK = ["--runtime.envs", "4", "--algo.replay.batch-size", "4", "--log.no-tensorboard"]
QUICK += ["--evaluation.every", "200", "--evaluation.episodes", "4"]


@pytest.fixture
def fake_training(monkeypatch):
    """Start real processes that only write the files of a training run."""
    monkeypatch.setattr(executor, "command", lambda path: [sys.executable, fake_run.__file__, str(path)])


@pytest.fixture(scope="module", autouse=True)
def _signals():
    """Restore the signal handlers that the program replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def experiment() -> Experiment:
    return replace(preset("catch"), frames=400, evaluation=Evaluation(every=100, episodes=4))


def final_score(experiment: Experiment, seed: int) -> float:
    return value(json.loads(replace(experiment, seed=seed).to_json()))


def is_unlocked(root: Path) -> bool:
    """True if no process of a run is left, because each holds the lock of the directory."""
    executor.lock_directory(root).close()
    return True


# -- parsing seeds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "first", "found"),
    [
        ("5", 0, [0, 1, 2, 3, 4]),
        ("3", 40, [40, 41, 42]),
        ("25..29", 0, [25, 26, 27, 28, 29]),
        ("7..7", 0, [7]),
        ("1,5,9", 3, [1, 5, 9]),
        ("9, 1..3", 0, [9, 1, 2, 3]),
    ],
)
def test_seeds_are_a_number_a_range_or_a_list(text, first, found):
    assert seeds.parse_seeds(text, first) == found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0", "must be at least 1"),
        ("29..25", "ends before it starts: write it as 25..29"),
        ("1,5,1", "contain 1 twice"),
        ("1,3..5,4", "contain 4 twice"),
        ("-3", "should be a number of seeds (5), a range (25..29) or a list (1,5,9)"),
        ("", "should be a number of seeds"),
        ("five", "should be a number of seeds"),
        ("1..", "should be a number of seeds"),
        ("0..5000000000", "at most 1,000 are allowed"),
    ],
)
def test_other_texts_are_not_seeds(text, sentence):
    with pytest.raises(UserError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        seeds.parse_seeds(text)


def test_each_seed_has_one_thread_by_default(experiment, tmp_path):
    planned = seeds.plan(experiment, [3, 4], tmp_path)
    assert [(job.experiment.seed, job.experiment.runtime.threads, job.path.name) for job in planned] == [
        (3, 1, "seed3"),
        (4, 1, "seed4"),
    ]
    two = replace(experiment, runtime=replace(experiment.runtime, threads=2))
    assert seeds.plan(two, [0], tmp_path)[0].experiment.runtime.threads == 2


# -- results -----------------------------------------------------------------------------------------


def test_statistics_over_seeds_equal_those_computed_by_hand(fake_training, experiment, tmp_path):
    messages: list[str] = []
    result = seeds.train_seeds(experiment, [1, 2, 8], tmp_path, jobs=3, log=messages.append)
    values = sorted(final_score(experiment, seed) for seed in (1, 2, 8))
    last = result["over_seeds"]["score"]["last"]
    assert last["n"] == 3
    assert last["mean"] == pytest.approx(sum(values) / 3, abs=1e-8)
    # the middle half of three values: the middle one and a quarter of each outer one
    assert last["iqm"] == pytest.approx((0.25 * values[0] + values[1] + 0.25 * values[2]) / 1.5, abs=1e-8)
    # the probability that a resample of three is three times the lowest is 1/27, more than 2.5%
    assert (last["ci95_low"], last["ci95_high"]) == pytest.approx((values[0], values[2]), abs=1e-8)
    assert json.loads((tmp_path / "seeds.json").read_text()) == result
    assert [row["score"]["best_frames"] for row in result["seeds"]] == [400] * 3
    with (tmp_path / "seeds.csv").open() as file:
        table = {row["seed"]: row for row in csv.DictReader(file)}
    assert float(table["2"]["score_last"]) == pytest.approx(final_score(experiment, 2), abs=1e-8)
    assert float(table["mean"]["score_last"]) == pytest.approx(last["mean"])
    assert float(table["iqm"]["score_best"]) == pytest.approx(result["over_seeds"]["score"]["best"]["iqm"])
    assert sum("finished in" in line for line in messages) == 3


def test_one_seed_has_no_interval():
    assert seeds.over_seeds([3.0])["mean"] == 3 and seeds.over_seeds([3.0])["ci95_low"] is None


def test_the_best_evaluation_need_not_be_the_last(experiment, tmp_path):
    (job,) = seeds.plan(experiment, [0], tmp_path)
    (job.path / "checkpoints" / "000000000400").mkdir(parents=True)
    # the last row is incomplete
    (job.path / "evaluations.csv").write_text("frames,score\n100,1\n200,7\n300,7\n400,3\n500,9")
    (row,) = seeds.report([job], {})["seeds"]
    assert row["finished"] and row["score"] == {"last": 3.0, "best": 7.0, "best_frames": 300}


def test_progress_of_running_seeds_is_logged(fake_training, experiment, tmp_path, monkeypatch):
    monkeypatch.setenv(SECONDS_PER_EVALUATION, "0.2")
    messages: list[str] = []
    seeds.train_seeds(experiment, [25, 26], tmp_path, jobs=2, log=messages.append, progress_seconds=0.3)
    progress_lines = [line for line in messages if "seed 26" in line and "of 400" in line]
    assert progress_lines and any("evaluation 0." in line for line in progress_lines)


# -- resume and stop ---------------------------------------------------------------------------------------


def test_finished_seeds_are_kept_and_the_others_resume(fake_training, experiment, tmp_path):
    seeds.train_seeds(experiment, [0], tmp_path)
    before = modification_times(tmp_path / "seed0")
    result = seeds.train_seeds(experiment, [0, 1], tmp_path)
    assert modification_times(tmp_path / "seed0") == before
    assert [row["finished"] for row in result["seeds"]] == [True, True]
    longer = seeds.train_seeds(replace(experiment, frames=600), [0, 1], tmp_path)
    assert [row["frames"] for row in longer["seeds"]] == [600, 600]
    assert modification_times(tmp_path / "seed0") != before


def test_a_seed_that_fails_does_not_stop_the_others(fake_training, tmp_path, capsys):
    args = ["train", "catch", *QUICK, "--frames", "400", "--seeds", "12..14", "--jobs", "1", "--run", str(tmp_path)]
    assert main(args) == 2
    printed = capsys.readouterr()
    assert "seed 13 failed: ValueError: sensor unplugged" in printed.out
    assert "1 of 3 seeds failed, the first: seed 13: ValueError: sensor unplugged" in printed.err
    rows = {row["seed"]: row for row in json.loads((tmp_path / "seeds.json").read_text())["seeds"]}
    assert rows[12]["finished"] and rows[14]["finished"] and not rows[13]["finished"]
    assert json.loads((tmp_path / "seeds.json").read_text())["over_seeds"]["score"]["last"]["n"] == 2


def test_an_error_ends_all_processes(fake_training, experiment, tmp_path, monkeypatch):
    monkeypatch.setenv(SECONDS_PER_EVALUATION, "0.1")
    long = replace(experiment, frames=100_000)

    def fail(working: list[seeds.SeedRun]) -> None:
        raise RuntimeError("callback failed")

    with pytest.raises(RuntimeError, match="callback failed"):
        executor.run_all(
            seeds.plan(long, [0, 1], tmp_path), 2, lambda ended: None, on_progress=fail, progress_seconds=0.5
        )
    assert is_unlocked(tmp_path)
    assert all(list((tmp_path / f"seed{s}" / "checkpoints").iterdir()) for s in (0, 1))  # they saved checkpoints


def test_a_directory_in_use_is_refused(fake_training, experiment, tmp_path):
    tmp_path.mkdir(exist_ok=True)
    with executor.lock_directory(tmp_path), pytest.raises(UserError, match="is in use by another process"):
        seeds.train_seeds(experiment, [0], tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_every_seed_and_the_same_command_resumes(number, fake_training, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(SECONDS_PER_EVALUATION, "0.05")
    args = ["train", "catch", *QUICK, "--seeds", "3..4", "--jobs", "2", "--run", str(tmp_path), "--frames"]

    def interrupt() -> None:
        while not all((tmp_path / f"seed{s}" / "metrics.csv").exists() for s in (3, 4)):
            time.sleep(0.02)
        # otherwise the signal would end the tests
        assert isinstance(getattr(signal.getsignal(number), "__self__", None), Signals)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main([*args, "100k"]) == 128 + number
    assert "(unfinished)" in capsys.readouterr().out
    assert json.loads((tmp_path / "seeds.json").read_text())["over_seeds"] == {}  # nothing to compare yet
    assert is_unlocked(tmp_path)
    frames = [int(Run(tmp_path / f"seed{s}").find().name) for s in (3, 4)]
    assert 0 < min(frames) <= max(frames) < 100_000
    assert main([*args, str(max(frames) + 200)]) == 0
    rows = json.loads((tmp_path / "seeds.json").read_text())["seeds"]
    assert [row["finished"] for row in rows] == [True, True]


def test_only_a_second_ctrl_c_interrupts_saving():
    stop = Signals()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # a batch system that signals the program and its processes
    assert stop() and stop.received == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--seeds", "x"], "seeds='x' should be a number of seeds"),
        (["--seeds", "2", "--jobs", "0"], "jobs=0 must be at least 1"),
        (["--jobs", "2"], "name their seeds with --seeds"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(args, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "catch", *args]) == 2
    assert sentence in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_another_experiment_in_the_same_directory_is_refused(fake_training, experiment, tmp_path):
    seeds.train_seeds(experiment, [0], tmp_path)
    before = modification_times(tmp_path)
    other = replace(experiment, algo=replace(experiment.algo, discount=0.5))
    with pytest.raises(UserError, match="holds another experiment"):
        seeds.train_seeds(other, [0, 1], tmp_path)
    with pytest.raises(UserError, match="is a single run"):
        seeds.train_seeds(experiment, [0], tmp_path / "seed0")
    assert modification_times(tmp_path) == before


# -- real training -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Two seeds whose parent process is killed; then the same command trains them to their end."""
    root = tmp_path_factory.mktemp("seeds") / "catch"
    args = ["train", "catch", *QUICK, "--seeds", "2", "--jobs", "2", "--run", str(root), "--frames"]
    parent = subprocess.Popen([sys.executable, "-m", "bestiary", *args, "100M"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not all((root / f"seed{s}" / "best").exists() for s in (0, 1)):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while True:
        try:
            assert is_unlocked(root)
            break
        except UserError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    frames = [int(Run(root / f"seed{s}").find().name) for s in (0, 1)]
    assert main([*args, str(max(frames) + 200)]) == 0
    for seed, at in enumerate(frames):
        assert f"continues at {count(at)} frames" in (root / f"seed{seed}" / executor.OUTPUT).read_text()
    return root


def test_seeds_save_when_their_parent_is_killed_and_resume_later(trained):
    rows = json.loads((trained / "seeds.json").read_text())["seeds"]
    assert [(row["seed"], row["finished"]) for row in rows] == [(0, True), (1, True)]
    for seed in (0, 1):
        experiment = Run(trained / f"seed{seed}").experiment()
        assert experiment.seed == seed and experiment.runtime.threads == 1


def test_a_directory_of_seeds_is_evaluated_with_one_command(trained, capsys):
    assert main(["eval", str(trained), "--episodes", "6", "--mode", "greedy", "--checkpoint", "best"]) == 0
    assert "greedy score" in capsys.readouterr().out
    (file,) = trained.glob("eval-*.json")
    assert file.name == "eval-best-1x6-seed0-greedy.json"
    result = json.loads(file.read_text())
    means = [
        json.loads(next(trained.glob(f"seed{s}/eval-*.json")).read_text())["greedy"]["score"]["mean"] for s in (0, 1)
    ]
    assert [row["greedy"]["score"] for row in result["seeds"]] == means
    assert result["greedy"]["score"]["mean"] == pytest.approx(sum(means) / 2)
    assert [result["greedy"]["score"][k] for k in ("ci95_low", "ci95_high")] == sorted(means)  # of two: both


def test_a_seed_without_a_checkpoint_is_left_out_and_named(trained, capsys, tmp_path):
    (tmp_path / "seed2").symlink_to(trained / "seed0")
    Run.create(tmp_path / "seed10", Run(trained / "seed0").experiment())
    assert [path.name for path in seed_runs(tmp_path)] == ["seed2", "seed10"]
    assert main(["eval", str(tmp_path), "--episodes", "4", "--mode", "greedy"]) == 2
    printed = capsys.readouterr()
    assert "seed10 is left out" in printed.out and "seed2" in printed.out
    assert "left out: seed10" in printed.err


def test_eval_takes_the_environment_from_a_directory_of_seeds(trained):
    chosen = read_eval([str(trained), "--env.rows", "6"])
    assert chosen.run == trained and chosen.protocol.env == Catch(rows=6, columns=5)


def test_commands_that_training_seeds_prints_can_be_run(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "catch", *QUICK, "--seeds", "2", "--run", str(trained), "--frames", "200"]) == 0
    hints = re.findall(r"^  bestiary (.*?)(?:\s{2,}.*)?$", capsys.readouterr().out, re.M)
    assert [hint.split()[0] for hint in hints] == ["eval", "plot"]
    for hint in hints:
        assert main(shlex.split(hint)) == 0
    assert main(["plot", *map(str, trained.glob("seed*"))]) == 0  # as the shell expands DIR/seed*
    assert f"{trained / 'seeds.csv'} is neither a run nor a directory of seeds: skipped" in capsys.readouterr().err
