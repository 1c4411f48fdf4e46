"""Runs as jobs of a Ray cluster: each is a process on a node, restarted when it is lost; none outlives the command."""

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
    for number, handler in before.items():  # `main` replaces them
        signal.signal(number, handler)


@pytest.fixture
def shared_cluster(cluster, monkeypatch):
    """Commands use the cluster of these tests instead of starting their own."""
    monkeypatch.setattr(cluster_jobs, "connect", lambda address: ray_cluster.alive_nodes())
    monkeypatch.setattr(cluster_jobs, "disconnect", lambda: None)


@pytest.fixture
def fake_runs(monkeypatch) -> Callable[[float], None]:
    """Replace training by a fake process; the returned function sets its seconds per evaluation (default 0)."""

    def set_speed(seconds_per_evaluation: float) -> None:
        words = [sys.executable, fake_run.__file__]
        monkeypatch.setattr(executor, "command", lambda path: [*words, str(path), str(seconds_per_evaluation)])

    set_speed(0)
    return set_speed


@pytest.fixture
def experiment() -> Experiment:
    return replace(preset("catch"), frames=400, evaluation=Evaluation(every=100, episodes=4))


def processes(path: Path) -> list[int]:
    """Ids of the processes of a run: its supervisor first, then the process that trains."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(path).encode() in words and entry.name.isdigit():
            found.append((b"-I" not in words, int(entry.name)))
    return [number for _, number in sorted(found)]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def when_started(path: Path, action: Callable[[], None]) -> None:
    """Call a function in another thread as soon as a run has written metrics."""

    def watch() -> None:
        while not (path / "metrics.csv").exists():
            time.sleep(0.02)
        action()

    threading.Thread(target=watch, daemon=True).start()


def wait_until(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds, at most so many seconds; returns whether it does."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def checkpoints(path: Path) -> list[int]:
    """Frames of the checkpoints of a run."""
    return [int(one.name) for one in Run(path).saved()]


def test_results_equal_those_of_local_processes(cluster, fake_runs, experiment, tmp_path):
    local = seeds.train_seeds(experiment, [1, 2, 8], tmp_path / "local")
    remote = seeds.train_seeds(experiment, [1, 2, 8], tmp_path / "remote", executor=cluster)
    assert local == remote and local["over_seeds"]["score"]["last"]["n"] == 3


def test_a_run_whose_process_is_killed_is_restarted_and_reported(cluster, fake_runs, experiment, tmp_path):
    fake_runs(SLOW)
    when_started(tmp_path / "seed3", lambda: os.kill(processes(tmp_path / "seed3")[-1], signal.SIGKILL))
    messages: list[str] = []
    result = seeds.train_seeds(replace(experiment, frames=1000), [3], tmp_path, log=messages.append, executor=cluster)
    assert "seed3 is restarted, retry 1 of 3: it was killed by SIGKILL (out of memory?)" in messages
    assert result["seeds"][0]["finished"] and result["seeds"][0]["problem"] is None


@pytest.mark.parametrize(
    ("kill_supervisor", "reason"),
    [(True, NODE_LOST), (False, "its supervisor failed: the process that started it was killed")],
)
def test_a_run_without_its_supervisor_saves_and_is_restarted(
    kill_supervisor, reason, cluster, fake_runs, experiment, tmp_path
):
    fake_runs(SLOW)
    first: list[int] = []

    def kill() -> None:
        first.extend(processes(tmp_path / "seed3"))
        os.kill(parent(first[0]) if kill_supervisor else first[0], signal.SIGKILL)

    when_started(tmp_path / "seed3", kill)
    messages: list[str] = []
    seeds.train_seeds(replace(experiment, frames=2000), [3], tmp_path, log=messages.append, executor=cluster)
    assert f"seed3 is restarted, retry 1 of 3: {reason}" in messages
    assert len(first) == 2
    assert wait_until(10, lambda: not set(first) & {one.pid for one in ray_nodes.processes()})
    at, end = checkpoints(tmp_path / "seed3")
    assert 0 < at < end == 2000


def test_a_run_that_is_killed_every_time_is_given_up(cluster, experiment, tmp_path, monkeypatch):
    kill = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(executor, "command", lambda path: [sys.executable, "-c", kill, str(path)])
    messages: list[str] = []
    (row,) = seeds.train_seeds(experiment, [3], tmp_path, log=messages.append, executor=cluster)["seeds"]
    assert row["problem"] == "it was killed by SIGKILL (out of memory?)"
    assert [sum(f"retry {n} of 3" in line for line in messages) for n in (1, 2, 3, 4)] == [1, 1, 1, 0]


def test_a_run_that_raises_is_retried_once_and_the_others_continue(cluster, fake_runs, experiment, tmp_path):
    messages: list[str] = []
    rows = seeds.train_seeds(experiment, [13, 14], tmp_path, log=messages.append, executor=cluster)["seeds"]
    assert [row["problem"] for row in rows] == ["ValueError: sensor unplugged", None] and rows[1]["finished"]
    assert "seed13 is restarted, retry 1 of 1: ValueError: sensor unplugged" in messages
    assert "seed 13 failed: ValueError: sensor unplugged" in messages


def test_after_a_stop_running_jobs_save_and_queued_ones_do_not_start(cluster, fake_runs, experiment, tmp_path):
    fake_runs(SLOW)
    all_cores = max(int(node.cpus) for node in ray_cluster.alive_nodes())
    long = replace(experiment, frames=LONG, runtime=replace(experiment.runtime, threads=all_cores))
    stop = threading.Event()
    paths = [tmp_path / "seed3", tmp_path / "seed4"]
    for path in paths:  # either may be the first
        when_started(path, stop.set)
    seeds.train_seeds(long, [3, 4], tmp_path, jobs=2, stop=stop.is_set, executor=cluster)
    executor.lock_directory(tmp_path).close()  # every process of a job holds this lock
    assert not processes(paths[0]) + processes(paths[1])
    queued, started = sorted(paths, key=lambda path: len(checkpoints(path)))
    (reached,) = checkpoints(started)
    assert 0 < reached < LONG and not checkpoints(queued) and not (queued / executor.OUTPUT).exists()
    fake_runs(0)
    shorter = replace(long, frames=reached + 200)
    result = seeds.train_seeds(shorter, [3, 4], tmp_path, jobs=2, executor=cluster)
    assert [row["finished"] for row in result["seeds"]] == [True, True]
    assert checkpoints(started) == [reached, reached + 200]


def test_a_run_starts_only_after_its_previous_process_has_ended(fake_runs, experiment, tmp_path):
    run = Run.create(tmp_path / "seed3", replace(experiment, seed=3)).path
    words = [fake_run.__file__, str(run)]
    with ThreadPoolExecutor() as pool:
        with executor.lock_directory(run):
            code = pool.submit(JobSupervisor().run, words, str(run), str(tmp_path), executor.OUTPUT, {}, str(tmp_path))
            time.sleep(1)
            assert not (run / executor.OUTPUT).exists() and not code.done()
        assert code.result(timeout=30) == 0 and checkpoints(run) == [400]


def test_the_directory_of_running_jobs_is_locked(cluster, fake_runs, experiment, tmp_path):
    fake_runs(SLOW)
    stop, refused = threading.Event(), []

    def try_to_lock() -> None:
        try:
            executor.lock_directory(tmp_path).close()
        except UserError as e:
            refused.append(str(e))
        stop.set()

    when_started(tmp_path / "seed3", try_to_lock)
    seeds.train_seeds(replace(experiment, frames=LONG), [3], tmp_path, stop=stop.is_set, executor=cluster)
    assert refused and "is in use by another process" in refused[0]


def test_jobs_save_and_end_when_the_command_is_killed(cluster, tmp_path):
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
        assert wait_until(60, lambda: (tmp_path / "seed0" / "metrics.csv").exists())
    finally:
        command.kill()
        command.wait()
    assert wait_until(20, lambda: not processes(tmp_path / "seed0"))
    executor.lock_directory(tmp_path).close()
    assert 0 < checkpoints(tmp_path / "seed0")[-1] < 100_000_000


def test_a_real_run_on_the_cluster_equals_a_local_one(shared_cluster, tmp_path):
    words = ["train", "catch", *QUICK, "--frames", "400", "--seeds", "5..5", "--executor", "ray"]
    assert main([*words, "--run", str(tmp_path / "remote")]) == 0
    train(Run(tmp_path / "remote" / "seed5").experiment(), tmp_path / "local")
    local, remote = (tmp_path / run / "evaluations.csv" for run in ("local", "remote/seed5"))
    assert local.read_text() == remote.read_text() and local.read_text().count("\n") > 1


def test_a_sweep_and_a_study_can_use_the_cluster(cluster, fake_runs, experiment, tmp_path):
    pytest.importorskip("optuna")
    from bestiary.launch.sweep import sweep
    from bestiary.launch.sweep_settings import SweepSettings

    trials = sweep(experiment, "lr", tmp_path / "sweep", SweepSettings(trials=2, seeds_per_trial=1), executor=cluster)
    assert [trial.state for trial in trials] == ["complete", "complete"]
    river = replace(preset("riverraid"), frames=400, evaluation=Evaluation(every=100, episodes=4))
    plan = study.StudyPlan(river, ["fuel:10"], [256], [1, 2], [0], 2)
    planned = study.plan_runs(plan, tmp_path / "study")
    assert study.train_all(planned, None, lambda text: None, lambda: False, cluster) == {}
    assert all(map(executor.finished, planned))


# -- bad input -------------------------------------------------------------------------------------------


def test_a_directory_that_a_node_cannot_see_is_refused(cluster, fake_runs, experiment, tmp_path, monkeypatch):
    def probe(path: str | None) -> tuple[dict[str, str], bool]:
        from bestiary.config.versions import versions

        return versions(), False

    monkeypatch.setattr(ray_cluster, "_probe", probe)
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
        (
            ["--seeds", "2", "--executor", "nowhere"],
            "--executor nowhere should be local, ray, ray:auto or ray:HOST:PORT",
        ),
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
def test_wrong_arguments_are_refused_before_any_work(args, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "catch", *args]) == 2
    assert sentence in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_without_ray_the_extra_is_named(capsys, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "ray" else find(name, *args))
    assert main(["train", "catch", "--seeds", "2", "--executor", "ray", "--run", str(tmp_path / "new")]) == 2
    assert 'the extra "ray"' in capsys.readouterr().err and not (tmp_path / "new").exists()
