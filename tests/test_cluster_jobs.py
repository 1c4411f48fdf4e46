"""Many runs on a Ray cluster: each a process on some node, retried when it is lost, and none left behind."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import fake_run, ray_nodes

from bestiary.cli.main import main
from bestiary.config.experiment import Evaluation, Experiment
from bestiary.errors import UserError
from bestiary.launch import executor, seeds
from bestiary.launch import ray_executor as cluster_jobs
from bestiary.launch.job_supervisor import JobSupervisor
from bestiary.launch.ray_executor import NODE_LOST, RayExecutor
from bestiary.presets import preset
from bestiary.reward_hacking import study
from bestiary.runtime.ray import cluster as ray_cluster
from bestiary.training.run import Run
from bestiary.training.session import train

pytest.importorskip("ray")

QUICK = ["--runtime.envs", "4", "--algo.replay.batch-size", "4", "--log.no-tensorboard"]
QUICK += ["--evaluation.every", "200", "--evaluation.episodes", "4"]
LONG = 100_000
SLOW = 0.05  # seconds per evaluation


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayExecutor]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with RayExecutor() as found:
            found.max_workers(None, preset("catch"))
            yield found
    for number, handler in before.items():  # `main` takes them for itself
        signal.signal(number, handler)


@pytest.fixture
def joined(cluster, monkeypatch):
    """Commands find the cluster of these tests instead of starting their own."""
    monkeypatch.setattr(cluster_jobs, "connect", lambda address: ray_cluster.alive_nodes())
    monkeypatch.setattr(cluster_jobs, "disconnect", lambda: None)


@pytest.fixture
def pretending(monkeypatch) -> Callable[[float], None]:
    """Processes that only pretend to train, at a pace: the rest is real."""

    def at(lr_schedule: float) -> None:
        words = [sys.executable, fake_run.__file__]
        monkeypatch.setattr(executor, "command", lambda path: [*words, str(path), str(lr_schedule)])

    at(0)
    return at


@pytest.fixture
def experiment() -> Experiment:
    return replace(preset("catch"), frames=400, evaluation=Evaluation(every=100, episodes=4))


def processes(path: Path) -> list[int]:
    """Whoever works on a run: the process, after the one in between."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(path).encode() in words and entry.name.isdigit():
            found.append((b"-I" not in words, int(entry.name)))
    return [number for _, number in sorted(found)]


def parent(number: int) -> int:
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])


def once_begun(path: Path, act: Callable[[], None]) -> None:
    """Meanwhile, as soon as a run has written something."""

    def watch() -> None:
        while not (path / "metrics.csv").exists():
            time.sleep(0.02)
        act()

    threading.Thread(target=watch, daemon=True).start()


def within(seconds: float, true: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.05)
    return true()


def saved(path: Path) -> list[int]:
    return [int(one.name) for one in Run(path).saved()]


def test_what_comes_out_is_what_comes_out_of_local_processes(cluster, pretending, experiment, tmp_path):
    here = seeds.train_seeds(experiment, [1, 2, 8], tmp_path / "here")
    there = seeds.train_seeds(experiment, [1, 2, 8], tmp_path / "there", executor=cluster)
    assert here == there and here["over_seeds"]["score"]["last"]["n"] == 3


def test_a_run_whose_process_is_killed_goes_on_and_it_is_told(cluster, pretending, experiment, tmp_path):
    pretending(SLOW)
    once_begun(tmp_path / "seed3", lambda: os.kill(processes(tmp_path / "seed3")[-1], signal.SIGKILL))
    told: list[str] = []
    result = seeds.train_seeds(replace(experiment, frames=1000), [3], tmp_path, log=told.append, executor=cluster)
    assert "seed3 is restarted, retry 1 of 3: it was killed by SIGKILL (out of memory?)" in told
    assert result["seeds"][0]["finished"] and result["seeds"][0]["problem"] is None


@pytest.mark.parametrize(
    ("keeper", "reason"),
    [(True, NODE_LOST), (False, "its supervisor failed: the process that started it was killed")],
)
def test_a_run_that_nobody_keeps_saves_and_goes_on(keeper, reason, cluster, pretending, experiment, tmp_path):
    pretending(SLOW)
    first: list[int] = []

    def strike() -> None:
        first.extend(processes(tmp_path / "seed3"))
        os.kill(parent(first[0]) if keeper else first[0], signal.SIGKILL)

    once_begun(tmp_path / "seed3", strike)
    told: list[str] = []
    seeds.train_seeds(replace(experiment, frames=2000), [3], tmp_path, log=told.append, executor=cluster)
    assert f"seed3 is restarted, retry 1 of 3: {reason}" in told
    assert len(first) == 2
    assert within(10, lambda: not set(first) & {one.pid for one in ray_nodes.processes()})
    at, end = saved(tmp_path / "seed3")
    assert 0 < at < end == 2000


def test_a_run_that_is_killed_every_time_is_given_up(cluster, experiment, tmp_path, monkeypatch):
    kill = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(executor, "command", lambda path: [sys.executable, "-c", kill, str(path)])
    told: list[str] = []
    (row,) = seeds.train_seeds(experiment, [3], tmp_path, log=told.append, executor=cluster)["seeds"]
    assert row["problem"] == "it was killed by SIGKILL (out of memory?)"
    assert [sum(f"retry {n} of 3" in line for line in told) for n in (1, 2, 3, 4)] == [1, 1, 1, 0]


def test_a_run_that_fails_by_itself_has_a_second_chance_and_the_others_go_on(cluster, pretending, experiment, tmp_path):
    told: list[str] = []
    rows = seeds.train_seeds(experiment, [13, 14], tmp_path, log=told.append, executor=cluster)["seeds"]
    assert [row["problem"] for row in rows] == ["ValueError: sensor unplugged", None] and rows[1]["finished"]
    assert "seed13 is restarted, retry 1 of 1: ValueError: sensor unplugged" in told
    assert "seed 13 failed: ValueError: sensor unplugged" in told


def test_asked_to_stop_runs_save_and_those_that_wait_for_a_core_do_not_begin(cluster, pretending, experiment, tmp_path):
    pretending(SLOW)
    all_cores = max(int(node.cpus) for node in ray_cluster.alive_nodes())
    long = replace(experiment, frames=LONG, runtime=replace(experiment.runtime, threads=all_cores))
    asked = threading.Event()
    paths = [tmp_path / "seed3", tmp_path / "seed4"]
    for path in paths:  # either may be the first
        once_begun(path, asked.set)
    seeds.train_seeds(long, [3, 4], tmp_path, jobs=2, stop=asked.is_set, executor=cluster)
    executor.lock_directory(tmp_path).close()  # everyone who works there holds it
    assert not processes(paths[0]) + processes(paths[1])
    waited, begun = sorted(paths, key=lambda path: len(saved(path)))
    (reached,) = saved(begun)
    assert 0 < reached < LONG and not saved(waited) and not (waited / executor.OUTPUT).exists()
    pretending(0)
    shorter = replace(long, frames=reached + 200)
    result = seeds.train_seeds(shorter, [3, 4], tmp_path, jobs=2, executor=cluster)
    assert [row["finished"] for row in result["seeds"]] == [True, True]
    assert saved(begun) == [reached, reached + 200]


def test_a_run_begins_only_when_its_last_process_has_left(pretending, experiment, tmp_path):
    run = Run.create(tmp_path / "seed3", replace(experiment, seed=3)).path
    words = [fake_run.__file__, str(run)]
    with ThreadPoolExecutor() as pool:
        with executor.lock_directory(run):
            code = pool.submit(JobSupervisor().run, words, str(run), str(tmp_path), executor.OUTPUT, {}, str(tmp_path))
            time.sleep(1)
            assert not (run / executor.OUTPUT).exists() and not code.done()
        assert code.result(timeout=30) == 0 and saved(run) == [400]


def test_nobody_else_works_there_meanwhile(cluster, pretending, experiment, tmp_path):
    pretending(SLOW)
    asked, refused = threading.Event(), []

    def come_too() -> None:
        try:
            executor.lock_directory(tmp_path).close()
        except UserError as e:
            refused.append(str(e))
        asked.set()

    once_begun(tmp_path / "seed3", come_too)
    seeds.train_seeds(replace(experiment, frames=LONG), [3], tmp_path, stop=asked.is_set, executor=cluster)
    assert refused and "is in use by another process" in refused[0]


def test_runs_save_and_leave_when_the_command_is_killed(cluster, tmp_path):
    import ray

    address = ray.get_runtime_context().gcs_address
    words = ["train", "catch", *QUICK, "--frames", "100M", "--seeds", "1", "--executor", f"ray:{address}"]
    script = f"""
import sys
from bestiary.launch import executor
from bestiary.cli.main import main
executor.command = lambda path: [sys.executable, {fake_run.__file__!r}, str(path), "0.05"]
main({[*words, "--run", str(tmp_path)]!r})
"""
    command = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    try:
        assert within(60, lambda: (tmp_path / "seed0" / "metrics.csv").exists())
    finally:
        command.kill()
        command.wait()
    assert within(20, lambda: not processes(tmp_path / "seed0"))
    executor.lock_directory(tmp_path).close()
    assert 0 < saved(tmp_path / "seed0")[-1] < 100_000_000


def test_a_real_run_is_the_same_there_and_a_command_is_all_it_takes(joined, tmp_path):
    words = ["train", "catch", *QUICK, "--frames", "400", "--seeds", "5..5", "--executor", "ray"]
    assert main([*words, "--run", str(tmp_path / "there")]) == 0
    train(Run(tmp_path / "there" / "seed5").experiment(), tmp_path / "here")
    here, there = (tmp_path / where / "evaluations.csv" for where in ("here", "there/seed5"))
    assert here.read_text() == there.read_text() and here.read_text().count("\n") > 1


def test_a_search_and_a_study_use_the_cluster_too(cluster, pretending, experiment, tmp_path):
    pytest.importorskip("optuna")
    from bestiary.launch.sweep import sweep
    from bestiary.launch.sweep_settings import SweepSettings

    told = sweep(experiment, "lr", tmp_path / "search", SweepSettings(trials=2, seeds_per_trial=1), executor=cluster)
    assert [trial.state for trial in told] == ["complete", "complete"]
    river = replace(preset("riverraid"), frames=400, evaluation=Evaluation(every=100, episodes=4))
    planned = study.plan(river, ["fuel:10"], [256], [1, 2], [0], 2, tmp_path / "study")
    assert study.train_all(planned, None, lambda text: None, lambda: False, cluster) == {}
    assert all(map(executor.finished, planned))


# -- what cannot be ---------------------------------------------------------------------------------------


def test_a_directory_that_a_node_cannot_see_is_refused(cluster, pretending, experiment, tmp_path, monkeypatch):
    def blind(path: str | None) -> tuple[dict[str, str], bool]:
        from bestiary.config.versions import versions

        return versions(), False

    monkeypatch.setattr(ray_cluster, "_probe", blind)
    with pytest.raises(UserError, match=r"cannot write to .*: choose a directory that all nodes share"):
        seeds.train_seeds(experiment, [0], tmp_path, executor=cluster)
    executor.lock_directory(tmp_path).close()
    assert not (tmp_path / "seed0").exists()


def test_more_threads_than_any_node_has_are_refused(cluster, experiment, tmp_path):
    wide = replace(experiment, runtime=replace(experiment.runtime, threads=10_000))
    with pytest.raises(UserError, match=r"runtime\.threads=10000 is more than any node of the cluster has"):
        seeds.train_seeds(wide, [0], tmp_path / "wide", executor=cluster)
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--seeds", "2", "--executor", "here"], "--executor here should be local, ray, ray:auto or ray:HOST:PORT"),
        (
            ["--seeds", "2", "--executor=ray:somewhere"],
            "--executor ray:somewhere should be local, ray, ray:auto or ray:HOST:PORT",
        ),
        (["--seeds", "2", "--executor="], "should be local, ray, ray:auto or ray:HOST:PORT"),
        (["--seeds", "2", "--runtime", "ray:auto"], "many runs on a Ray cluster are --executor ray:auto"),
        (["--executor", "ray"], "name their seeds with --seeds; runtime:ray spreads one"),
        (["runtime:ray", "--seeds", "2", "--executor", "ray"], "leave out runtime:ray"),
        (["--seeds", "2", "--jobs", "0", "--executor=ray"], "jobs=0 must be at least 1"),
        (["--seeds", "2", "--executor", "ray:127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_wrong_words_are_refused_before_any_work(args, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "catch", *args]) == 2
    assert sentence in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_without_ray_the_extra_is_named(capsys, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "ray" else find(name, *args))
    assert main(["train", "catch", "--seeds", "2", "--executor", "ray", "--run", str(tmp_path / "new")]) == 2
    assert 'the extra "ray"' in capsys.readouterr().err and not (tmp_path / "new").exists()
